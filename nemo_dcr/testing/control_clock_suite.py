"""The conformance suite of control planes whose handles read clocks of their own: clocks that disagree cost time only.

Paper: Appendix B (commit deadline)   Spec: Commit, Prepare
"""

# ruff: noqa: D102
from __future__ import annotations

from pathlib import Path

from nemo_dcr.ids import Epoch
from nemo_dcr.record import Committed, Refusal
from nemo_dcr.testing.control_calls import (
    LIFETIME_S,
    ManualClock,
    bootstrap,
    check_chain,
    commit,
    commit_once,
    granted,
    prepare,
    refusal,
)
from nemo_dcr.testing.control_suite import ControlSuite


class ControlClockSuite(ControlSuite):
    """Tests for back ends that several hosts or processes share, each with its clock (D15)."""

    def test_skewed_clocks_cost_time_and_never_a_second_commit(self, tmp_path: Path) -> None:
        slow, fast = ManualClock(1000.0), ManualClock(1000.0 + 2 * LIFETIME_S)
        behind, ahead = self.open(tmp_path / "k", slow), self.open(tmp_path / "k", fast)
        epoch, record = bootstrap(behind)
        first = granted(prepare(behind, epoch, record))
        # The same coordinator's clock jumps ahead: its commit is refused although no time passed, and a retry is
        # fenced off.
        assert refusal(commit(ahead, epoch, record, first)) is Refusal.DEADLINE
        second = granted(prepare(ahead, epoch, record))
        # Long after that deadline the clock that is behind still sees it in the future: only the latest attempt may
        # commit.
        slow.value += LIFETIME_S
        assert refusal(commit(behind, epoch, record, first)) is Refusal.NOT_LATEST
        reply = commit(behind, epoch, record, second)
        assert isinstance(reply, Committed)
        assert refusal(commit(ahead, epoch, record, second)) is Refusal.RECORD_MOVED
        assert check_chain(ahead) == (record, reply.record)

    def test_writers_with_skewed_clocks_lose_no_update(self, tmp_path: Path) -> None:
        bootstrap(self.open(tmp_path / "k", ManualClock()))
        handles = [self.open(tmp_path / "k", ManualClock(1000.0 + skew)) for skew in (-3600.0, 0.0, 40.0, 3600.0)]
        epochs: list[Epoch | None] = [None] * len(handles)
        acknowledged = []
        for turn in range(2 * len(handles)):
            each = turn % len(handles)
            epochs[each], attempt = commit_once(handles[each], epochs[each])
            acknowledged += [] if attempt is None else [attempt]
        assert acknowledged
        assert acknowledged == [record.attempt for record in check_chain(handles[0])[1:]]
