"""The guards behind the failure tests of group E, and how each one is taken out; see `guards`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from nemo_dcr.adapters.vllm import admission, client, in_process, rank, support, transforms
from nemo_dcr.receiver import residents
from tests.failures.guards import Guard, Patch, nothing

E = "tests/failures/test_group_e.py"


def none(*_: Any, **__: Any) -> list[Any]:
    return []


def the_step_after_loading_is_not_watched(patch: Patch) -> None:
    patch.setattr(transforms.TransformWatch, "transforms", none)


def a_changed_weight_is_not_noticed(patch: Patch) -> None:
    patch.setattr(transforms.TransformWatch, "_change", lambda *_: "")


def moved_storage_is_not_noticed(patch: Patch) -> None:
    patch.setattr(residents.Residents, "replaced", none)


def caches_are_kept(patch: Patch) -> None:
    """What vLLM's own pause does when nobody asks for more."""

    async def close_only(self: Any) -> None:
        await self._gate.close()

    patch.setattr(in_process.LlmEngine, "pause", lambda self: setattr(self, "_version", None))
    patch.setattr(client.EngineClient, "pause", close_only)


def a_reset_is_taken_for_done(patch: Patch) -> None:
    """The call is made, and nobody looks at what it answers."""

    def pause(self: Any) -> None:
        self._version = None
        self._llm.reset_prefix_cache(reset_connector=True)

    async def pause_client(self: Any) -> None:
        await self._gate.close()
        await self._client.reset_prefix_cache(False, True)

    patch.setattr(in_process.LlmEngine, "pause", pause)
    patch.setattr(client.EngineClient, "pause", pause_client)


def forward_passes_are_not_fenced(patch: Patch) -> None:
    patch.setattr(rank.RankReceiver, "fence", nothing)


def the_gate_does_not_wait(patch: Patch) -> None:
    async def close(self: Any) -> int:
        self.version = None
        return 0

    patch.setattr(admission.Admission, "close", close)


def requests_are_let_in_while_the_gate_is_closed(patch: Patch) -> None:
    @asynccontextmanager
    async def admitted(self: Any) -> AsyncIterator[str]:
        yield str(self.version)

    patch.setattr(admission.Admission, "admitted", admitted)


def every_configuration_is_taken(patch: Patch) -> None:
    patch.setattr(support, "refusals", none)


def _e(entry: str, removes: str, take_out: Callable[[Patch], None], test: str, **case: Any) -> Guard:
    return Guard(entry, removes, take_out, f"{E}::{test}", case)


CACHED = "test_e4_a_cached_answer_of_one_version_never_serves_the_next"
CONFIRMED = "test_e4_a_reset_that_is_not_confirmed_fails_the_attempt_before_any_write"
DRIVERS = (
    ("LLM", "adapters.vllm.in_process.LlmEngine.pause"),
    ("AsyncLLM", "adapters.vllm.client.EngineClient.pause"),
)
ENGINE_GUARDS: tuple[Guard, ...] = (
    *(
        _e(
            "E1",
            "adapters.vllm.transforms.TransformWatch.transforms",
            the_step_after_loading_is_not_watched,
            "test_e1_what_is_made_of_weights_after_loading_follows_a_refit_or_is_refused",
            step=step,
            dtype="BF16",
        )
        for step in ("absorbed_product", "packed_in_a_closure", "swapped_halves")
    ),
    _e(
        "E2",
        "receiver.residents.Residents.replaced",
        moved_storage_is_not_noticed,
        "test_e2_storage_that_moved_between_refits_is_refused_before_any_write",
        move="rebound",
    ),
    *(_e("E4", removes, caches_are_kept, CACHED, driver=driver) for driver, removes in DRIVERS),
    *(
        _e("E4", removes, a_reset_is_taken_for_done, CONFIRMED, driver=driver, answer=False)
        for driver, removes in DRIVERS
    ),
    _e(
        "E4",
        "adapters.vllm.rank.RankReceiver.fence",
        forward_passes_are_not_fenced,
        "test_e4_nothing_is_computed_or_cached_over_storage_that_is_not_committed",
        driver="LLM",
    ),
    *(
        _e(
            "E5",
            f"adapters.vllm.admission.Admission.{name}",
            take_out,
            "test_e5_no_token_is_computed_between_the_first_write_and_reopening",
            tokens=5,
            clients=8,
        )
        for name, take_out in (
            ("close", the_gate_does_not_wait),
            ("admitted", requests_are_let_in_while_the_gate_is_closed),
        )
    ),
    _e(
        "E6",
        "adapters.vllm.support.refusals",
        every_configuration_is_taken,
        "test_e6_an_engine_with_a_draft_model_is_refused_at_start_up",
        method="mtp",
    ),
    _e(
        "E8",
        "adapters.vllm.support.refusals",
        every_configuration_is_taken,
        "test_e8_a_quantized_engine_is_refused_at_start_up",
        quantization="fp8",
    ),
    _e(
        "E8",
        "adapters.vllm.transforms.TransformWatch._change",
        a_changed_weight_is_not_noticed,
        "test_e8_a_weight_whose_shape_or_dtype_changes_after_loading_is_refused",
        step="requantised",
        dtype="BF16",
    ),
)
