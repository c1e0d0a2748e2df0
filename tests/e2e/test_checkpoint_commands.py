"""`nemo-dcr diff | apply | verify | inspect` as a user runs them, on checkpoints that the safetensors library wrote."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_dcr.bits import equal_words
from nemo_dcr.bits.tensors import copied_words, integer_view
from nemo_dcr.testing.checkpoint import read_checkpoint
from nemo_dcr.testing.synthetic import synthetic_config, synthetic_tensors, write_checkpoint

PROGRAM = Path(sys.executable).parent / "nemo-dcr"
ROOT = Path(__file__).parents[2]


def nemo_dcr(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program; it has to end with `code`, and every refusal is one line."""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    if code >= 2:
        assert done.stderr.startswith("nemo-dcr: ")
        assert done.stderr.count("\n") == 1
    return done


def stepped(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same tensors with the lowest bit of about two percent of the words flipped."""
    chance = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone()
        hit = torch.rand(tensor.shape, generator=chance) < 0.02
        integer_view(result[name])[hit] ^= 1
    return result


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Three versions of one sharded checkpoint and the two deltas between them."""
    tmp = tmp_path_factory.mktemp("versions")
    config, tensors = synthetic_config(), synthetic_tensors(synthetic_config(), random_bits=True)
    for number in range(3):
        write_checkpoint(tmp / f"v{number}", config, tensors, shards=2)
        tensors = stepped(tensors, number)
    for number in range(2):
        nemo_dcr("diff", tmp / f"v{number}", tmp / f"v{number + 1}", "-o", tmp / f"d{number}", "--quiet")
    return tmp


def files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_diff_and_apply_give_every_file_of_the_new_checkpoint(versions, tmp_path):
    done = nemo_dcr("apply", versions / "v0", versions / "d0", "-o", tmp_path / "out")
    assert "read back and equal" in done.stdout
    assert "check the base" in done.stderr
    assert files(tmp_path / "out") == files(versions / "v1")
    nemo_dcr("verify", versions / "v1", tmp_path / "out", "--files")


def test_chain_applies_in_one_go_and_in_place_and_twice(versions, tmp_path):
    chain = (versions / "d0", versions / "d1")
    nemo_dcr("apply", versions / "v0", *chain, "-o", tmp_path / "out", "--quiet", "--no-sync")
    assert files(tmp_path / "out") == files(versions / "v2")
    base = shutil.copytree(versions / "v0", tmp_path / "base")
    for already in (False, True):
        done = nemo_dcr("apply", base, *chain, "--in-place", "--json", "--quiet")
        assert json.loads(done.stdout)["already_applied"] is already
        assert done.stderr == ""
    assert files(base) == files(versions / "v2")


@pytest.mark.parametrize("quiet", [False, True], ids=["bar", "quiet"])
def test_long_work_shows_a_bar_on_a_terminal_unless_it_is_told_to_be_quiet(versions, tmp_path, quiet):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [PROGRAM, "apply", versions / "v0", versions / "d0", "-o", tmp_path / "out", *["--quiet"] * quiet]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=theirs)
    os.write(theirs, b"end")
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0
    assert ("%" in shown and "B/s" in shown) is not quiet, shown


def test_verify_has_an_exit_code_and_names_the_first_difference(versions):
    same = nemo_dcr("verify", versions / "v0", versions / "v0", "--json", "--quiet")
    assert json.loads(same.stdout)["equal"] is True
    other = json.loads(nemo_dcr("verify", versions / "v0", versions / "v1", "--json", code=1).stdout)
    pairs = zip(read_checkpoint(versions / "v0"), read_checkpoint(versions / "v1"), strict=True)
    counts = {meta.name: int((copied_words(old) != copied_words(new)).sum()) for (meta, old), (_, new) in pairs}
    assert other["differing_elements"] == sum(counts.values())
    assert other["first"]["tensor"] == next(name for name, count in counts.items() if count)
    assert "first: " in nemo_dcr("verify", versions / "v0", versions / "v1", code=1).stdout


