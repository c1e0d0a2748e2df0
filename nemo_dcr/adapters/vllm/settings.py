"""What a user tells one engine instance about its part in refits, as plain values.

They come in the `init_info` of vLLM's `/init_weight_transfer_engine` (or `LLM.init_weight_transfer_engine`) and are the
same on every rank. Nothing here imports vLLM, so that drivers run without it.
Credentials of a payload store never stand here: every rank finds them as boto3 does.

Paper: Section 7 (engines)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import InstanceId
from nemo_dcr.runtime.chronicle import DIRECTORY as CHRONICLE
from nemo_dcr.runtime.rpc import LOOPBACK, PLAINTEXT
from nemo_dcr.transport.relay.keys import Security, read_security

BACKEND = "nemo_dcr"
"""The name of the weight-transfer engine in vLLM's registry."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One engine instance in one run. Raises: InvalidConfig for a value that cannot work."""

    instance: str
    """Name of this engine, unique in the run."""
    directory: str
    """Run directory: every rank publishes its control address in `addresses`, its trace in `traces`, and times in
    `chronicle`."""
    store: str
    """URL of the payload store (`nemo_dcr.transport.urls`), or its folder."""
    run: str
    """Name of the run in the store."""
    prove_load: bool = True
    """Load the start checkpoint once more through a digest, so that the first record needs no payloads."""
    post_apply_check: bool = False
    """Read every written tensor back and compare its stored bits."""
    listen: str = LOOPBACK
    """Where every rank answers control calls; beyond loopback it needs `keys`."""
    keys: str = ""
    """Key directory on the ranks' hosts (`nemo-dcr keys new`), whose list names the coordinator's key."""
    metrics: str = ""
    """`PORT` or `HOST:PORT` at which rank 0 answers Prometheus, rank r at the r-th port after it; empty for none."""

    def __post_init__(self) -> None:
        for field in ("instance", "directory", "store", "run", "listen"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise InvalidConfig(f"init_info.{field}", f"{value!r} is not a name; give a string")
        if "/" in self.instance:
            raise InvalidConfig("init_info.instance", f"{self.instance!r} holds a slash, which divides name and rank")
        for field in ("directory", "store"):
            value = getattr(self, field)
            if not (field == "store" and "://" in value) and not Path(value).is_dir():
                raise InvalidConfig(f"init_info.{field}", f"{value} is not a directory on this host")

    @property
    def name(self) -> InstanceId:
        """The instance as the protocol names it."""
        return InstanceId(self.instance)

    @property
    def transport_url(self) -> str:
        """The payload store as `open_transport` takes it."""
        return self.store if "://" in self.store else Path(self.store).resolve().as_uri()

    @property
    def addresses(self) -> Path:
        """Where ranks publish their control addresses."""
        return Path(self.directory) / "addresses"

    @property
    def traces(self) -> Path:
        """Where ranks write their traces."""
        return Path(self.directory) / "traces"

    @property
    def chronicle(self) -> Path:
        """Where ranks write what they lived through, with times."""
        return Path(self.directory) / CHRONICLE

    @property
    def security(self) -> Security:
        """What a rank proves itself with and whom it admits. Raises: InvalidConfig."""
        return read_security(Path(self.keys)) if self.keys else PLAINTEXT

    def init_info(self) -> dict[str, Any]:
        """The same as the JSON object that vLLM hands to every rank."""
        return asdict(self)
