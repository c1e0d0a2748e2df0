"""`nemo-dcr keys new` and `nemo-dcr relay` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_dcr.cli.main import app
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.transport.relay.keys import new_keys
from nemo_dcr.transport.relay.tree import TreeNode, balanced_tree, write_tree

LOOPBACK = "tcp://127.0.0.1:*"


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and output; a typed error is raised as it is."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_new_keys_are_printed_and_never_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    code, output = run("keys", "new", str(directory))
    secret = (directory / "secret.key").read_text()
    assert (code, output) == (0, (directory / "public.key").read_text())
    assert oct((directory / "secret.key").stat().st_mode & 0o777) == "0o600"
    with pytest.raises(InvalidConfig, match="holds keys already"):
        run("keys", "new", str(directory))
    assert (directory / "secret.key").read_text() == secret


def test_every_option_of_the_relay_is_explained() -> None:
    code, output = run("relay", "--help")
    assert code == 0
    for option in ("--node", "--listen", "--tree", "--keys", "--run", "--plaintext", "--memory-mib", "--spill-dir"):
        assert option in output


def test_wrong_options_of_the_relay_are_refused_in_one_line(tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    pair = new_keys(tmp_path / "keys")
    write_tree(tree, balanced_tree([TreeNode("n0", LOOPBACK, pair.public)]))
    keys = str(tmp_path / "keys")
    for arguments, problem in (
        (["--node", "n0"], "give an address"),
        (["--node", "n9", "--tree", str(tree)], "has no node 'n9'"),
        (["--node", "n0", "--tree", str(tmp_path / "none.json")], "not a readable tree"),
        (["--node", "n0", "--listen", "tcp://0.0.0.0:*"], "not a loopback address"),
        (["--node", "n0", "--listen", LOOPBACK, "--keys", keys], "name the nodes that a tree may hold"),
        (["--node", "n0", "--listen", LOOPBACK, "--plaintext"], "name the nodes that a tree may hold"),
        (["--node", "n0", "--tree", str(tree), "--keys", keys, "--plaintext"], "contradicts --keys"),
        (["--node", "n0", "--tree", str(tree), "--keys", str(tmp_path / "none")], "nemo-dcr keys new"),
        (["--node", "n0", "--listen", LOOPBACK, "--spill-dir", str(tmp_path / "none")], "is not a directory"),
        (["--node", "n0", "--listen", "nonsense"], "not a loopback address"),
        (["--node", "n0", "--listen", "ipc:///nowhere/at/all"], "cannot listen"),
    ):
        with pytest.raises(InvalidConfig, match=problem):
            run("relay", *arguments)