def test_inspect_shows_a_delta_and_a_payload(versions):
    delta = json.loads(nemo_dcr("inspect", versions / "d0", "--json", "--quiet").stdout)
    report = json.loads(nemo_dcr("diff", versions / "v0", versions / "v1", "-o", versions / "again", "--json").stdout)
    assert delta["nbytes"] == report["delta_bytes"]
    assert delta["delta"]["changed_elements"] == report["changed_elements"]
    assert sum(item["changed"] for item in delta["payloads"][0]["items"]) == report["changed_elements"]
    assert files(versions / "again") == files(versions / "d0")
    shown = nemo_dcr("inspect", versions / "d0" / delta["payloads"][0]["file"]).stdout
    assert all(item["tensor"] in shown for item in delta["payloads"][0]["items"])


def test_refusals_are_one_line_with_the_documented_exit_code(versions, tmp_path):
    v0, v1, d0, out = versions / "v0", versions / "v1", versions / "d0", tmp_path / "out"
    for arguments, code in (
        (("apply", v1, d0, "-o", out), 4),
        (("apply", v0, d0), 2),
        (("apply", v0, d0, "-o", out, "--in-place"), 2),
        (("apply", v0, d0, "--in-place", "--no-sync"), 2),
        (("apply", tmp_path / "none", d0, "-o", out), 2),
        (("verify", v0, d0), 2),
    ):
        nemo_dcr(*arguments, "--quiet", code=code)
    assert list(tmp_path.iterdir()) == []


def test_result_is_a_checkpoint_for_the_safetensors_library_with_its_metadata(tmp_path):
    odd = {
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "scalar": torch.tensor(-0.0),
        "nan": torch.tensor([0x7FC1, 0xFFA5 - (1 << 16), 1], dtype=torch.int16).view(torch.bfloat16),
        "mask": torch.tensor([True, False]),
        "scale": torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn),
        "packed": torch.arange(64, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "counter": torch.arange(5),
    }
    new = {**odd, "scalar": torch.tensor(0.0), "nan": odd["nan"].flip(0), "packed": odd["packed"].view(8, 8)}
    for name, tensors in (("old", odd), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt", "version": name})
    nemo_dcr("diff", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "delta")
    nemo_dcr("apply", tmp_path / "old", tmp_path / "delta", "-o", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as handle:
        assert handle.metadata() == {"format": "pt", "version": "new"}
        assert set(handle.keys()) == set(new)
        for name, tensor in new.items():
            assert handle.get_tensor(name).shape == tensor.shape
            assert equal_words(copied_words(handle.get_tensor(name)), copied_words(tensor))


MEASURED = """
import resource, sys
from pathlib import Path
from nemo_dcr.checkpoint import apply, diff, in_place, verify
old, new, delta, out = map(Path, sys.argv[2:])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "diff":
    diff.diff(old, new, delta, sync=False)
elif sys.argv[1] == "apply":
    apply.apply(old, [delta], out, sync=False)
else:
    verify.verify(new, out)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor_and_not_by_the_checkpoint(tmp_path):
    largest, count = 16 << 20, 20
    words = torch.randint(-(1 << 15), 1 << 15, (largest // 2,), dtype=torch.int16)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        tensors = {f"t{number}": (words ^ number).view(torch.bfloat16) for number in range(count)}
        save_file(tensors, tmp_path / name / "model.safetensors")
        del tensors
        words[:: 1 << 7] ^= 1
    places = [tmp_path / name for name in ("old", "new", "delta", "out")]
    for command in ("diff", "apply", "verify"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, command, *map(str, places)],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        # Two threads that hash hold a tensor each, and one more is compared or written.
        assert int(done.stdout) <= 6 * largest < count * largest / 3, command
    assert files(tmp_path / "out") == files(tmp_path / "new")


@pytest.mark.slow
def test_result_loads_in_transformers_with_the_bits_of_the_new_checkpoint(versions, tmp_path):
    from transformers import AutoModelForCausalLM

    nemo_dcr("apply", versions / "v0", versions / "d0", "-o", tmp_path / "out", "--quiet")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    loaded = model.state_dict()
    wanted = {meta.name: tensor for meta, tensor in read_checkpoint(versions / "v1")}
    assert wanted.keys() <= loaded.keys()
    assert [name for name in wanted if not equal_words(copied_words(loaded[name]), copied_words(wanted[name]))] == []
