"""Reads a TOML file into one configuration, and writes one as TOML with every default.

A file has the sections `[refit]`, `[codec]`, `[queue]` and `[baseline]`, one for each class of `nemo_dcr.config`; a key
is a field, and what a file leaves out has its default. Sizes are bytes, or text with a unit of two (`"64 MiB"`). Times
are seconds, or text with a unit (`"200 ms"`). A key that is not known, a value of another kind or unit, and values that
contradict each other are refused by name, before anything of a run exists.
Not handled: URLs of payloads and record, which are arguments, and secrets, which stand in no file of ours.

Paper: Appendix C (chunk, bucket and queue sizes); Appendix B (deadlines, retries)
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

from nemo_dcr.config import MIB, BaselineConfig, CodecConfig, QueueConfig, RefitConfig
from nemo_dcr.errors import InvalidConfig

MAX_FILE_BYTES = MIB
SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
QUANTITY = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]+)")

Section: TypeAlias = RefitConfig | CodecConfig | QueueConfig | BaselineConfig
SECTIONS: Mapping[str, type[Section]] = {
    "refit": RefitConfig,
    "codec": CodecConfig,
    "queue": QueueConfig,
    "baseline": BaselineConfig,
}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """All settings of a run that are no URL. Raises: InvalidConfig for values that contradict each other."""

    refit: RefitConfig = field(default_factory=RefitConfig)
    """Deadlines, retries and gate, for the coordinator; post-apply checks, for receivers."""
    codec: CodecConfig = field(default_factory=CodecConfig)
    """How payloads are cut and coded, for owners; what they may be, for receivers."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    """Bounds between stages, for owners and receivers."""
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    """Where owners keep the committed baseline."""

    def __post_init__(self) -> None:
        refit, codec = self.refit, self.codec
        _not_above(codec, "chunk_target_bytes", "bucket_target_bytes", "a payload holds whole chunks")
        _not_above(codec, "bucket_target_bytes", "max_payload_bytes", "receivers would refuse a full payload")
        _not_above(codec, "max_metadata_bytes", "max_payload_bytes", "the metadata is a part of the payload")
        _below(refit, "heartbeat_s", "lost_after_s", "every endpoint would be lost before it is asked again")
        _below(refit, "lost_after_s", "attempt_deadline_s", "no attempt would tell which endpoint was lost")


def load_config(path: Path | str) -> Configuration:
    """The configuration of a TOML file.

    Raises: InvalidConfig that names the key, what is wrong, and what would be right.
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise InvalidConfig(str(file), f"is larger than {MAX_FILE_BYTES} bytes; name a TOML file")
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(str(file), f"cannot be read: {error.strerror}; name a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(file), f"is no TOML: {error}") from error
    return parse_config(given)


def parse_config(given: Mapping[str, Any]) -> Configuration:
    """The configuration of what a TOML file holds. Raises: InvalidConfig."""
    made: dict[str, Any] = {}
    for section, keys in given.items():
        if section not in SECTIONS:
            raise InvalidConfig(section, _unknown(section, SECTIONS, "section") + _home(section))
        if not isinstance(keys, dict):
            raise InvalidConfig(section, f"is a section; write [{section}] above its keys")
        kind = SECTIONS[section]
        known = {each.name for each in fields(kind)}
        for key in keys:
            if key not in known:
                raise InvalidConfig(f"{section}.{key}", _unknown(key, known, "key") + _home(key))
        types = get_type_hints(kind)
        made[section] = kind(**{key: _value(f"{section}.{key}", types[key], value) for key, value in keys.items()})
    return Configuration(**made)


def settings(config: Configuration) -> Iterator[tuple[str, str, Any]]:
    """Section, key and value of every setting, in the order of the classes."""
    for section in SECTIONS:
        held = getattr(config, section)
        yield from ((section, each.name, getattr(held, each.name)) for each in fields(held))


def write_config(config: Configuration) -> str:
    """TOML with every setting; `parse_config` of it gives the same configuration."""
    lines: list[str] = []
    for section, key, value in settings(config):
        if f"[{section}]" not in lines:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        lines.append(f"{key} = {written(key, value)}")
    return "\n".join(lines) + "\n"


def written(key: str, value: Any) -> str:
    """A value as TOML, a size with the largest unit that leaves it whole."""
    if isinstance(value, bool):
        return str(value).lower()
    if key.endswith("_bytes"):
        unit = max((unit for unit in SIZES if value % SIZES[unit] == 0), key=lambda unit: SIZES[unit])
        return f'"{value // SIZES[unit]} {unit}"'
    if isinstance(value, str):
        escaped = "".join(c if c >= " " and c not in '"\\\x7f' else f"\\u{ord(c):04x}" for c in value)
        return f'"{escaped}"'
    return repr(value)


def _value(name: str, kind: Any, value: Any) -> Any:
    """A TOML value as the field's type. Raises: InvalidConfig."""
    if name.endswith("_bytes"):
        return _size(name, value)
    if kind is float:
        return _seconds(name, value)
    if kind is bool:
        return _exactly(name, bool, value, "true or false")
    if kind is int:
        return _exactly(name, int, value, "a whole number")
    text = _exactly(name, str, value, "a text in quotes")
    if issubclass(kind, StrEnum):
        if text not in tuple(kind):
            raise InvalidConfig(name, f"must be {' or '.join(repr(str(each)) for each in kind)}, got {text!r}")
        return kind(text)
    if text and not Path(text).is_absolute():
        raise InvalidConfig(name, f"must be an absolute path, got {text!r}; processes have different directories")
    return text


def _exactly(name: str, kind: type, value: Any, what: str) -> Any:
    if type(value) is not kind:
        raise InvalidConfig(name, f"must be {what}, got {value!r}")
    return value


def _size(name: str, value: Any) -> int:
    example = 'bytes, such as 67108864 or "64 MiB"'
    if not isinstance(value, str):
        return int(_exactly(name, int, value, example))
    number = _quantity(name, value, SIZES, example)
    if number != int(number):
        raise InvalidConfig(name, f"{value!r} is no whole number of bytes; write {example}")
    return int(number)


def _seconds(name: str, value: Any) -> float:
    example = 'seconds, such as 2.5 or "200 ms"'
    if isinstance(value, str):
        return _quantity(name, value, TIMES, example)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidConfig(name, f"must be {example}, got {value!r}")
    return float(value)


def _quantity(name: str, value: str, units: Mapping[str, float], example: str) -> float:
    found = QUANTITY.fullmatch(value.strip())
    if found is None:
        raise InvalidConfig(name, f"must be {example}, got {value!r}")
    if found["unit"] not in units:
        hint = _nearest(found["unit"], units)
        raise InvalidConfig(name, f"{value!r} has another unit than {', '.join(units)}{hint}; write {example}")
    return float(found["number"]) * units[found["unit"]]


def _unknown(name: str, known: Any, what: str) -> str:
    return f"is no {what}{_nearest(name, known)}"


def _nearest(name: str, known: Any) -> str:
    folded = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[close[0]]!r}?" if close else f"; known are {', '.join(sorted(known))}"


def _home(key: str) -> str:
    """Where a key stands that was written into another section, or into none."""
    homes = [section for section, kind in SECTIONS.items() if key in {each.name for each in fields(kind)}]
    return f" {key} is a key of [{homes[0]}]" if homes else ""


def _not_above(section: Section, low: str, high: str, why: str) -> None:
    if getattr(section, low) > getattr(section, high):
        _contradiction(section, low, high, "more than", why)


def _below(section: Section, low: str, high: str, why: str) -> None:
    if getattr(section, low) >= getattr(section, high):
        _contradiction(section, low, high, "not less than", why)


def _contradiction(section: Section, low: str, high: str, how: str, why: str) -> None:
    name = next(name for name, kind in SECTIONS.items() if isinstance(section, kind))
    values = [written(key, getattr(section, key)) for key in (low, high)]
    raise InvalidConfig(f"{name}.{low}", f"{values[0]} is {how} {name}.{high} = {values[1]}: {why}; change one of them")
