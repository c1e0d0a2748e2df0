"""What a coordinator last heard of every endpoint: the newest report of each, and why the silent ones are silent.

Not handled: what to do with it (the machines of protocol/); it is for displays, and to notice that something changed.

Paper: Appendix B (control calls)
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from nemo_dcr.ids import Incarnation, OwnerId, ReceiverId
from nemo_dcr.protocol.messages import OwnerCall, OwnerReport, ReceiverCall, ReceiverReport
from nemo_dcr.runtime.endpoints import Endpoints, OwnerAnswers, ReceiverAnswers
from nemo_dcr.runtime.rpc import NoReply


class Sightings:
    """`Endpoints` that notes every report on its way. Used by one thread; the dictionaries are for reading."""

    def __init__(self, inner: Endpoints) -> None:
        self._inner = inner
        self.seen_receivers: dict[ReceiverId, ReceiverReport] = {}
        self.seen_owners: dict[OwnerId, OwnerReport] = {}
        self.silent: dict[str, str] = {}
        """Why there was no answer to the last call, by `receiver NAME` or `owner N`."""

    def receivers(self) -> dict[ReceiverId, Incarnation]:
        """As `Endpoints.receivers`."""
        return self._inner.receivers()

    def owners(self) -> tuple[OwnerId, ...]:
        """As `Endpoints.owners`."""
        return self._inner.owners()

    def ask(
        self, receivers: Mapping[ReceiverId, ReceiverCall], owners: Mapping[OwnerId, OwnerCall], timeout_s: float
    ) -> tuple[ReceiverAnswers, OwnerAnswers]:
        """As `Endpoints.ask`."""
        receiver_answers, owner_answers = self._inner.ask(receivers, owners, timeout_s)
        for receiver, answer in receiver_answers.items():
            if not isinstance(answer, NoReply):
                self.seen_receivers[receiver] = answer.report
            self._note(f"receiver {receiver}", answer)
        for owner, owner_answer in owner_answers.items():
            if not isinstance(owner_answer, NoReply):
                self.seen_owners[owner] = owner_answer.report
            self._note(f"owner {owner}", owner_answer)
        return receiver_answers, owner_answers

    def _note(self, name: str, answer: object) -> None:
        if isinstance(answer, NoReply):
            self.silent[name] = answer.reason
        else:
            self.silent.pop(name, None)

    def signature(self) -> Hashable:
        """Equal as long as nothing changed that an idle coordinator would act on."""
        receivers = self._inner.receivers()
        return (
            tuple(sorted(receivers.items())),
            tuple(sorted(self.silent)),
            tuple(
                (name, report.incarnation, str(report.tag), report.gate_open, report.asleep)
                for name, report in sorted(self.seen_receivers.items())
            ),
            tuple(
                (owner, report.incarnation, str(report.tracker), report.candidate, report.resident)
                for owner, report in sorted(self.seen_owners.items())
            ),
        )
