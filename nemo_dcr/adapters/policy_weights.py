"""The weights of one trainer rank as its owner sees them: tasks, plan, baseline, and the way back.

All ranks make it together: they describe what they hold, agree who compares what, and prove that replicas are equal.
When a candidate is given up, the trainer's own `restore` brings the committed version back, or else the served values
are written into the parameters. Either way they are compared with the baseline before training goes on.
Not handled: when a candidate is frozen (owner).

Paper: Section 5; Figure A.2   Spec: DropCandidate   Conditions: SC1, SC2, SC3
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from torch import nn

from nemo_dcr.adapters.huggingface import checkpoint_maps
from nemo_dcr.adapters.pytorch import module_tasks, reshard
from nemo_dcr.adapters.trainer_group import TrainerGroup
from nemo_dcr.bits import equal_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import BaselineConfig, CodecConfig
from nemo_dcr.errors import ConditionViolated, EndpointLost, InvalidConfig, NemoDcrError
from nemo_dcr.ids import CandidateId, OwnerId
from nemo_dcr.source.baseline import BaselineState
from nemo_dcr.source.baseline_files import BaselineFiles
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.residual import ResidualConverter
from nemo_dcr.source.rollback import roll_back
from nemo_dcr.source.setup import agree_bits, agree_plan
from nemo_dcr.source.tasks import ResidualInput, ResidualTask

_NAMES = msgspec.msgpack.Decoder(list[str])


class PolicyWeights:
    """A model as the owner node's `FrozenTrainer`."""

    def __init__(
        self,
        model: nn.Module,
        table: Sequence[TensorMeta],
        ranks: TrainerGroup,
        *,
        codec: CodecConfig,
        committed: CandidateId,
        inputs: Sequence[ResidualInput] = (),
        conversions: Sequence[ResidualTask] = (),
        restore: Callable[[], None] | None = None,
        baseline: BaselineConfig | None = None,
    ) -> None:
        """Agree with the other ranks. Arguments and errors are those of `owner.Owner.from_module`.

        Raises: InvalidConfig when there are residual conversions and no `restore`.
        """
        if (inputs or conversions) and restore is None:
            raise InvalidConfig("restore", "only the trainer can bring back what residual conversions read; give it")
        self.committed = committed
        self.stopping = threading.Event()
        """Set when this rank ends: it waits for no other rank then."""
        self._model = model
        self._ranks = ranks
        self._restore = restore
        self._chunk_bytes = codec.chunk_target_bytes
        self._drops = 0
        mine = sorted({tensor.name for task in conversions for tensor in task.outputs})
        converted = {name for data in ranks.calls.gather(msgspec.msgpack.encode(mine)) for name in _NAMES.decode(data)}
        with _together(ranks):
            maps = checkpoint_maps(model, [tensor for tensor in table if tensor.name not in converted])
            self._tasks = module_tasks(model, maps, converted={watched.name for watched in inputs})
        self._inputs = tuple(inputs)
        rank = OwnerId(ranks.calls.rank)
        self.plan = agree_plan(ranks.calls, self._tasks, inputs, conversions, expected=table)
        converter = None
        if converted:
            converter = ResidualConverter(
                self.plan, ranks.streams, inputs, conversions, chunk_target_bytes=codec.chunk_target_bytes
            )
        owned = self.plan.owned_affine(rank, self._tasks)
        files = BaselineFiles(baseline.dir, rank) if baseline is not None and baseline.dir else None
        self.delta = DeltaOwner(rank, owned, residual=converter, config=codec, files=files)

    def settle(self) -> None:
        """Let go of gathered parameters, so that what is read is what the optimizer changed."""
        reshard(self._model)

    def check_replicas(self) -> None:
        """Compare the bits of all replicas. All ranks together.

        Raises: ConditionViolated (SC2) naming tensors and ranks.
        """
        agree_bits(self._ranks.calls, self.plan, (*self._tasks, *self._inputs))

    # As a FrozenTrainer.

    def end_transition(self, candidate: CandidateId) -> None:
        """The frozen weights are committed."""
        self.committed = candidate

    def reload(self, delta: DeltaOwner) -> CandidateId:
        """Back to the committed version.

        Raises: ConditionViolated (SC3) when the baseline is lost and the trainer has no `restore`, or when what it
        restored is not the committed version; AttemptFailed when this rank ends meanwhile; EndpointLost.
        """
        self._drops += 1
        tag = delta.tag
        known = tag is None or tag.state is BaselineState.COMMITTED
        words = {box.label: held for _, box, held in delta.tracker_words()} if known else {}
        if self._restore is not None:
            self._restore()
            self.settle()
        elif known:
            roll_back(
                self.plan,
                self._ranks.streams,
                self._tasks,
                words,
                f"drop/{self._drops}",
                chunk_bytes=self._chunk_bytes,
                stopped=self.stopping.is_set,
            )
        else:
            detail = "the baseline is lost; restart the trainer from its checkpoint of the committed version"
            raise ConditionViolated("SC3", f"owner {delta.owner}", detail)
        for task in self._tasks:
            if task.key in words and not equal_words(task.words(), words[task.key]):
                raise ConditionViolated("SC3", task.key, "what was restored is not the committed version")
        return self.committed


@contextmanager
def _together(ranks: TrainerGroup) -> Iterator[None]:
    """Raise on every rank what one of them raises inside, so that none waits for it.

    Raises: EndpointLost naming the other rank and its problem.
    """
    try:
        yield
    except NemoDcrError as problem:
        ranks.calls.gather(f"{type(problem).__name__}: {problem}".encode())
        raise
    for rank, told in enumerate(ranks.calls.gather(b"")):
        if told:
            raise EndpointLost(f"trainer rank {rank}", f"its model was refused: {told.decode()}")
