"""What a demo run tells: one row a transition, as a table for people and as JSON for programs.

The element change rate counts unique source elements (N_chg / N_src), the canonical density counts destinations whose
canonical bits changed (|D_chg| / N); they are printed apart, as Appendix D defines them.

Paper: Appendix C (timed window), Appendix D (change rate, density, payload bytes)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec


@dataclass(frozen=True, kw_only=True)
class AttemptRow:
    """One attempt of a transition."""

    id: int
    mode: str
    """xor, overwrite, dense or finish."""
    outcome: str
    """committed or failed."""
    reason: str = ""
    """Why it failed."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """An engine instance that was killed in the middle of an attempt."""

    instance: str
    attempt: int
    applied_items: dict[str, int]
    """Items that each of its ranks had applied, by its trace; none of them had flushed."""
    mixed_bits: dict[str, list[int]] = field(default_factory=dict)
    """For each surviving rank, before the retry: bits that differ from the old and from the new version."""


@dataclass(frozen=True, kw_only=True)
class TransitionRow:
    """One transition. Payload figures are those of the committed attempt."""

    version: int
    gate: str
    attempts: list[AttemptRow]
    changed_elements: int
    """N_chg."""
    total_elements: int
    """N_src."""
    emitted_destinations: int
    """|D|."""
    changed_destinations: int
    """|D_chg|."""
    canonical_elements: int
    """N."""
    xor_items: int
    overwrite_items: int
    payloads: int
    payload_bytes: int
    checkpoint_bytes: int
    baseline_bytes: int
    seconds: dict[str, float]
    """`refit` is t1 - t0 of the committed attempt without post-apply checks; the others are stages, which overlap."""
    waits: dict[str, int]
    """How often each stage waited, over all nodes: for room in the queue behind it; `publish` for something to send."""
    loss: float
    """Mean training loss of the step behind this version."""
    restored: list[str]
    """Receivers that were restored densely to this version after the commit of the version before."""
    kill: Kill | None
    """The kill of this transition, if there was one."""
    receivers: int
    """Receivers that the commit record requires."""
    mismatched_bits: int
    """Over every stored bit of every parameter and buffer on every rank, and of the trackers."""

    @property
    def change_rate(self) -> float:
        """N_chg / N_src."""
        return self.changed_elements / max(1, self.total_elements)

    @property
    def density(self) -> float:
        """|D_chg| / N."""
        return self.changed_destinations / max(1, self.canonical_elements)


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """A whole run."""

    ok: bool
    model: str
    transitions: list[TransitionRow] = field(default_factory=list)
    engine: str = "reference"
    prompt: str = ""
    completions: list[dict[str, str]] = field(default_factory=list)
    """What each instance answered to the prompt, by version from 0; empty where no engine reads text."""

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")


_HEADINGS = (
    "version", "gate", "attempts", "N_src", "N_chg", "rate", "|D|", "|D_chg|", "density", "XOR items", "OW items",
    "payloads", "payload MB", "of ckpt", "refit s", "construct s", "apply s", "baseline", "receivers", "restored",
    "mismatched bits",
)  # fmt: skip


def table(report: DemoReport) -> str:
    """The rows as an aligned text table."""
    rows = [_cells(row) for row in report.transitions]
    widths = [max(len(cell) for cell in column) for column in zip(_HEADINGS, *rows, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in (_HEADINGS, *rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    told = [
        f"version {version}: {instance} completes {report.prompt!r} with {text!r}"
        for version, answers in enumerate(report.completions)
        for instance, text in answers.items()
    ]
    return "\n".join([*lines, *(line for row in report.transitions for line in _story(row)), *told])


def _story(row: TransitionRow) -> list[str]:
    """What else there is to tell: seconds by stage, failures, a kill, mixed storage."""
    stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in row.seconds.items())
    waits = ", ".join(f"{stage} {count}" for stage, count in row.waits.items()) or "none"
    lines = [f"version {row.version}: seconds on the slowest node: {stages}; waits: {waits}"]
    lines += [
        f"version {row.version}: attempt {attempt.id} ({attempt.mode}) failed: {attempt.reason}"
        for attempt in row.attempts
        if attempt.outcome == "failed"
    ]
    if row.kill is not None:
        applied = ", ".join(f"{rank} after {count} items" for rank, count in row.kill.applied_items.items())
        lines.append(f"version {row.version}: {row.kill.instance} was killed in attempt {row.kill.attempt}: {applied}")
        lines += [
            f"version {row.version}: {rank} held mixed storage before the retry: {old:,} bits from the old version, "
            f"{new:,} from the new"
            for rank, (old, new) in row.kill.mixed_bits.items()
        ]
    return lines


def _cells(row: TransitionRow) -> tuple[str, ...]:
    attempts = ", ".join(f"{attempt.id} {attempt.mode} {attempt.outcome}" for attempt in row.attempts)
    return (
        str(row.version),
        row.gate,
        attempts,
        f"{row.total_elements:,}",
        f"{row.changed_elements:,}",
        f"{row.change_rate:.3%}",
        f"{row.emitted_destinations:,}",
        f"{row.changed_destinations:,}",
        f"{row.density:.3%}",
        str(row.xor_items),
        str(row.overwrite_items),
        str(row.payloads),
        f"{row.payload_bytes / 1e6:.3f}",
        f"{row.payload_bytes / max(1, row.checkpoint_bytes):.3%}",
        f"{row.seconds.get('refit', 0.0):.2f}",
        f"{row.seconds.get('construct', 0.0):.2f}",
        f"{row.seconds.get('apply', 0.0):.2f}",
        f"{row.baseline_bytes / max(1, row.checkpoint_bytes):.2f}x",
        str(row.receivers),
        ", ".join(row.restored) or "-",
        str(row.mismatched_bits),
    )
