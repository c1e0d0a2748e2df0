"""Every exception type of the package, in one tree.

Rule: the type says what the caller does next, the fields say what happened, and the message is built here.
`InternalError` stands outside the tree: it is a fault of this package and is never caught.
Calls and payloads of a replaced attempt are not errors: they are ignored and traced.

Paper: Section 6.3; Appendix B.   Conditions: SC1-SC7, LC1-LC12
"""

from __future__ import annotations

from typing import Any


class NemoDcrError(Exception):
    """Base of all errors that a caller may catch. Caller: see the leaf type."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles keep type, message and fields: frameworks carry errors from process to process."""
        return _again, (type(self), self.args, dict(self.__dict__))


def _again(kind: type[NemoDcrError], args: tuple[Any, ...], fields: dict[str, Any]) -> NemoDcrError:
    """An error as it was, without building its message anew."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class UnsupportedLoaderPath(NemoDcrError):
    """A loader path breaks a condition at prewarm, before any live write. Caller: fix the loader; never retry."""

    def __init__(self, tensor: str, condition: str, detail: str) -> None:
        self.tensor = tensor
        self.condition = condition
        self.detail = detail
        super().__init__(f"tensor {tensor!r}: loader path is not supported ({condition}): {detail}")


class UnsupportedMapping(NemoDcrError):
    """A source shard has no exact mapping to canonical tensors. Caller: make the task residual, or fix the geometry."""

    def __init__(self, tensor: str, condition: str, detail: str) -> None:
        self.tensor = tensor
        self.condition = condition
        self.detail = detail
        super().__init__(f"tensor {tensor!r}: source mapping is not supported ({condition}): {detail}")


class UnsupportedDtype(NemoDcrError):
    """A dtype has no unsigned view of 1, 2, 4 or 8 bytes. Caller: store the tensor in another dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(
            f"dtype {dtype!r} has no unsigned view of 1, 2, 4 or 8 bytes; store the tensor in another dtype"
        )


class InvalidConfig(NemoDcrError):
    """A configuration value is out of range. Caller: change that value."""

    def __init__(self, field: str, detail: str) -> None:
        self.field = field
        self.detail = detail
        super().__init__(f"configuration {field}: {detail}")


class AttemptFailed(NemoDcrError):
    """The attempt cannot be acknowledged. Caller: stop_and_wait, then an overwrite retry."""


class ConditionViolated(AttemptFailed):
    """A copy or a source broke a condition at run time. Caller: overwrite retry; if it repeats, prewarm again."""

    def __init__(self, condition: str, tensor: str, detail: str) -> None:
        self.condition = condition
        self.tensor = tensor
        self.detail = detail
        super().__init__(f"condition {condition} broken by {tensor!r}: {detail}")


class PayloadCorrupt(AttemptFailed):
    """A payload failed its digest, its schema or a bound; nothing of it was applied. Caller: overwrite retry."""

    def __init__(self, payload: str, detail: str) -> None:
        self.payload = payload
        self.detail = detail
        super().__init__(f"payload {payload} is not valid: {detail}")


class PayloadUnsupported(PayloadCorrupt):
    """A payload has an unknown version, critical flag, digest or encoding. Caller: upgrade the receiver."""


class PayloadMissing(AttemptFailed):
    """A manifest names a payload that the store does not hold. Caller: overwrite retry."""

    def __init__(self, payload: str, detail: str) -> None:
        self.payload = payload
        self.detail = detail
        super().__init__(f"payload {payload} is missing: {detail}")


class PostApplyMismatch(AttemptFailed):
    """A written bit does not read back as sent. Caller: overwrite retry; if it repeats, check that host's memory."""

    def __init__(self, tensor: str, elements: int) -> None:
        self.tensor = tensor
        self.elements = elements
        super().__init__(f"tensor {tensor!r}: {elements} written elements do not read back as sent")


class EndpointLost(AttemptFailed):
    """A peer is dead or stopped answering. Caller: overwrite retry without it; restart and restore that peer."""

    def __init__(self, endpoint: str, detail: str) -> None:
        self.endpoint = endpoint
        self.detail = detail
        super().__init__(f"endpoint {endpoint} is lost: {detail}")


class EngineTrouble(AttemptFailed):
    """An engine's own API refused or failed. Caller: overwrite retry; if it repeats, repair what the detail says."""

    def __init__(self, engine: str, operation: str, detail: str) -> None:
        self.engine = engine
        self.operation = operation
        self.detail = detail
        super().__init__(f"engine {engine} did not {operation}: {detail}")


class PayloadConflict(AttemptFailed):
    """The store holds other bytes under the key of this attempt. Caller: overwrite retry, under a new attempt id."""

    def __init__(self, payload: str, detail: str) -> None:
        self.payload = payload
        self.detail = detail
        super().__init__(f"payload {payload} conflicts with what is stored: {detail}")


class AttemptStopped(AttemptFailed):
    """The attempt was stopped or cleaned up while something was still published in it. Caller: drop the work."""

    def __init__(self, attempt: int, detail: str) -> None:
        self.attempt = attempt
        self.detail = detail
        super().__init__(f"attempt {attempt} has ended: {detail}")


class TransportFailed(AttemptFailed):
    """The transport cannot store or deliver. Caller: repair what the message names, then an overwrite retry."""

    def __init__(self, transport: str, detail: str) -> None:
        self.transport = transport
        self.detail = detail
        super().__init__(f"transport {transport} failed: {detail}")


class Conflict(NemoDcrError):
    """The control plane refused: this coordinator was replaced, or the record moved. Caller: step down, never retry."""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(f"control plane conflict: {detail}; step down and read the record again")


class ControlPlaneUnavailable(NemoDcrError):
    """A control-plane call got no reply; it may have taken effect. Caller: wait (a commit), then read the record."""

    def __init__(self, operation: str, detail: str) -> None:
        self.operation = operation
        self.detail = detail
        super().__init__(f"control plane gave no reply to {operation}: {detail}; read the record to learn the outcome")


class CheckpointInvalid(NemoDcrError):
    """A file is no readable part of a checkpoint. Caller: fetch that checkpoint again, or do what the detail says."""

    def __init__(self, path: str, detail: str) -> None:
        self.path = path
        self.detail = detail
        super().__init__(f"{path} is not a usable checkpoint file: {detail}")


class DeltaInvalid(NemoDcrError):
    """A file of a checkpoint delta is missing, damaged or foreign. Caller: fetch that delta again."""

    def __init__(self, path: str, detail: str) -> None:
        self.path = path
        self.detail = detail
        super().__init__(f"{path} is not a usable part of a delta: {detail}")


class BaseMismatch(NemoDcrError):
    """A delta was made for other weights or files. Caller: name the checkpoint that the delta was made from."""

    def __init__(self, base: str, detail: str) -> None:
        self.base = base
        self.detail = detail
        super().__init__(f"{base} is not what the delta was made from: {detail}")


class OperatorNeeded(NemoDcrError):
    """Retries cannot repair the failure. Caller: an operator reads the reason and acts."""

    def __init__(self, reason: str, action: str) -> None:
        self.reason = reason
        self.action = action
        super().__init__(f"{reason}; {action}")


class InternalError(Exception):
    """A fault of this package: a fact that a lemma proves does not hold. Never caught; please report it."""
