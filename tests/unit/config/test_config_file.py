"""A file of settings: what it says is what holds, its faults are named, and the page lists all of it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nemo_dcr.cli.coordinator import merged
from nemo_dcr.cli.main import app
from nemo_dcr.config import MIB, BaselineConfig, CodecConfig, GateMode, QueueConfig, RefitConfig
from nemo_dcr.config_file import Configuration, load_config, parse_config, settings, write_config, written
from nemo_dcr.errors import InvalidConfig

PAGE = Path(__file__).resolve().parents[3] / "docs/configuration.md"
ROW = re.compile(r"^\| `(?P<key>[a-z_.]+)` \| `(?P<default>[^`]+)` \| ", re.MULTILINE)
REFUSED = re.compile(r"^\| `(?P<line>[a-z_.]+ = [^`]+)` \| `(?P<says>[^`]+)` \|$", re.MULTILINE)


def parsed(text: str) -> Configuration:
    return parse_config(tomllib.loads(text))


def refusal(text: str) -> str:
    with pytest.raises(InvalidConfig) as refused:
        parsed(text)
    return str(refused.value)


def test_an_empty_file_gives_the_sizes_of_appendix_c() -> None:
    config = parsed("")
    assert config == Configuration()
    assert (config.codec.chunk_target_bytes, config.codec.bucket_target_bytes) == (64 * MIB, 512 * MIB)
    assert (config.queue.resident_groups, config.queue.group_payloads, config.queue.payload_slots) == (32, 8, 264)


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "refit.toml"
    file.write_text(
        '[refit]\ngate = "async"\nattempt_deadline_s = "20 min"\nheartbeat_s = "150 ms"\nlost_after_s = 3\n'
        '[codec]\nchunk_target_bytes = "256 MiB"\nmax_payload_bytes = 4294967296\n'
        '[queue]\nstaging_bytes = "1.5 GiB"\n[baseline]\ndir = "/data/baseline"\n',
        encoding="utf-8",
    )
    assert load_config(file) == Configuration(
        refit=RefitConfig(gate=GateMode.ASYNC, attempt_deadline_s=1200.0, heartbeat_s=0.15, lost_after_s=3.0),
        codec=CodecConfig(chunk_target_bytes=256 * MIB, max_payload_bytes=1 << 32),
        queue=QueueConfig(staging_bytes=1536 * MIB),
        baseline=BaselineConfig(dir="/data/baseline"),
    )


@given(
    st.builds(
        Configuration,
        refit=st.builds(
            RefitConfig,
            gate=st.sampled_from(GateMode),
            attempt_deadline_s=st.floats(100, 1e6),
            lost_after_s=st.floats(1, 99),
            heartbeat_s=st.floats(1e-3, 0.9),
            max_attempts=st.integers(1, 99),
            prewarm_copy=st.booleans(),
        ),
        codec=st.builds(
            CodecConfig, chunk_target_bytes=st.integers(1, 1 << 29), bucket_target_bytes=st.integers(1 << 29, 1 << 33)
        ),
        queue=st.builds(QueueConfig, spill_directory=st.text().map(lambda text: f"/{text}")),
    )
)
def test_what_is_written_reads_back_as_it_was(config: Configuration) -> None:
    assert parsed(write_config(config)) == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[codex]\nzstd_level = 1", "configuration codex: is no section; did you mean 'codec'?"),
        ("heartbeat_s = 1", "heartbeat_s is a key of [refit]"),
        ("refit = 3", "configuration refit: is a section; write [refit] above its keys"),
        ("[refit]\nmax_atempts = 3", "configuration refit.max_atempts: is no key; did you mean 'max_attempts'?"),
        ("[baseline]\nqqqqqq = 3", "known are dir"),
        ("[codec]\nzstd_level = 1.0", "codec.zstd_level: must be a whole number, got 1.0"),
        ("[codec]\nzstd_level = true", "must be a whole number, got True"),
        ("[codec]\nzstd_level = 23", "codec.zstd_level: must be 1 to 22, got 23"),
        ("[refit]\nprewarm_copy = 1", "must be true or false, got 1"),
        ("[refit]\ngate = 1", "must be a text in quotes, got 1"),
        ("[queue]\nstaging_bytes = 1.5", 'must be bytes, such as 67108864 or "64 MiB", got 1.5'),
        ('[queue]\nstaging_bytes = "1.5 B"', "is no whole number of bytes"),
        ('[queue]\nstaging_bytes = "-1 MiB"', "must be bytes"),
        ('[queue]\nstaging_bytes = "0 MiB"', "must be positive, got 0"),
        ("[refit]\nheartbeat_s = nan", "must be seconds"),
        ("[refit]\nattempt_deadline_s = inf", "must be seconds"),
        ('[refit]\nheartbeat_s = "1 MiB"', "has another unit than ms, s, min, h"),
        ('[refit]\nheartbeat_s = "1 S"', "did you mean 's'?"),
        ('[codec]\nbucket_target_bytes = "9 GiB"', "receivers would refuse a full payload"),
        ('[codec]\nmax_metadata_bytes = "9 GiB"', "the metadata is a part of the payload"),
    ],
)
def test_a_fault_is_told_by_its_name_and_with_what_is_right(text: str, said: str) -> None:
    assert said in refusal(text)


def test_what_is_no_file_of_settings_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("[refit\n", encoding="utf-8")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "large.toml").write_bytes(b"#" * (MIB + 1))
    cases = (("absent.toml", "cannot be read"), ("broken.toml", "is no TOML"), ("bytes.toml", "is no TOML"))
    for name, said in (*cases, ("large.toml", "is larger than")):
        with pytest.raises(InvalidConfig, match=f"{name}: {said}"):
            load_config(tmp_path / name)


def test_options_of_the_coordinator_go_before_its_file(tmp_path: Path) -> None:
    file = tmp_path / "refit.toml"
    file.write_text("[refit]\nheartbeat_s = 1.0\nmax_attempts = 7\n", encoding="utf-8")
    assert merged(None, heartbeat_s=None, gate=None) == RefitConfig()
    assert merged(file, heartbeat_s=0.5, gate=None) == RefitConfig(heartbeat_s=0.5, max_attempts=7)
    with pytest.raises(InvalidConfig, match="every endpoint would be lost"):
        merged(file, lost_after_s=0.5)


def test_the_coordinator_refuses_a_file_with_a_fault_before_it_opens_anything(tmp_path: Path) -> None:
    file = tmp_path / "refit.toml"
    file.write_text("[refit]\nmax_atempts = 7\n", encoding="utf-8")
    places = ["--control", f"sqlite:///{tmp_path / 'record'}", "--transport", (tmp_path / "store").as_uri()]
    run = ["coordinator", str(tmp_path), *places, "--run", "r", "--owners", "1", "--config", str(file)]
    done = CliRunner().invoke(app, run)
    assert isinstance(done.exception, InvalidConfig)
    assert "did you mean 'max_attempts'?" in str(done.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["refit.toml"]


def test_the_options_of_the_coordinator_show_the_defaults_that_hold() -> None:
    shown = CliRunner().invoke(app, ["coordinator", "--help"], env={"COLUMNS": "300", "TERM": "dumb"}).output
    for name in ("gate", "attempt_deadline_s", "max_attempts", "heartbeat_s", "lost_after_s"):
        (row,) = (line for line in shown.splitlines() if f"--{name.replace('_', '-')} " in line)
        default: Any = getattr(RefitConfig(), name)
        assert f"[default: ({default:g})]" in row if isinstance(default, float | int) else f"({default})" in row


def test_the_page_lists_every_setting_with_its_default() -> None:
    listed = {row["key"]: row["default"] for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
    held = {f"{section}.{key}": written(key, value) for section, key, value in settings(Configuration())}
    assert listed == held
    assert list(listed) == list(held)


def test_the_page_tells_what_is_refused_in_the_words_of_the_program() -> None:
    rows = REFUSED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) >= 8
    for line, says in rows:
        assert says in refusal(line), line


def test_a_shell_completes_commands_and_options() -> None:
    for typed, wanted in (("nemo-dcr coor", "coordinator"), ("nemo-dcr coordinator --con", "--config")):
        completing = {
            "_NEMO_DCR_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split()) - 1),
        }
        offered = CliRunner().invoke(app, [], prog_name="nemo-dcr", env=completing)
        assert wanted in offered.output.split()


def test_replaced_settings_are_checked_together() -> None:
    with pytest.raises(InvalidConfig, match="a payload holds whole chunks"):
        replace(Configuration(), codec=CodecConfig(bucket_target_bytes=MIB))
