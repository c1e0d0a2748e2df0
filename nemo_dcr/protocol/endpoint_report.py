"""What an endpoint says about itself: the report in every reply, and the post-state of every trace line.

Paper: Appendix B (control calls)   Spec: IsPrepared, IsStaged, IsQuiet, IsAcked
"""

from __future__ import annotations

from nemo_dcr.ids import AttemptId, PayloadKey
from nemo_dcr.protocol import endpoint_guards as guards
from nemo_dcr.protocol.endpoint_state import EndpointEffect, EndpointState, Reply
from nemo_dcr.protocol.messages import ReceiverReply, ReceiverReport
from nemo_dcr.trace import Action, Emit, Scalar

Step = tuple[EndpointState, tuple[EndpointEffect, ...]]


def report(state: EndpointState) -> ReceiverReport:
    """What every reply and push carries."""
    return ReceiverReport(
        receiver=state.member.receiver,
        incarnation=state.member.incarnation,
        revision=state.revision,
        ranks=state.ranks,
        attempt=state.attempt,
        tag=state.tag,
        gate_open=state.gate_open,
        requests=len(state.requests),
        quiet=guards.is_quiet(state),
        asleep=state.asleep,
        apply_open=state.apply_open,
        staged=guards.is_staged(state),
        acked=state.acked,
        applied_digest=state.applied_digest,
        stopped=state.stopped,
        drained=state.drained,
        failure=state.failure,
        payloads=sum(len(numbers) for numbers in state.seen.values()),
        loaded_digest=state.loaded_digest,
    )


def reply(state: EndpointState, call_id: int, refusal: str = "") -> Reply:
    """Answer a call: accepted when there is no refusal."""
    return Reply(call_id, ReceiverReply(accepted=not refusal, refusal=refusal, report=report(state)))


def refuse(state: EndpointState, call_id: int, action: Action, refusal: str, attempt: AttemptId) -> Step:
    """Answer a call that changes nothing, and trace why."""
    return state, (reply(state, call_id, refusal), emit(state, action, attempt, reason=refusal))


def emit(state: EndpointState, action: Action, attempt: AttemptId | None = None, /, **args: Scalar) -> Emit:
    """Trace `action` about `attempt` (the installed one by default) with the state after it."""
    post: dict[str, Scalar] = {"att": state.attempt, "tag": str(state.tag), "gate": state.gate_open}
    return Emit(action, state.attempt if attempt is None else attempt, args, post)


def payload_args(key: PayloadKey) -> dict[str, Scalar]:
    """Trace form of a payload's identity; its attempt is the line's."""
    return {"owner": key.owner, "payload": key.payload}
