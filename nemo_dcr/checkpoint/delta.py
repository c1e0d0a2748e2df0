"""A delta directory, and a chain of them: which bytes a tensor of the target is made of.

A delta is a manifest, payload files in wire format 1 and the carried files. Opening one checks every byte of it against
the manifest, so that a damaged or foreign file is refused before anything is written. In a chain the base of each delta
is the target of the one before it; a tensor of the last target is made from its latest dense item, or from the base,
and the XOR items after that.
One decoded payload of each delta is held. Tensors that are asked for in layout order decode each payload once.
Not handled: what is done with the tensors (checkpoint/target.py).

Paper: Section 6.1 (items), Appendix D (payloads)   Conditions: LC5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from nemo_dcr import bits
from nemo_dcr.bits import Words
from nemo_dcr.checkpoint.digests import file_digest
from nemo_dcr.checkpoint.directory import Checkpoint
from nemo_dcr.checkpoint.manifest import FILES, MANIFEST, FileRow, Manifest, payload_file, payload_key, read_manifest
from nemo_dcr.checkpoint.progress import Progress
from nemo_dcr.codec.payload import VerifiedPayload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import BaseMismatch, CheckpointInvalid, DeltaInvalid, PayloadCorrupt
from nemo_dcr.kernels import plain

_BODY_FACTOR = 12
"""Bytes of a body for each byte of its largest tensor: one-byte elements with eight-byte gaps, and room."""


class Delta:
    """One delta directory; the manifest is checked, payloads and files are checked by `check`."""

    def __init__(self, directory: Path) -> None:
        """Open a delta. Raises: DeltaInvalid when the manifest is missing, damaged, or not all files are there."""
        self.directory = Path(directory)
        self.manifest: Manifest = read_manifest(self.directory / MANIFEST)
        table = self.manifest.layout
        self._table = {name: tensor.stored for name, tensor in table.items()}
        largest = max((tensor.nbytes for tensor in table.values()), default=0)
        default = CodecConfig()
        self._limits = CodecConfig(max_payload_bytes=max(default.max_payload_bytes, _BODY_FACTOR * largest))
        self._held: tuple[int, dict[str, Item]] = (-1, {})
        named = {payload_file(number) for number in range(len(self.manifest.payloads))}
        foreign = sorted(path.name for path in self.directory.glob("payload-*") if path.name not in named)
        if foreign:
            raise DeltaInvalid(str(self.directory / foreign[0]), "the manifest does not name it")

    @property
    def nbytes(self) -> int:
        """Bytes of payloads and carried files."""
        carried = sum(row.nbytes for row in self.manifest.files if row.carried)
        return carried + sum(row.nbytes for row in self.manifest.payloads)

    def check(self, progress: Progress) -> None:
        """Compare every payload and carried file with the manifest. Raises: DeltaInvalid."""
        for number, row in enumerate(self.manifest.payloads):
            self.payload(number)
            progress.advance(row.nbytes)
        for file in self.manifest.files:
            if file.carried:
                path = self.carried(file)
                if not path.is_file() or path.stat().st_size != file.nbytes or _digest(path) != file.digest:
                    raise DeltaInvalid(str(path), "it is missing or its digest does not match the manifest")
                progress.advance(file.nbytes)

    def carried(self, row: FileRow) -> Path:
        """Where the bytes of a carried file are."""
        return self.directory / FILES / row.path

    def payload(self, number: int) -> VerifiedPayload:
        """Read one payload and check its digest. Raises: DeltaInvalid."""
        path, row = self.directory / payload_file(number), self.manifest.payloads[number]
        try:
            payload = verify_payload(path.read_bytes(), limits=self._limits)
        except OSError as error:
            raise DeltaInvalid(str(path), f"it cannot be read ({error.strerror})") from None
        except PayloadCorrupt as error:
            raise DeltaInvalid(str(path), str(error)) from None
        if (payload.key, payload.digest, payload.nbytes) != (payload_key(number), row.digest, row.nbytes):
            raise DeltaInvalid(str(path), "it is a payload of another delta")
        return payload

    def item(self, name: str) -> Item:
        """The item of one tensor that travels in this delta. Raises: DeltaInvalid."""
        row = self.manifest.rows[name]
        number = -1 if row.payload is None else row.payload
        if number != self._held[0]:
            self._held = (-1, {})
            self._held = (number, self._decode(number))
        try:
            item = self._held[1][name]
        except KeyError:
            raise DeltaInvalid(str(self.directory / payload_file(number)), f"it lacks {name!r}") from None
        whole = item.indices is None and item.count == item.tensor.numel
        if item.encoding is not (Encoding.OVERWRITE if row.dense else Encoding.XOR) or (row.dense and not whole):
            raise DeltaInvalid(str(self.directory / payload_file(number)), f"{name!r} is not as the manifest says")
        return item

    def _decode(self, number: int) -> dict[str, Item]:
        try:
            return {item.tensor.name: item for item in self.payload(number).decode(self._table)}
        except PayloadCorrupt as error:
            raise DeltaInvalid(str(self.directory / payload_file(number)), str(error)) from None


def _digest(path: Path) -> bytes:
    try:
        return file_digest(path)
    except CheckpointInvalid as error:
        raise DeltaInvalid(error.path, error.detail) from None


@dataclass(frozen=True, slots=True)
class Chain:
    """Deltas that follow each other; at least one."""

    links: tuple[Delta, ...]

    @property
    def base(self) -> bytes:
        """Digest of the checkpoint that the first delta needs."""
        return self.links[0].manifest.base

    @property
    def target(self) -> Manifest:
        """The manifest of the last delta, which describes the result."""
        return self.links[-1].manifest

    def steps(self, name: str) -> tuple[bool, list[Delta]]:
        """How a tensor of the target is made: whether from the base, and the deltas whose items follow, in order."""
        steps: list[Delta] = []
        for link in reversed(self.links):
            row = link.manifest.rows[name]
            if row.dense or row.payload is not None:
                steps.insert(0, link)
            if row.dense:
                return False, steps
        return True, steps

    def words(self, base: Checkpoint, name: str) -> Words:
        """The stored words of one tensor of the target; an alias of the base's file when nothing changes it.

        Raises: DeltaInvalid when an item contradicts its manifest.
        """
        from_base, steps = self.steps(name)
        stored = self.target.layout[name].stored
        words = base.words(name) if from_base else np.empty(0, dtype=bits.unsigned(stored.dtype))
        if from_base and steps:
            words = np.array(words)
        for link in steps:
            if link.manifest.rows[name].payload is None:
                continue
            item = link.item(name)
            if item.encoding is Encoding.OVERWRITE:
                # A copy, because the decoded payload keeps its own and a later XOR must not reach it.
                words = item.values if link is steps[-1] else np.array(item.values)
            else:
                at = slice(item.start, item.start + item.count) if item.indices is None else item.indices
                plain.xor_scatter(words, at, item.values)
        return words

    def holder(self, row: FileRow) -> Path | None:
        """Where the bytes of a file of the target are: in a delta, or None for the base.

        Raises: BaseMismatch when two deltas of the chain disagree about the file.
        """
        for link in reversed(self.links):
            found = next((file for file in link.manifest.files if file.path == row.path), None)
            if found is None or found.digest != row.digest:
                raise BaseMismatch(str(link.directory), f"its file {row.path} is not the one that the next delta keeps")
            if found.carried:
                return link.carried(found)
        return None

    @property
    def removed_files(self) -> set[str]:
        """Other files that some delta removes and the target does not have."""
        gone = {path for link in self.links for path in link.manifest.removed_files}
        return gone - {row.path for row in self.target.files} - set(self.target.headers)


def open_chain(directories: Sequence[Path], progress: Progress) -> Chain:
    """Open deltas that follow each other and check every byte of them.

    Raises: DeltaInvalid; BaseMismatch when a delta was not made from the target of the one before it.
    """
    links = tuple(Delta(directory) for directory in directories)
    for before, after in pairwise(links):
        if before.manifest.target != after.manifest.base:
            raise BaseMismatch(str(before.directory), f"{after.directory} needs another checkpoint before it")
    progress.stage("check the delta", sum(link.nbytes for link in links))
    for link in links:
        link.check(progress)
    return Chain(links)
