from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from nemo_dcr.control import MemoryControl, SqliteControl, open_control
from nemo_dcr.control.sqlite import APPLICATION_ID, SCHEMA_VERSION
from nemo_dcr.errors import ControlPlaneUnavailable, InternalError, InvalidConfig, OperatorNeeded
from nemo_dcr.record import Committed, Refusal
from nemo_dcr.testing.control_calls import ManualClock, bootstrap, check_chain, commit, granted, prepare, refusal

PATIENCE_S = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.db"


@contextmanager
def write_lock(path: Path) -> Iterator[sqlite3.Connection]:
    """Hold the database's write lock, as a slow writer would."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def pragma(path: Path, name: str) -> object:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"PRAGMA {name}").fetchone()[0]


def test_the_file_is_marked_and_logs_ahead(path: Path) -> None:
    control = SqliteControl(path)
    assert pragma(path, "journal_mode") == "wal"
    assert pragma(path, "application_id") == APPLICATION_ID
    assert pragma(path, "user_version") == SCHEMA_VERSION
    with control._connection("test") as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_the_deadline_is_checked_after_the_lock_is_held(path: Path) -> None:
    now = ManualClock()
    control = SqliteControl(path, now=now, busy_timeout_s=PATIENCE_S)
    epoch, record = bootstrap(control)
    attempt = granted(prepare(control, epoch, record))
    replies: list[object] = []
    with write_lock(path) as holder:
        arrived = now.value
        waiting = threading.Thread(
            target=lambda: replies.append(commit(control, epoch, record, attempt, deadline=arrived + 5))
        )
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        now.value += 6
        holder.execute("ROLLBACK")
        waiting.join(PATIENCE_S)
    assert refusal(replies[0]) is Refusal.DEADLINE
    assert check_chain(control) == (record,)


def test_a_read_waits_for_a_commit_that_is_under_way(path: Path) -> None:
    control = SqliteControl(path, busy_timeout_s=0.05)
    bootstrap(control)
    with write_lock(path), pytest.raises(ControlPlaneUnavailable, match="read"):
        control.read()
    assert control.read().record is not None


def test_a_locked_file_is_an_unknown_outcome_and_the_next_call_works(path: Path) -> None:
    control = SqliteControl(path, busy_timeout_s=0.05)
    epoch, record = bootstrap(control)
    attempt = granted(prepare(control, epoch, record))
    with write_lock(path), pytest.raises(ControlPlaneUnavailable, match="commit") as caught:
        commit(control, epoch, record, attempt)
    assert caught.value.operation == "commit"
    assert isinstance(commit(control, epoch, record, attempt), Committed)


def test_a_step_that_fails_half_way_leaves_nothing(path: Path) -> None:
    control = SqliteControl(path)
    epoch, record = bootstrap(control)
    attempt = granted(prepare(control, epoch, record))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TRIGGER stop BEFORE INSERT ON journal BEGIN SELECT RAISE(ABORT, 'stopped'); END")
        connection.commit()
    before = control.read()
    with pytest.raises(InternalError, match="stopped"):
        commit(control, epoch, record, attempt)
    assert check_chain(control) == (record,)
    assert control.read().last_attempt == before.last_attempt


def test_another_applications_database_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.commit()
    content = path.read_bytes()
    with pytest.raises(InvalidConfig, match="another application"):
        SqliteControl(path)
    assert path.read_bytes() == content


def test_a_later_schema_needs_an_operator(path: Path) -> None:
    bootstrap(SqliteControl(path))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(OperatorNeeded, match=f"schema version {SCHEMA_VERSION + 1}"):
        SqliteControl(path)


def test_a_file_without_times_is_brought_up_to_date(path: Path) -> None:
    now = ManualClock()
    control = SqliteControl(path, now=now)
    epoch, record = bootstrap(control)
    control.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("ALTER TABLE records DROP COLUMN time")
        connection.execute("PRAGMA user_version = 1")
    control = SqliteControl(path, now=now)
    assert pragma(path, "user_version") == SCHEMA_VERSION == 2
    assert isinstance(commit(control, epoch, record, granted(prepare(control, epoch, record))), Committed)
    assert [kept.time for kept in check_chain(control)] == [0.0, now.value]


def test_a_look_does_not_wait_for_a_writer(path: Path) -> None:
    control = SqliteControl(path, busy_timeout_s=0.05)
    _, record = bootstrap(control)
    with write_lock(path):
        assert control.peek().record == record


def test_a_file_that_is_no_database_needs_an_operator(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(OperatorNeeded, match="damaged"):
        SqliteControl(path)


def test_a_damaged_database_needs_an_operator(path: Path) -> None:
    control = SqliteControl(path)
    bootstrap(control)
    control.close()
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(OperatorNeeded, match="damaged"):
        SqliteControl(path).history()


def test_a_restored_file_is_read_after_damage_was_reported(path: Path, tmp_path: Path) -> None:
    control = SqliteControl(path)
    _, record = bootstrap(control)
    control.close()
    backup = path.read_bytes()
    path.write_bytes(backup[:4096] + os.urandom(len(backup) - 4096))
    with pytest.raises(OperatorNeeded, match="restore the file"):
        control.history()
    (tmp_path / "backup").write_bytes(backup)
    os.replace(tmp_path / "backup", path)
    assert control.history() == (record,)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="does not exist"):
        SqliteControl(tmp_path / "none" / "record.db")


def test_a_closed_handle_opens_the_file_again(path: Path) -> None:
    control = SqliteControl(path)
    _, record = bootstrap(control)
    control.close()
    control.close()
    assert control.read().record == record


def test_each_record_has_an_identity_of_its_own(tmp_path: Path) -> None:
    first, again, other = (SqliteControl(tmp_path / name) for name in ("a", "a", "b"))
    assert first.identity == again.identity
    assert first.identity != other.identity
    assert len(first.identity) == 32


def test_handles_that_make_the_file_at_once_share_it(path: Path) -> None:
    barrier = threading.Barrier(4)
    identities: list[str] = []

    def make() -> None:
        barrier.wait()
        control = SqliteControl(path)
        control.acquire_epoch()
        identities.append(control.identity)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(identities) == 4
    assert len(set(identities)) == 1
    assert SqliteControl(path).read().epoch == 4


def test_a_forked_child_opens_a_connection_of_its_own(path: Path) -> None:
    control = SqliteControl(path)
    _, record = bootstrap(control)
    inherited = control._shared.connection
    child = os.fork()
    if child == 0:
        # The child must not return into pytest; its exit status is its verdict.
        status = 1
        try:
            control.acquire_epoch()
            same = control._shared.connection is inherited
            status = 0 if control.read().record == record and not same else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert control.read().epoch == 2
    assert control._shared.connection is inherited


def test_a_url_opens_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, record = bootstrap(open_control(f"sqlite:///{path}"))
    monkeypatch.chdir(path.parent)
    assert open_control("sqlite:///record.db").read().record == record


@pytest.mark.parametrize("url", ["", "sqlite:///", "sqlite://record.db", "record.db", "etcd://host"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="sqlite:///PATH"):
        open_control(url)


def test_the_memory_back_end_keeps_nothing_of_another() -> None:
    bootstrap(MemoryControl())
    assert MemoryControl().read().record is None
