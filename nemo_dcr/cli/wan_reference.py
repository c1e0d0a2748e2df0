"""The transport-only full-checkpoint reference over the emulated WAN, in the same run as the refits.

Each training host uploads its part of the checkpoint file to the store, then each rollout host downloads all of it.
A share moves only so much of each part and scales the time.

Paper: Section 8.1 (transport-only full-checkpoint reference)
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nemo_dcr.cli.wan_site import WanSite
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.testing.checkpoint import SINGLE_FILE
from nemo_dcr.testing.regions import Host, Regions

COPY_S = 3600.0
"""Limit of the copies of one direction."""


def measure_reference(regions: Regions, site: WanSite, share: int) -> float:
    """Seconds of the transport-only full-checkpoint reference: uploads of a half each, then downloads of all of it.

    Raises: OperatorNeeded when a copy fails.
    """
    file = Path(site.job.model) / SINGLE_FILE
    part = file.stat().st_size // len(regions.training)
    ranges = [(rank * part, rank * part + part // share) for rank in range(len(regions.training))]
    uploads = [(host, "put", [ranges[rank]]) for rank, host in enumerate(regions.training)]
    downloads = [(host, "get", ranges) for host in regions.rollout]
    return share * sum(_copy_at_once(site, file, group) for group in (uploads, downloads))


def _copy_at_once(site: WanSite, file: Path, work: list[tuple[Host, str, list[tuple[int, int]]]]) -> float:
    copies = []
    for host, action, ranges in work:
        numbers = [str(number) for pair in ranges for number in pair]
        module = [sys.executable, "-m", "nemo_dcr.cli.checkpoint_copy", action, site.store.url, str(file), *numbers]
        environment = [f"{name}={value}" for name, value in site.environment.items()]
        command = host.command(["env", *environment, *module])
        copies.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        for copy in copies:
            if copy.stdout is None or copy.stdout.readline() != "ready\n":
                raise OperatorNeeded("a copy of the reference did not start", "read what it printed")
        for copy in copies:
            if copy.stdin is not None:
                copy.stdin.write("go\n")
                copy.stdin.flush()
        try:
            seconds = [copy.communicate(timeout=COPY_S)[0] for copy in copies]
        except subprocess.TimeoutExpired as late:
            reason = f"a copy of the reference did not end within {COPY_S:g} s"
            raise OperatorNeeded(reason, "take a higher --share, or a higher rate") from late
        if any(copy.returncode != 0 for copy in copies):
            raise OperatorNeeded("a copy of the reference failed", "read what it printed")
        return max(float(each) for each in seconds)
    finally:
        for copy in copies:
            if copy.poll() is None:
                copy.kill()
                copy.communicate()
