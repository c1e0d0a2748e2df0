"""A command that is killed or runs out of space leaves the base whole, or a second run finishes it."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_dcr.checkpoint.apply import apply
from nemo_dcr.checkpoint.diff import diff
from nemo_dcr.checkpoint.directory import JOURNAL, WORK_DIRECTORY
from nemo_dcr.checkpoint.in_place import apply_in_place
from nemo_dcr.checkpoint.staging import claimed
from nemo_dcr.checkpoint.verify import verify
from nemo_dcr.errors import BaseMismatch, CheckpointInvalid, InvalidConfig, OperatorNeeded
from tests.unit.checkpoint.checkpoints import content, flipped, tensor, write_checkpoint

ROOT = Path(__file__).parents[3]
OLD = {f"w{number}": tensor("BF16", (50, 400), number) for number in range(4)} | {"gone": tensor("U8", (5,))}
NEW = {name: flipped(OLD[name], 0, 399) for name in ("w0", "w2", "w3")} | {"w1": OLD["w1"], "new": tensor("F32", (9,))}
BESIDE = {"config.json": b"1", "sub/gone.txt": b"x"}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Another number of files, removed and added ones, so that every kind of change to the base happens."""
    tmp = tmp_path_factory.mktemp("killed")
    old = write_checkpoint(tmp / "old", OLD, shards=2, files=BESIDE)
    new = write_checkpoint(tmp / "new", NEW, shards=3, files={"config.json": b"2", "more/added.txt": b"y"})
    diff(old, new, tmp / "delta")
    return tmp


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "states"),
    [("in-place", {"old", "journal", "new"}), ("out", {"nothing", "all"}), ("diff", {"nothing", "all"})],
)
def test_killed_command_leaves_all_or_nothing_and_a_second_run_finishes(mode, states, places):
    arguments = [mode, places / "old", places / "new", places / "delta"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.killing", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    report = json.loads(done.stdout)
    assert report["random"] >= 20
    assert report["steps"] >= 10
    assert set(report["states"]) == states


def with_limit(nbytes, command):
    """Run the command while no file of this process may grow beyond so many bytes, as on a disk that takes no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        command()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("mode", ["in-place", "out", "diff"])
@pytest.mark.parametrize("limit", [0, 30, 300, 60_000])
def test_disk_that_takes_no_more_bytes_is_one_clear_line_and_the_base_stays_whole(mode, limit, places, tmp_path):
    base = shutil.copytree(places / "old", tmp_path / "base")
    if mode == "diff" and limit == 60_000:
        limit = 250  # the whole delta is smaller than that
    new, delta, out = places / "new", places / "delta", tmp_path / "out"
    commands = {
        "in-place": lambda: apply_in_place(base, [delta]),
        "out": lambda: apply(base, [delta], out),
        "diff": lambda: diff(base, new, out),
    }
    with pytest.raises(OperatorNeeded, match=r"^no space is left for .*; make room and run the command again$"):
        with_limit(limit, commands[mode])
    assert content(base) == content(places / "old")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    apply_in_place(base, [places / "delta"])
    assert content(base) == content(places / "new")


def test_second_run_finds_the_result_in_place(places, tmp_path):
    base = shutil.copytree(places / "old", tmp_path / "base")
    first, second = (apply_in_place(base, [places / "delta"]) for _ in range(2))
    assert (first.already_applied, first.written_files, first.removed_files) == (False, 6, 3)
    assert (second.already_applied, second.written_files, second.digest) == (True, 0, first.digest)
    assert content(base) == content(places / "new")
    (base / "config.json").write_bytes(b"3")
    with pytest.raises(BaseMismatch):
        apply_in_place(base, [places / "delta"])


def test_only_files_that_change_are_written_in_place(tmp_path):
    old = write_checkpoint(tmp_path / "old", OLD, shards=5)
    new = write_checkpoint(tmp_path / "new", {**OLD, "w2": flipped(OLD["w2"], 9)}, shards=5)
    diff(old, new, tmp_path / "delta")
    inodes = {path.name: path.stat().st_ino for path in old.iterdir()}
    assert apply_in_place(old, [tmp_path / "delta"]).written_files == 1
    moved = [path.name for path in old.iterdir() if path.stat().st_ino != inodes[path.name]]
    assert moved == ["model-00003-of-00005.safetensors"]
    assert verify(old, new, files=True).equal


def test_checkpoint_that_another_process_changes_is_left_to_it(places, tmp_path):
    base = shutil.copytree(places / "old", tmp_path / "base")
    with claimed(base / WORK_DIRECTORY), pytest.raises(OperatorNeeded, match="another process"):
        apply_in_place(base, [places / "delta"])
    assert content(base) == content(places / "old")


@pytest.mark.parametrize(
    "body",
    [
        b'{"version":1,"remove":["../precious"],"replace":[]}',
        b'{"version":1,"remove":[],"replace":["/tmp/x"]}',
        b'{"version":2,"remove":[],"replace":[]}',
        b'{"version":1,"remove":[]}',
        b"",
    ],
)
@pytest.mark.parametrize("digest_is_right", [True, False])
def test_journal_that_is_damaged_or_reaches_outside_is_refused(body, digest_is_right, places, tmp_path):
    base = shutil.copytree(places / "old", tmp_path / "base")
    (tmp_path / "precious").write_bytes(b"")
    (base / WORK_DIRECTORY).mkdir()
    digest = hashlib.blake2b(body, digest_size=16).hexdigest() if digest_is_right else "0" * 32
    (base / WORK_DIRECTORY / JOURNAL).write_bytes(digest.encode() + b"\n" + body)
    with pytest.raises(CheckpointInvalid, match="restore the checkpoint"):
        apply_in_place(base, [places / "delta"])
    assert (tmp_path / "precious").exists()


def test_journal_whose_new_file_is_lost_is_refused(places, tmp_path):
    base = shutil.copytree(places / "old", tmp_path / "base")
    (base / WORK_DIRECTORY).mkdir()
    body = b'{"version":1,"remove":[],"replace":["lost"]}'
    digest = hashlib.blake2b(body, digest_size=16).hexdigest().encode()
    (base / WORK_DIRECTORY / JOURNAL).write_bytes(digest + b"\n" + body)
    with pytest.raises(CheckpointInvalid, match="lost"):
        apply_in_place(base, [places / "delta"])


@pytest.mark.parametrize("place", ["more", "more/added.txt"])
def test_new_file_whose_place_is_taken_is_refused_before_the_base_is_touched(place, places, tmp_path):
    base = shutil.copytree(places / "old", tmp_path / "base")
    if place == "more":
        (base / place).write_bytes(b"a file where a folder has to be")
    else:
        (base / place).mkdir(parents=True)
    before = content(base)
    with pytest.raises(InvalidConfig, match="cannot be a file there"):
        apply_in_place(base, [places / "delta"])
    assert content(base) == before


def test_base_that_is_no_directory_is_a_usage_error(tmp_path):
    with pytest.raises(InvalidConfig, match="not a directory"):
        apply_in_place(tmp_path / "none", [])
