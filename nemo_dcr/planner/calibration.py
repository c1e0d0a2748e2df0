"""Rates of the machines and links that a plan is made for, and where each of them comes from.

A calibration is a TOML file: `provenance` says what was measured and what is assumed. One comes with the package,
`paper`, for the paper's testbed.
Not handled: finding the rates of a machine.

Paper: Section 8.1 (testbed, reference); Section 8.7 (finalization, what exceeds the bounds)
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path

from nemo_dcr.errors import InvalidConfig

BUNDLED = ("paper",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rates in bytes a second and times in seconds. Raises: InvalidConfig."""

    provenance: str
    """One sentence for the output of a plan."""
    construct_bytes_s: float
    """Checkpoint bytes that one owner compares, projects, encodes and compresses."""
    construct_fixed_s: float
    """Of one owner and refit, whatever its size."""
    apply_bytes_s: float
    """Payload bytes that one receiver decodes and applies."""
    relay_share: float
    """Of a node's cross-cluster flow: what the root of the relay tree takes in."""
    store_share: float
    """Of a node's cross-cluster flow: what a rollout node downloads in a refit."""
    reference_share: float
    """Of a node's cross-cluster flow: what the transfer of a full checkpoint reaches, up and down."""
    round_trip_s: float
    """Between the regions."""
    handoff_s: float
    """What startup, drain and hand-overs add, for an owner of `handoff_owner_bytes`."""
    handoff_owner_bytes: float
    handoff_power: float
    """How they grow with an owner's bytes."""
    finalize_s: float
    """Flush, acknowledgement and commit."""
    update_bytes_s: float
    """Checkpoint bytes of one owner whose baseline is updated in place."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "provenance":
                if not value:
                    raise InvalidConfig("calibration.provenance", "say where these rates come from")
            elif not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
                raise InvalidConfig(f"calibration.{each.name}", f"must be a number of at least 0, got {value!r}")
            elif value == 0 and each.name.endswith(("bytes_s", "share", "owner_bytes")):
                raise InvalidConfig(f"calibration.{each.name}", "must be positive")

    def handoffs_s(self, owner_bytes: float) -> float:
        """What startup, drain and hand-overs add for owners of this size."""
        return self.handoff_s * math.pow(owner_bytes / self.handoff_owner_bytes, self.handoff_power)


def read_calibration(name: str) -> Calibration:
    """A bundled calibration by its name, or the TOML file at a path.

    Raises: InvalidConfig when there is none, or a field is missing, unknown or out of range.
    """
    if name in BUNDLED:
        text = resources.files("nemo_dcr.planner").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(BUNDLED)
            raise InvalidConfig("--calibration", f"must be {known} or a TOML file; {name!r}: {error}") from error
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig("--calibration", f"{name} is no TOML: {error}") from error
    names = {each.name for each in fields(Calibration)}
    if wrong := sorted(found.keys() ^ names):
        detail = ", ".join(f"{each} is {'unknown' if each in found else 'missing'}" for each in wrong)
        raise InvalidConfig("--calibration", f"{name}: {detail}")
    return Calibration(**found)
