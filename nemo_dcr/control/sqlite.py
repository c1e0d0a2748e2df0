"""The commit record in a SQLite file: the embedded default of the control plane.

Every step is one `BEGIN IMMEDIATE` transaction with synchronous=FULL: it reads the facts, asks `control_rules` and
writes the decision, so a step is durable before it is answered and a killed process leaves a whole step or none. The
clock is read after the write lock is held, because a busy database may make a commit wait past its deadline. Reads take
the same lock: one read after the deadline is final (D14). Threads share one connection in turn, a forked child opens
its own, and after an error the connection is opened anew.
Not handled: network file systems (SQLite's locks and its write-ahead log need one host); other hosts reach the control
plane through the coordinator.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
Proofs: joint_commit_binds   Conditions: SC3, SC7
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nemo_dcr.control.steps import SteppedControl
from nemo_dcr.errors import ControlPlaneUnavailable, InternalError, InvalidConfig, OperatorNeeded
from nemo_dcr.ids import NO_ATTEMPT, AttemptId, CandidateId, Epoch, Member
from nemo_dcr.record import DELTA_MODES, AttemptEntry, AttemptMode, Decision, Facts, JournalEntry, Record
from nemo_dcr.trace import Action, Scalar

T = TypeVar("T")

SCHEMA_VERSION = 2
_WITHOUT_TIME = 1
"""Schema of records without a time; such a file is brought up to date when it is opened, its records get time 0."""
APPLICATION_ID = 0x4E444352
"""`NDCR`, in the header of the file."""

_SCHEMA = (
    "CREATE TABLE state (one INTEGER PRIMARY KEY CHECK (one = 1), identity TEXT NOT NULL, clock INTEGER NOT NULL)",
    "CREATE TABLE epochs (epoch INTEGER PRIMARY KEY, granted REAL NOT NULL)",
    "CREATE TABLE attempts (attempt INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, candidate TEXT NOT NULL,"
    " mode TEXT NOT NULL, baseline INTEGER, required TEXT NOT NULL, owners TEXT NOT NULL, deadline REAL NOT NULL)",
    "CREATE INDEX attempts_by_candidate ON attempts (candidate)",
    "CREATE TABLE records (version INTEGER PRIMARY KEY, candidate TEXT NOT NULL, digest BLOB NOT NULL,"
    " attempt INTEGER NOT NULL UNIQUE, required TEXT NOT NULL, baseline INTEGER NOT NULL, epoch INTEGER NOT NULL,"
    " time REAL NOT NULL DEFAULT 0)",
    "CREATE TABLE dead (candidate TEXT PRIMARY KEY)",
    "CREATE TABLE journal (seq INTEGER PRIMARY KEY, clock INTEGER NOT NULL, action TEXT NOT NULL,"
    " attempt INTEGER NOT NULL, args TEXT NOT NULL, post TEXT NOT NULL)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_DELTA = ", ".join(f"'{mode.value}'" for mode in sorted(DELTA_MODES))
_ENTRY = "SELECT attempt, epoch, candidate, mode, baseline, required, owners, deadline FROM attempts WHERE attempt = ?"
_RECORD = "SELECT version, candidate, digest, attempt, required, baseline, epoch, time FROM records"
_FACTS = f"""SELECT (SELECT coalesce(max(epoch), 0) FROM epochs), (SELECT coalesce(max(attempt), 0) FROM attempts),
 (SELECT count(*) FROM attempts WHERE candidate = :candidate AND mode IN ({_DELTA})),
 EXISTS (SELECT 1 FROM dead WHERE candidate = :candidate), (SELECT clock FROM state),
 (SELECT coalesce(max(seq) + 1, 0) FROM journal)"""


class SqliteControl(SteppedControl):
    """A `ControlPlane` over one SQLite file; threads and processes of one host may share it.

    Every method raises ControlPlaneUnavailable when the file stays locked or cannot be read or written (the outcome is
    then unknown), and OperatorNeeded when the file is damaged.
    """

    def __init__(self, path: Path | str, *, now: Callable[[], float] = time.time, busy_timeout_s: float = 10.0) -> None:
        """Open the file, or make it in a directory that exists.

        Args:
            path: the database file.
            now: the control plane's clock in seconds; the same for all processes.
            busy_timeout_s: how long a call waits for other writers.

        Raises: InvalidConfig when the file is another application's database; OperatorNeeded for another schema version
        or a damaged file; ControlPlaneUnavailable.
        """
        super().__init__(now)
        self._path = Path(path)
        self._busy_timeout_s = busy_timeout_s
        self._shared = _Shared()
        if not self._path.parent.is_dir():
            raise InvalidConfig("control", f"the directory of {self._path} does not exist; make it first")
        with self._connection("open") as connection:
            with _transaction(connection):
                self._identity = self._check_schema(connection)
            _use_wal(connection, busy_timeout_s)

    @property
    def identity(self) -> str:
        """Random name of this commit record, given when the file was made: attempt ids are unique within it."""
        return self._identity

    def close(self) -> None:
        """Close the file; a later call opens it again."""
        if self._shared.process == os.getpid():
            with self._shared.lock:
                self._shared.close()

    def history(self) -> tuple[Record, ...]:
        """See `ControlPlane.history`."""
        with self._connection("history") as connection:
            return tuple(_record(row) for row in connection.execute(f"{_RECORD} ORDER BY version"))

    def journal(self, start: int = 0) -> tuple[JournalEntry, ...]:
        """See `ControlPlane.journal`."""
        query = "SELECT seq, clock, action, attempt, args, post FROM journal WHERE seq >= ? ORDER BY seq"
        with self._connection("journal") as connection:
            return tuple(_journal_entry(row) for row in connection.execute(query, (start,)))

    def _look(self, candidate: CandidateId) -> Facts:
        with self._connection("look") as connection:
            connection.execute("BEGIN")
            try:
                return _facts(connection, NO_ATTEMPT, candidate)
            finally:
                connection.execute("ROLLBACK")

    def _step(
        self, operation: str, attempt: AttemptId, candidate: CandidateId, decide: Callable[[Facts], Decision[T]]
    ) -> T:
        with self._connection(operation) as connection, _transaction(connection):
            decision = decide(_facts(connection, attempt, candidate))
            self._write(connection, decision)
        return decision.reply

    def _write(self, connection: sqlite3.Connection, decision: Decision[Any]) -> None:
        connection.execute("UPDATE state SET clock = ?", (decision.clock,))
        if decision.epoch is not None:
            connection.execute("INSERT INTO epochs VALUES (?, ?)", (decision.epoch, self._now()))
        if decision.entry is not None:
            connection.execute("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _entry_row(decision.entry))
        if decision.record is not None:
            connection.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _record_row(decision.record))
        if decision.dead is not None:
            connection.execute("INSERT INTO dead VALUES (?)", (decision.dead,))
        if decision.journal is not None:
            connection.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?)", _journal_row(decision.journal))

    def _check_schema(self, connection: sqlite3.Connection) -> str:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (application, version, tables) == (0, 0, 0):
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute("INSERT INTO state VALUES (1, ?, 0)", (uuid.uuid4().hex,))
        elif application != APPLICATION_ID:
            raise InvalidConfig("control", f"{self._path} is another application's database; give a path of its own")
        elif version == _WITHOUT_TIME:
            connection.execute("ALTER TABLE records ADD COLUMN time REAL NOT NULL DEFAULT 0")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif version != SCHEMA_VERSION:
            reason = f"{self._path} has schema version {version}, this package reads version {SCHEMA_VERSION}"
            raise OperatorNeeded(reason, "run the package version that wrote it, or start a new commit record")
        (identity,) = connection.execute("SELECT identity FROM state").fetchone()
        return str(identity)

    @contextlib.contextmanager
    def _connection(self, operation: str) -> Iterator[sqlite3.Connection]:
        if self._shared.process != os.getpid():
            # SQLite forbids a child to use or close what it inherits: the parent's connection is kept and left alone.
            self._shared = _Shared(inherited=self._shared)
        shared = self._shared
        with shared.lock:
            try:
                if shared.connection is None:
                    shared.connection = sqlite3.connect(
                        self._path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
                    )
                    shared.connection.execute("PRAGMA synchronous = FULL")
                yield shared.connection
            except sqlite3.Error as error:
                shared.close()
                raise self._failure(operation, error) from error

    def _failure(self, operation: str, error: sqlite3.Error) -> Exception:
        if isinstance(error, sqlite3.OperationalError):
            return ControlPlaneUnavailable(operation, f"{self._path}: {error}")
        if type(error) is sqlite3.DatabaseError:
            reason = f"the commit record {self._path} is damaged ({error})"
            return OperatorNeeded(reason, "restore the file from a backup, or start a new commit record")
        return InternalError(f"{operation} would break the schema of the commit record {self._path}: {error}")


class _Shared:
    """The connection of one process."""

    def __init__(self, inherited: _Shared | None = None) -> None:
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.connection: sqlite3.Connection | None = None
        self.inherited = inherited

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Hold the write lock; commit durably at the end, or undo everything when an exception passes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _use_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Switch the file to write-ahead logging, once in its life. The switch does not wait for locks by itself.

    A file system without shared memory keeps the rollback journal, which is slower and as safe.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)


def _facts(connection: sqlite3.Connection, attempt: AttemptId, candidate: CandidateId) -> Facts:
    epoch, last, attempts, dead, clock, seq = connection.execute(_FACTS, {"candidate": candidate}).fetchone()
    entry = connection.execute(_ENTRY, (attempt,)).fetchone()
    record = connection.execute(f"{_RECORD} ORDER BY version DESC LIMIT 1").fetchone()
    return Facts(
        record=None if record is None else _record(record),
        epoch=Epoch(epoch),
        last=AttemptId(last),
        entry=None if entry is None else _entry(entry),
        candidate_attempts=attempts,
        candidate_dead=bool(dead),
        clock=clock,
        journal_seq=seq,
    )


def _record_row(record: Record) -> tuple[Any, ...]:
    key = (record.version, record.candidate, record.digest, record.attempt)
    return (*key, _members_text(record.required), record.baseline, record.epoch, record.time)


def _record(row: tuple[Any, ...]) -> Record:
    version, candidate, digest, attempt, required, baseline, epoch, written = row
    return Record(version, candidate, bytes(digest), attempt, _members(required), baseline, epoch, written)


def _entry_row(entry: AttemptEntry) -> tuple[Any, ...]:
    key = (entry.attempt, entry.epoch, entry.candidate, entry.mode.value, entry.baseline)
    return (*key, _members_text(entry.required), json.dumps(entry.owners), entry.deadline)


def _entry(row: tuple[Any, ...]) -> AttemptEntry:
    attempt, epoch, candidate, mode, baseline, required, owners, deadline = row
    members = _members(required)
    return AttemptEntry(
        attempt, epoch, candidate, AttemptMode(mode), baseline, members, tuple(json.loads(owners)), deadline
    )


def _journal_row(line: JournalEntry) -> tuple[Any, ...]:
    return (line.seq, line.clock, line.action.value, line.attempt, _text(line.args), _text(line.post))


def _journal_entry(row: tuple[Any, ...]) -> JournalEntry:
    seq, clock, action, attempt, args, post = row
    return JournalEntry(seq, clock, Action(action), attempt, json.loads(args), json.loads(post))


def _text(values: Mapping[str, Scalar]) -> str:
    return json.dumps(dict(values))


def _members_text(members: tuple[Member, ...]) -> str:
    return json.dumps([[member.receiver, member.incarnation] for member in members])


def _members(text: str) -> tuple[Member, ...]:
    return tuple(Member(receiver, incarnation) for receiver, incarnation in json.loads(text))
