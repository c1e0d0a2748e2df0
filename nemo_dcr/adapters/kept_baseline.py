"""The baseline of a trainer that starts again, from the files that an earlier process of this rank left.

The trainer may come back with any weights, an older checkpoint of its own among them: where the files are sealed as the
version, candidate and digest of the commit record, the next refit sends the difference to those, and not everything.
In every other case the baseline is lost, as one in memory is; files of another run are such a case.
Not handled: two runs that write one directory at the same time.

Paper: Section 5; Section 6.3   Spec: StartOwner   Conditions: SC3
"""

from __future__ import annotations

import logging

from nemo_dcr.control import open_control
from nemo_dcr.errors import ControlPlaneUnavailable, InvalidConfig, OperatorNeeded
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.source.delta import DeltaOwner

logger = logging.getLogger(__name__)


def take_over(delta: DeltaOwner, record: str) -> TrackerTag:
    """The tag of the baseline after what its files hold was taken over; `record`: URL of the commit record."""
    try:
        committed = open_control(record, reads_only=True).peek().record
    except (InvalidConfig, OperatorNeeded, ControlPlaneUnavailable) as problem:
        logger.warning(
            "owner %d: the baseline in files is not used, the record does not answer: %s", delta.owner, problem
        )
        return TrackerTag()
    if committed is not None and delta.recover(committed.version, committed.candidate, committed.digest):
        return TrackerTag(TrackerKind.AT, committed.version)
    logger.warning("owner %d: the baseline in files is not the committed version; it is lost", delta.owner)
    return TrackerTag()
