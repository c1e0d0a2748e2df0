"""A server's process group ends with the process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nemo_dcr.cli import vllm_server
from nemo_dcr.cli.vllm_server import FLAGS, run_in_group

GRANDCHILD = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
SERVER = f"from nemo_dcr.cli.vllm_server import run_in_group; run_in_group([{sys.executable!r}, '-c', {GRANDCHILD!r}])"
PARENT = f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', {SERVER!r}], start_new_session=True).wait()"


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.slow
def test_the_group_ends_when_the_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    grandchild = int(parent.stdout.readline())
    assert is_alive(grandchild)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline, turn = time.monotonic() + 30, threading.Event()
    while is_alive(grandchild) and time.monotonic() < deadline:
        turn.wait(0.1)
    assert not is_alive(grandchild)


def test_the_exit_code_is_the_servers(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert run_in_group([sys.executable, "-c", "raise SystemExit(7)"]) == 7


def test_further_flags_follow_those_of_the_demo(monkeypatch):
    commands = []
    monkeypatch.setattr(vllm_server, "run_in_group", lambda command: commands.append(command) or 0)
    assert vllm_server.main("8000", "model", "--max-num-seqs", "16") == 0
    assert commands[0][-2 - len(FLAGS) :] == [*FLAGS, "--max-num-seqs", "16"]
