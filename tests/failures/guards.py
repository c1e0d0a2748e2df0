"""The guards behind the failure tests, and how each one is taken out.

A guard is a function of the package without which a test of its failure must fail; `take_out` replaces it by what the
system that failed did, or by nothing. Where a second guard would still catch the failure, both go.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_dcr import control_rules
from nemo_dcr.bits import width
from nemo_dcr.bits.tensors import integer_view, tensor_from_words
from nemo_dcr.checkpoint import delta as checkpoint_delta
from nemo_dcr.checkpoint import target
from nemo_dcr.codec import payload as codec_payload
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.errors import ConditionViolated, NemoDcrError
from nemo_dcr.kernels import hot, plain
from nemo_dcr.protocol import alignment, attempt, endpoint_guards
from nemo_dcr.receiver import apply as receiver_apply
from nemo_dcr.receiver import (
    hook,
    live_storage,
    observe,
    paths,
    place,
    place_indexed,
    probe,
    recorder,
    repeats,
    survey,
    threads,
)
from nemo_dcr.receiver.conditions import InterceptedWrites, NoStateAcrossCalls, ReportedAsCopied
from nemo_dcr.receiver.ingest import Ingest
from nemo_dcr.receiver.residents import Residents
from nemo_dcr.receiver.scratch import Scratch
from nemo_dcr.source import direct, geometry, residual, tasks
from nemo_dcr.source.tasks import AffineTask
from nemo_dcr.transport import objects, s3, s3_bucket, s3_client, s3_object, s3_subscription
from nemo_dcr.transport.base import Announcement
from tests.failures.guards_relay import RELAY_GUARDS

Patch = pytest.MonkeyPatch
A, B, C, D = (f"tests/failures/test_group_{group}.py" for group in "abcd")
WALKS = "tests/e2e/test_walks.py"
FAILING = (AssertionError, pytest.fail.Exception, NemoDcrError)
"""How a test fails: its own assertion, a refusal that did not come, a refusal that should not have come."""


@dataclass(frozen=True)
class Guard:
    """One guard of one entry."""

    entry: str
    removes: str
    """The function, as `module.name` below nemo_dcr."""
    take_out: Callable[[Patch], None]
    test: str
    """`file::test` that then fails."""
    case: Mapping[str, Any]
    """Parameters of the test for which it fails."""
    fails_with: tuple[type[BaseException], ...] = FAILING


def yes(*_: Any, **__: Any) -> bool:
    return True


def no(*_: Any, **__: Any) -> bool:
    return False


def nothing(*_: Any, **__: Any) -> None:
    return None


# -- group A


def memory_is_not_looked_at(patch: Patch) -> None:
    """What no operator shows is not there."""
    patch.setattr(live_storage.ByteCopy, "look", nothing)


def only_copies_are_looked_at(patch: Patch) -> None:
    """Every other operator passes straight through, and nobody looks at the bits afterwards."""
    memory_is_not_looked_at(patch)
    known = hook.operator_of

    def blind(func: Any) -> hook.Operator:
        operator = known(func)
        return operator if operator.copies else replace(operator, positions=(), keywords=())

    for module in (hook, observe):
        patch.setattr(module, "operator_of", blind)


def padding_is_banned(patch: Patch) -> None:
    """A blanket ban on fills."""

    def ban(
        self: recorder.StepRecorder, destination: Tensor, value: Any, storage: int, operator: hook.Operator
    ) -> None:
        raise self.refuse(InterceptedWrites(operator.name, constant=False))

    patch.setattr(recorder.StepRecorder, "constant", ban)


def missing_copies_are_not_missed(patch: Patch) -> None:
    """An item is done when the loader takes the next one, whatever became of its entries."""
    patch.setattr(place.DenseScratchPlacer, "finish", nothing)
    patch.setattr(place_indexed.IndexedPlacer, "finish", nothing)


def only_python_copies_are_intercepted(patch: Patch) -> None:
    """A patch of Tensor.copy_, which a copy that C++ makes never meets."""
    inside: list[bool] = []
    copy, dispatch = Tensor.copy_, hook.WriteHook.__torch_dispatch__

    def python_copy(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inside.append(True)
        try:
            return copy(self, *args, **kwargs)
        finally:
            inside.pop()

    def only_python(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(self, func, types, args, kwargs) if inside else func(*args, **(kwargs or {}))

    patch.setattr(Tensor, "copy_", python_copy)
    patch.setattr(hook.WriteHook, "__torch_dispatch__", only_python)


NAN = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000, "F64": (0x7FF8 << 48) + 1, "F8_E4M3": 0x7F, "F8_E5M2": 0x7D}


def a_nan_means_unchanged(patch: Patch) -> None:
    """One fixed NaN is the placeholder, also where it is a value."""
    patch.setattr(receiver_apply, "free_pattern", lambda values, dtype: NAN.get(dtype, 0xFF))


def there_is_always_a_sentinel(patch: Patch) -> None:
    """The search gives the last pattern it tried when every one is taken."""
    search = receiver_apply.free_pattern

    def never_none(values: Any, dtype: str) -> int:
        found = search(values, dtype)
        return 0 if found is None else found

    patch.setattr(receiver_apply, "free_pattern", never_none)


def all_tensors_travel_in_one_call(patch: Patch) -> None:
    make = paths.LoaderTable.__init__

    def grouped(self: paths.LoaderTable, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{**kwargs, "grouped": True})

    patch.setattr(paths.LoaderTable, "__init__", grouped)


def state_across_calls_is_not_seen(patch: Patch) -> None:
    patch.setattr(NoStateAcrossCalls, "check", nothing)


def later_copies_get_a_mask_of_their_own(patch: Patch) -> None:
    """The second stage takes every element of its source for a sent one."""
    mask = place.DenseScratchPlacer._mask

    def anew(self: Any, name: str, step: Any, number: int, source: Tensor) -> Tensor:
        if step.repeats:
            return torch.ones(source.numel(), dtype=torch.bool)
        return mask(self, name, step, number, source)

    patch.setattr(place.DenseScratchPlacer, "_mask", anew)


def only_the_last_stage_is_probed(patch: Patch) -> None:
    load = probe.PathProbe._load

    def without_stages(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = load(self, *args, **kwargs)
        self._later = []
        return found

    patch.setattr(probe.PathProbe, "_load", without_stages)


def reports_are_counted(patch: Patch) -> None:
    def by_count(report: Any, taken: Any, residents: Residents) -> ReportedAsCopied | None:
        copied = sum(bool(entry.copies) for entry in taken)
        return None if report is None or len(set(report)) == copied else ReportedAsCopied(other="another number")

    for module in (survey, receiver_apply):
        patch.setattr(module, "report_row", by_count)


def the_hook_is_process_wide(patch: Patch) -> None:
    """Copies of integers are refused on every thread while items are applied."""
    copy, enter, leave = Tensor.copy_, hook.WriteHook.__enter__, hook.WriteHook.__exit__

    def refuse(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype is torch.int64:
            raise NotImplementedError("copy_ of integers while weights are updated")
        return copy(self, *args, **kwargs)

    def install(self: Any) -> Any:
        patch.setattr(Tensor, "copy_", refuse)
        return enter(self)

    def remove(self: Any, *args: Any) -> Any:
        patch.setattr(Tensor, "copy_", copy)
        return leave(self, *args)

    patch.setattr(hook.WriteHook, "__enter__", install)
    patch.setattr(hook.WriteHook, "__exit__", remove)


def other_threads_are_not_seen(patch: Patch) -> None:
    patch.setattr(observe.Observer, "trespass", nothing)
    patch.setattr(ReportedAsCopied, "check", nothing)


def threads_are_left_alone(patch: Patch) -> None:
    patch.setattr(threads.ThreadCensus, "outliving", lambda self: [])


def every_path_takes_xor(patch: Patch) -> None:
    path = survey.Survey._path

    def optimistic(self: Any, *args: Any) -> paths.LoaderPath:
        found = path(self, *args)
        return replace(found, path_class=PathClass.XOR) if found.path_class is PathClass.OVERWRITE else found

    patch.setattr(survey.Survey, "_path", optimistic)


def the_first_rank_decides(patch: Patch) -> None:
    patch.setattr(paths, "unite", lambda classes: next(iter(classes)))


def overlap_is_decided_on_spans(patch: Patch) -> None:
    def spans(views: Any) -> dict[int, int]:
        found = {}
        for one, view in enumerate(views):
            for other, partner in enumerate(views):
                if one != other and view.span[0] < partner.span[1] and partner.span[0] < view.span[1]:
                    found[one] = other
        return found

    patch.setattr(survey, "overlapping", spans)


def overlap_is_not_looked_for(patch: Patch) -> None:
    patch.setattr(survey, "overlapping", lambda views: {})


def storages_are_told_apart_by_identity_alone(patch: Patch) -> None:
    patch.setattr(Residents, "memory_of", lambda self, number: (number, 0))


def repeated_elements_are_not_remembered(patch: Patch) -> None:
    patch.setattr(repeats.XorRepeats, "add", nothing)


def strides_of_the_source_are_ignored(patch: Patch) -> None:
    """The source of a copy is taken for a contiguous piece of the scratch."""

    def flat(self: Any, name: str, destination: Tensor, source: Tensor) -> None:
        dense = torch.empty(0, dtype=source.dtype).set_(source.untyped_storage(), 0, (source.numel(),), (1,))
        integer_view(destination).bitwise_xor_(integer_view(dense.view(source.shape)))

    patch.setattr(place.DenseScratchPlacer, "_xor", flat)
    sound = place_indexed.index_map

    def flat_map(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> Any:
        return sound(shape, torch.empty(shape, device="meta").stride(), target)

    patch.setattr(place_indexed, "index_map", flat_map)


# -- group B


def _as_floats(words: Any) -> Tensor:
    dtype = {1: "F8_E5M2", 2: "BF16", 4: "F32", 8: "F64"}[words.dtype.itemsize]
    return tensor_from_words(words, dtype, (len(words),)).to(torch.float64)


def _compared_by(patch: Patch, changed: Callable[[Any, Any], Any]) -> None:
    """Whichever loops another test of this process has loaded, these find the changes."""
    patch.setattr(hot._CHOICE, "loops", plain)
    patch.setattr(plain, "changed_indices", changed)


def values_are_compared(patch: Patch) -> None:
    def as_floats(new: Any, old: Any) -> Any:
        return np.flatnonzero((_as_floats(new) != _as_floats(old)).numpy()).astype(np.int64)

    _compared_by(patch, as_floats)


def the_low_byte_is_compared(patch: Patch) -> None:
    def low_bytes(new: Any, old: Any) -> Any:
        mask = new.dtype.type(0xFF)
        return np.flatnonzero((new & mask) != (old & mask)).astype(np.int64)

    _compared_by(patch, low_bytes)


def the_baseline_follows_every_export(patch: Patch) -> None:
    """The snapshot is refreshed when it was sent, not when it was committed."""
    changes = direct.AffineUnit.changes

    def and_refresh(self: Any, trackers: Any, encoding: Encoding) -> Any:
        found = changes(self, trackers, encoding)
        for task in self.tasks:
            trackers.words(task.key)[:] = task.words()
        return found

    patch.setattr(direct.AffineUnit, "changes", and_refresh)


def clones_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(survey, "rearranged_copies", lambda residents, written: {})


def indices_have_32_bits(patch: Patch) -> None:
    decode = codec_payload.decode_locations

    def narrow(*args: Any) -> Any:
        found = decode(*args)
        return None if found is None else found.astype(np.uint32).astype(np.int64)

    patch.setattr(codec_payload, "decode_locations", narrow)


def shards_are_read_as_raw_memory(patch: Patch) -> None:
    """The first bytes of the storage, whatever the strides say."""

    def raw(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        words = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()
        return words.view(f"<u{tensor.itemsize}")[: tensor.numel()].copy()

    patch.setattr(tasks, "copied_words", raw)


def drift_is_not_looked_for(patch: Patch) -> None:
    """Whatever the shard holds now is compared with what it was."""
    from tests.unit.source import test_delta_owner

    def unchecked(get: Callable[[], Tensor], key: str, **_: Any) -> Any:
        return lambda: tasks.copied_words(get())

    patch.setattr(tasks, "_checked", lambda words, *_: words)
    patch.setattr(test_delta_owner, "tensor_reader", unchecked)


def one_dtype_for_all(patch: Patch) -> None:
    """Every tensor is rounded to 16 bits, the precision of the first one."""
    words = AffineTask.words

    def rounded(self: AffineTask) -> Any:
        found = words(self)
        bits_lost = 8 * max(0, width(self.tensor.dtype) - 2)
        return found >> found.dtype.type(bits_lost) << found.dtype.type(bits_lost)

    patch.setattr(AffineTask, "words", rounded)


def placeholders_are_for_floats(patch: Patch) -> None:
    search = receiver_apply.free_pattern

    def floats_only(values: Any, dtype: str) -> int | None:
        if dtype not in NAN:
            raise ConditionViolated("LC8", dtype, "no NaN to mark what is unchanged")
        return search(values, dtype)

    patch.setattr(receiver_apply, "free_pattern", floats_only)


def the_digest_is_a_sum(patch: Patch) -> None:
    """An exclusive or of all words, which does not see two that change places."""

    def folded(*parts: Any) -> bytes:
        data = b"".join(bytes(part) for part in parts)
        data += bytes(-len(data) % 8)
        return int(np.bitwise_xor.reduce(np.frombuffer(data, dtype="<u8"))).to_bytes(16, "little")

    patch.setattr(codec_payload, "_digest", folded)


def everything_that_a_change_can_reach_is_sent(patch: Patch) -> None:
    def all_elements(self: Any, tensor: Any, words: Any, mode: Any) -> Any:
        return np.arange(len(words), dtype=np.int64), words

    patch.setattr(residual.ResidualConverter, "_changes", all_elements)


def dependencies_are_direct_only(patch: Patch) -> None:
    def direct_only(self: geometry.Dependencies, changed: Any) -> Any:
        hit = {name for name, reads in self.depends.items() if reads & set(changed)}
        return tuple(sorted({tensor for name in hit for tensor in self.outputs.get(name, ())}))

    patch.setattr(geometry.Dependencies, "required", direct_only)


def scales_are_not_watched(patch: Patch) -> None:
    patch.setattr(geometry.Dependencies, "required", lambda self, changed: self.all_tensors() if "x" in changed else ())


def replicas_are_taken_on_trust(patch: Patch) -> None:
    from nemo_dcr.source import setup

    patch.setattr(setup, "check_replicas", nothing)


def deltas_are_written_over_the_base(patch: Patch) -> None:
    """No look at the payloads beforehand, and the result is not written beside the base."""
    write = target.Target.write

    def over_the_base(self: target.Target, directory: Any, shards: Any, files: Any, **rest: Any) -> None:
        for file in shards:
            (self.base.directory / file).rename(self.base.directory / f"{file}.old")
        write(self, self.base.directory, shards, files, **rest)

    patch.setattr(checkpoint_delta.Delta, "check", nothing)
    patch.setattr(target.Target, "write", over_the_base)


# -- group C


def stale_attempts_are_accepted(patch: Patch) -> None:
    patch.setattr(endpoint_guards, "is_current", yes)


def duplicates_are_accepted(patch: Patch) -> None:
    patch.setattr(endpoint_guards, "not_duplicate", yes)


def duplicates_are_staged(patch: Patch) -> None:
    offer = Ingest.offer

    def again(self: Ingest, data: Any) -> Any:
        self._seen.clear()
        return offer(self, data)

    patch.setattr(Ingest, "offer", again)


def whoever_answers_holds_the_version(patch: Patch) -> None:
    """A restarted receiver is taken for its predecessor."""
    patch.setattr(alignment, "holds_record", yes)
    patch.setattr(alignment, "is_eligible", yes)


def the_new_coordinator_retries(patch: Patch) -> None:
    from nemo_dcr.protocol import membership

    patch.setattr(membership, "needs_roll_forward", no)


def check_then_set(patch: Patch) -> None:
    patch.setattr(control_rules, "holds_epoch", yes)
    patch.setattr(control_rules, "record_matches", yes)
    patch.setattr(control_rules, "is_latest", yes)


def one_acknowledgement_is_enough(patch: Patch) -> None:
    def some(state: Any) -> bool:
        reports = [(member, state.receivers.get(member.receiver)) for member in state.plan.required]
        return any(report is not None and attempt.is_acked(state.plan, member, report) for member, report in reports)

    patch.setattr(attempt, "has_all_acks", some)
    patch.setattr(attempt, "digest_agrees", yes)


def nothing_ends_an_attempt_but_an_answer(patch: Patch) -> None:
    """Deadlines that pass and peers that are gone are no events."""
    step = attempt.step

    def patient(state: Any, event: Any) -> Any:
        if isinstance(event, attempt.DeadlinePassed | attempt.ReceiverLost | attempt.OwnerLost):
            return state, ()
        return step(state, event)

    patch.setattr(attempt, "step", patient)


def the_retry_has_a_wrong_signature(patch: Patch) -> None:
    """A recovery that was never run: it fails before it does anything."""
    changes = direct.AffineUnit.changes

    def broken(self: Any, trackers: Any, encoding: Encoding) -> Any:
        if encoding is Encoding.OVERWRITE:
            raise TypeError("changes() missing 1 required positional argument: 'attempt'")
        return changes(self, trackers, encoding)

    patch.setattr(direct.AffineUnit, "changes", broken)


def losses_concern_nobody(patch: Patch) -> None:
    """A required receiver may leave, and the attempt goes on without it."""
    patch.setattr(attempt, "_is_member", no)


def sleep_is_ignored(patch: Patch) -> None:
    may_apply = endpoint_guards.may_apply
    patch.setattr(endpoint_guards, "may_apply", lambda s, *rest: may_apply(replace(s, asleep=False), *rest))


def _a(entry: str, removes: str, take_out: Callable[[Patch], None], test: str, **case: Any) -> Guard:
    return Guard(entry, removes, take_out, f"{A}::{test}", case)


def _b(entry: str, removes: str, take_out: Callable[[Patch], None], test: str, **case: Any) -> Guard:
    return Guard(entry, removes, take_out, f"{B}::{test}", case)


# -- group D


def a_whole_tensor_is_made_beside_the_scratch(patch: Patch) -> None:
    def load(self: Scratch, item: Item, placeholder: int) -> None:
        words = self.words(item.tensor)
        whole = np.full_like(words, placeholder)
        whole[slice(item.start, item.start + item.count) if item.indices is None else item.indices] = item.values
        self._dirty = (item.tensor, None)
        words[:] = whole

    patch.setattr(Scratch, "load", load)


def requests_are_sent_once(patch: Patch) -> None:
    """A client without retries."""
    opened = s3_client.open_client
    patch.setattr(s3_bucket, "open_client", lambda config, held: opened(replace(config, attempts=1), held))


def an_absent_object_is_given_up_at_once(patch: Patch) -> None:
    """A store that is taken to show what was stored at once."""

    def once(self: Any, announcement: Any) -> bytes:
        found = s3_object.read_object(
            self._bucket, announcement.key, self._name(announcement.key), nothing, limit=1 << 40
        )
        if found is None:
            raise AssertionError("the object is not there")
        return found.body

    patch.setattr(s3_subscription.S3Subscription, "_download", once)


def no_upload_arrives_unanswered(patch: Patch) -> None:
    """No answer means that nothing was stored."""
    patch.setattr(s3_bucket.S3Bucket, "_arrived", no)


def what_came_is_taken_for_all(patch: Patch) -> None:
    """The end of a connection is the end of the object."""

    def read(self: Any, nbytes: int) -> bytes:
        buffer = io.BytesIO()
        while len(buffer.getvalue()) < nbytes:
            view = memoryview(bytearray(nbytes - len(buffer.getvalue())))
            got = self._read_into(view)
            if not got:
                break
            buffer.write(view[:got])
        return buffer.getvalue()

    patch.setattr(s3_object._Reader, "read", read)


def any_frame_will_do(patch: Patch) -> None:
    """An object is what its key says."""

    def trusting(key: Any, head: bytes, file_bytes: int) -> Any:
        *_, nbytes, digest_bytes, digest = objects._FIELDS.unpack(head[: objects._FIELDS.size])
        return Announcement(key, digest[:digest_bytes], nbytes)

    patch.setattr(objects, "read_frame", trusting)


def keys_do_not_carry_the_attempt(patch: Patch) -> None:
    for module in (s3, s3_object, s3_subscription):
        patch.setattr(module, "set_name", lambda attempt, owner: f"attempt-{1:020d}/{objects.owner_name(owner)}")


def only_the_first_page_is_read(patch: Patch) -> None:
    listing = s3_bucket.S3Bucket.listing

    def first_page(self: Any, prefix: str, *, after: str = "") -> Any:
        return itertools.islice(listing(self, prefix, after=after), self.config.page_keys)

    patch.setattr(s3_bucket.S3Bucket, "listing", first_page)


def the_manifest_is_handed_on_alone(patch: Patch) -> None:
    deliver = s3_subscription.S3Subscription._deliver

    def alone(self: Any, known: Any, entries: Any) -> None:
        deliver(self, known, entries[-1:])

    patch.setattr(s3_subscription.S3Subscription, "_deliver", alone)


GUARDS: tuple[Guard, ...] = (
    _a(
        "A1",
        "receiver.hook.operator_of",
        only_copies_are_looked_at,
        "test_a1_a_write_beside_the_copy_is_refused_before_it_happens",
        write="bits in place after the copy",
        dtype="F32",
    ),
    _a(
        "A1",
        "receiver.recorder.StepRecorder.constant",
        padding_is_banned,
        "test_a1_zeroed_padding_beside_the_copy_stays_legal",
        dtype="F32",
    ),
    _a(
        "A1",
        "receiver.live_storage.ByteCopy.look",
        memory_is_not_looked_at,
        "test_a1_a_write_through_memory_taken_earlier_is_undone_and_refused",
        act="address",
        early=False,
        dtype="BF16",
    ),
    *(
        _a(
            "A1",
            f"receiver.{placer}.finish",
            missing_copies_are_not_missed,
            "test_a1_an_item_that_is_written_unseen_after_prewarm_fails_and_the_retry_repairs_it",
            way="array",
            encoding=Encoding.XOR,
            dtype="BF16",
            index_space=index_space,
        )
        for placer, index_space in (("place.DenseScratchPlacer", False), ("place_indexed.IndexedPlacer", True))
    ),
    _a(
        "A2",
        "receiver.hook.WriteHook.__torch_dispatch__",
        only_python_copies_are_intercepted,
        "test_a2_item_assignment_is_intercepted_like_any_copy",
        form="p[:] = t",
        dtype="BF16",
    ),
    _a(
        "A2",
        "receiver.hook.operator_of",
        only_copies_are_looked_at,
        "test_a2_operators_that_write_without_a_copy_are_refused_with_storage_untouched",
        form="index_copy_",
        dtype="F16",
    ),
    *(
        _a(
            "A3",
            "receiver.scratch.free_pattern",
            a_nan_means_unchanged,
            "test_a3_every_nan_infinity_and_zero_arrives_with_its_bits",
            form=form,
            dtype=dtype,
        )
        for form, dtype in (("view", "BF16"), ("view", "F64"), ("padded", "F16"))
    ),
    _a(
        "A4",
        "receiver.scratch.free_pattern",
        there_is_always_a_sentinel,
        "test_a4_an_item_may_hold_every_pattern_of_its_width",
        form="view",
        dtype="F8_E4M3",
    ),
    *(
        _a(
            "A5",
            "receiver.survey.Survey._observe",
            all_tensors_travel_in_one_call,
            "test_a5_a_loader_that_holds_its_input_gets_every_tensor_right",
            hold=hold,
            dtype="BF16",
        )
        for hold in ("list", "look ahead")
    ),
    _a(
        "A5",
        "receiver.conditions.NoStateAcrossCalls.check",
        state_across_calls_is_not_seen,
        "test_a5_a_pair_that_waits_for_its_other_half_across_calls_is_refused",
        dtype="BF16",
    ),
    _a(
        "A6",
        "receiver.place.DenseScratchPlacer._mask",
        later_copies_get_a_mask_of_their_own,
        "test_a6_a_composed_loader_transforms_the_sent_elements_and_no_others",
        transform="thrice",
        dtype="F32",
        resident="F32",
    ),
    _a(
        "A6",
        "receiver.survey.Survey._path",
        every_path_takes_xor,
        "test_a6_xor_items_are_refused_on_a_composed_path",
        dtype="BF16",
    ),
    _a(
        "A6",
        "receiver.probe.PathProbe._probe_elements",
        only_the_last_stage_is_probed,
        "test_a6_stages_that_move_elements_and_move_them_back_are_refused",
        dtype="F32",
    ),
    _a(
        "A8",
        "receiver.report.report_row",
        reports_are_counted,
        "test_a8_a_report_is_reconciled_name_by_name",
        report="the stale name instead of the copied one",
        dtype="I64",
    ),
    _a(
        "A10",
        "receiver.hook.WriteHook",
        the_hook_is_process_wide,
        "test_a10_work_of_other_threads_goes_on_while_items_are_applied",
        work="int64 copy_",
    ),
    _a(
        "A10",
        "receiver.observe.Observer.trespass",
        other_threads_are_not_seen,
        "test_a10_a_loader_whose_copies_other_threads_make_is_refused",
        form="copy in a thread",
        dtype="BF16",
    ),
    _a(
        "A10",
        "receiver.threads.ThreadCensus.outliving",
        threads_are_left_alone,
        "test_a10_a_thread_that_outlives_the_load_is_refused",
        kind="thread",
    ),
    _a(
        "A11",
        "receiver.survey.Survey._path",
        every_path_takes_xor,
        "test_a11_a_cast_in_the_copy_takes_overwrites_only",
        dtype="BF16",
        resident="F32",
    ),
    _a(
        "A11",
        "codec.records.unite",
        the_first_rank_decides,
        "test_a11_one_casting_rank_makes_a_name_overwrite_only_on_all_of_them",
        casting=2,
    ),
    _a(
        "A13",
        "receiver.views.overlapping",
        overlap_is_decided_on_spans,
        "test_a13_interleaved_copies_are_told_from_overlapping_ones",
        form="even and odd rows",
        dtype="BF16",
    ),
    _a(
        "A13",
        "receiver.views.overlapping",
        overlap_is_not_looked_for,
        "test_a13_copies_that_share_a_byte_are_refused",
        form="one row twice",
        dtype="U8",
    ),
    _a(
        "A13",
        "receiver.repeats.XorRepeats.add",
        repeated_elements_are_not_remembered,
        "test_a13_an_element_that_two_xor_items_carry_is_refused_across_items_and_calls",
        dtype="F32",
        second=(0, 1, 2),
        calls=2,
    ),
    _a(
        "A13",
        "receiver.residents.Residents.memory_of",
        storages_are_told_apart_by_identity_alone,
        "test_a13_storages_that_share_memory_are_one_destination",
        dtype="BF16",
        first=0,
    ),
    _a(
        "A15",
        "receiver.place.DenseScratchPlacer._xor",
        strides_of_the_source_are_ignored,
        "test_a15_expert_stacks_land_where_a_dense_load_puts_them",
        dtype="BF16",
        layout="interleaved",
        tp=1,
        ep=3,
    ),
    *(
        _b(
            "B1",
            "kernels.plain.changed_indices",
            values_are_compared,
            "test_b1_a_sign_of_zero_is_a_change_and_an_unchanged_nan_is_none",
            dtype=dtype,
            mode=test_mode,
        )
        for dtype, test_mode in (("BF16", "xor"), ("F64", "overwrite"))
    ),
    _b(
        "B2",
        "kernels.plain.changed_indices",
        the_low_byte_is_compared,
        "test_b2_a_change_of_any_one_byte_is_seen",
        dtype="BF16",
        byte=1,
    ),
    _b(
        "B2",
        "source.direct.AffineUnit.changes",
        the_baseline_follows_every_export,
        "test_b2_changes_are_counted_from_the_committed_version_and_not_from_the_last_look",
        dtype="BF16",
    ),
    _b(
        "B3",
        "receiver.repeats.XorRepeats.add",
        repeated_elements_are_not_remembered,
        "test_b3_two_owners_of_one_tensor_never_cancel_each_other",
        dtype="BF16",
        calls=2,
    ),
    _b(
        "B3",
        "receiver.views.overlapping",
        overlap_is_not_looked_for,
        "test_b3_two_names_of_one_storage_are_refused_at_prewarm",
        dtype="BF16",
    ),
    _b(
        "B4",
        "receiver.rearranged.rearranged_copies",
        clones_are_not_looked_for,
        "test_b4_a_cloned_head_that_no_load_updates_is_refused",
        dtype="BF16",
        turned=True,
    ),
    _b(
        "B6",
        "codec.locations.decode_locations",
        indices_have_32_bits,
        "test_b6_indices_survive_beyond_every_width",
        shape=(2**16, 2**16 + 1),
        dtype="U8",
        encoding=Encoding.XOR,
    ),
    _b(
        "B7",
        "bits.tensors.copied_words",
        shards_are_read_as_raw_memory,
        "test_b7_a_strided_shard_is_read_as_its_contiguous_copy",
        cut="every third row",
        dtype="F32",
    ),
    Guard(
        "B8",
        "source.tasks.tensor_reader",
        drift_is_not_looked_for,
        "tests/unit/source/test_delta_owner.py::test_drift_of_dtype_or_shape_fails_the_attempt",
        {"drifted": torch.zeros(6, dtype=torch.float16), "mode": "overwrite"},
    ),
    _b(
        "B9",
        "source.tasks.AffineTask.words",
        one_dtype_for_all,
        "test_b9_every_tensor_keeps_its_own_dtype_and_its_last_bit",
        weight="BF16",
        router="F32",
        first=True,
    ),
    _b(
        "B10",
        "receiver.scratch.free_pattern",
        placeholders_are_for_floats,
        "test_b10_every_dtype_and_shape_survives_a_failed_attempt_and_its_retry",
        dtype="I64",
        shape=(5,),
    ),
    _b(
        "B11",
        "codec.payload._digest",
        the_digest_is_a_sum,
        "test_b11_the_digest_covers_every_byte_and_its_place",
        damage="two words change places",
    ),
    _b(
        "B13",
        "source.residual.ResidualConverter._changes",
        everything_that_a_change_can_reach_is_sent,
        "test_b13_trainer_padding_is_never_sent_and_receiver_padding_stays_zero",
        dtype="BF16",
        padding="fill",
    ),
    _b(
        "B14",
        "source.geometry.Dependencies.required",
        dependencies_are_direct_only,
        "test_b14_a_changed_scale_sends_every_output_whose_bits_change_and_no_other",
        target="BF16",
        indirect=True,
    ),
    _b(
        "B14",
        "source.geometry.Dependencies.required",
        scales_are_not_watched,
        "test_b14_a_changed_scale_sends_every_output_whose_bits_change_and_no_other",
        target="F8_E4M3",
        indirect=False,
    ),
    Guard(
        "B15",
        "source.replicas.check_replicas",
        replicas_are_taken_on_trust,
        "tests/unit/source/test_geometry.py::test_replicas_that_differ_by_one_bit_are_found_at_setup",
        {"kind": "affine"},
    ),
    _b(
        "B17",
        "checkpoint.delta.Delta.check",
        deltas_are_written_over_the_base,
        "test_b17_a_refused_delta_leaves_the_callers_base_as_it_was",
        dtype="BF16",
        spoil="flipped bit",
        way="in place",
    ),
    Guard(
        "C1",
        "source.direct.AffineUnit.changes",
        the_baseline_follows_every_export,
        f"{WALKS}::test_the_baseline_stays_and_the_retry_sends_the_same_changes_after_a_failed_apply",
        {},
    ),
    Guard(
        "C2",
        "protocol.endpoint_guards.is_current",
        stale_attempts_are_accepted,
        "tests/paper/test_algorithm_b1.py::test_endpoints_ignore_payloads_of_an_attempt_that_a_later_prepare_replaced",
        {},
    ),
    Guard(
        "C3",
        "protocol.endpoint_guards.not_duplicate",
        duplicates_are_accepted,
        "tests/paper/test_algorithm_b1.py::test_duplicate_payloads_are_applied_once",
        {},
    ),
    Guard(
        "C3",
        "receiver.ingest.Ingest.offer",
        duplicates_are_staged,
        "tests/unit/receiver/test_ingest.py::test_a_payload_that_comes_twice_is_applied_once",
        {},
    ),
    Guard(
        "C4",
        "protocol.alignment.holds_record",
        whoever_answers_holds_the_version,
        "tests/paper/test_algorithm_b2.py::test_restarted_receiver_restores_the_committed_version_densely_before_it_joins",
        {},
    ),
    Guard(
        "C5",
        "protocol.membership.needs_roll_forward",
        the_new_coordinator_retries,
        "tests/paper/test_algorithm_b2.py::test_new_coordinator_reads_the_record_before_it_decides_whether_to_retry",
        {"committed": True},
    ),
    Guard(
        "C7",
        "control_rules.holds_epoch",
        check_then_set,
        "tests/paper/test_algorithm_b2.py::test_replaced_coordinator_gets_a_conflict_for_any_later_prepare_or_commit",
        {},
    ),
    Guard(
        "C8",
        "protocol.attempt.has_all_acks",
        one_acknowledgement_is_enough,
        "tests/paper/test_algorithm_b1.py::"
        "test_acknowledgement_needs_every_payload_every_end_every_write_and_the_flush",
        {"missing": "write"},
    ),
    Guard(
        "C10",
        "protocol.alignment.holds_record",
        whoever_answers_holds_the_version,
        f"{C}::test_c10_a_cold_receiver_is_never_given_deltas_of_later_versions",
        {"behind": 1, "gate": "sync"},
    ),
    Guard(
        "C11",
        "protocol.attempt.step",
        nothing_ends_an_attempt_but_an_answer,
        "tests/unit/protocol/test_coordinator.py::test_deadline_names_who_had_not_finished",
        {},
    ),
    Guard(
        "C11",
        "protocol.attempt.step",
        nothing_ends_an_attempt_but_an_answer,
        "tests/unit/protocol/test_coordinator.py::"
        "test_killed_instance_is_named_left_behind_and_restored_after_the_commit",
        {},
    ),
    Guard(
        "C12",
        "source.direct.AffineUnit.changes",
        the_retry_has_a_wrong_signature,
        f"{C}::test_c12_every_recovery_runs_on_the_real_nodes",
        {"recovery": "overwrite retry"},
        (TypeError,),
    ),
    Guard(
        "C14",
        "protocol.attempt._is_member",
        losses_concern_nobody,
        "tests/paper/test_algorithm_b2.py::test_membership_changes_take_effect_only_between_attempts",
        {},
    ),
    Guard(
        "C15",
        "protocol.endpoint_guards.may_apply",
        sleep_is_ignored,
        "tests/unit/protocol/test_endpoint.py::"
        "test_nothing_is_written_before_open_apply_over_running_requests_or_while_asleep",
        {},
    ),
    *(
        Guard("D5", removes, take_out, f"{D}::test_d5_a_fault_of_the_store_costs_time_only", {"fault": fault})
        for removes, take_out, fault in (
            ("transport.s3_client.open_client", requests_are_sent_once, "503 to every kind of request"),
            (
                "transport.s3_subscription.S3Subscription._download",
                an_absent_object_is_given_up_at_once,
                "404 twice after the upload",
            ),
            ("transport.s3_object._Reader.read", what_came_is_taken_for_all, "a body that breaks off"),
            ("transport.s3_bucket.S3Bucket._arrived", no_upload_arrives_unanswered, "an upload without an answer"),
        )
    ),
    *(
        Guard("D5", removes, take_out, f"{D}::{test}", {})
        for removes, take_out, test in (
            ("transport.objects.read_frame", any_frame_will_do, "test_d5_a_stale_object_under_a_key_is_not_taken"),
            (
                "transport.s3_object.set_name",
                keys_do_not_carry_the_attempt,
                "test_d5_a_late_upload_of_an_older_attempt_meets_no_key_of_the_newer",
            ),
            (
                "transport.s3_bucket.S3Bucket.listing",
                only_the_first_page_is_read,
                "test_d5_a_cleanup_reads_every_page_of_a_listing",
            ),
            (
                "transport.s3_subscription.S3Subscription._deliver",
                the_manifest_is_handed_on_alone,
                "test_d5_a_manifest_comes_after_all_that_it_lists",
            ),
        )
    ),
    Guard(
        "D8",
        "receiver.scratch.Scratch.load",
        a_whole_tensor_is_made_beside_the_scratch,
        "tests/unit/receiver/test_apply.py::test_one_change_in_a_large_tensor_needs_no_second_large_buffer",
        {},
    ),
    *(Guard(*row, {}) for row in RELAY_GUARDS),
)
