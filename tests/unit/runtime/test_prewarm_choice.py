"""A receiver node undoes what a loader writes behind its back, or only notices it, as it is configured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.config import RefitConfig
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import Incarnation, Member, ReceiverId
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.testing.toy_loader import ScriptedModel
from nemo_dcr.transport.memory import MemoryTransport

META = TensorMeta("w", (4,), "F32")


@pytest.mark.parametrize("copy", [True, False])
def test_the_configuration_says_whether_foreign_writes_of_a_prewarm_are_undone(copy: bool) -> None:
    stored = torch.ones(4)
    hidden = stored.numpy()

    def load(residents: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        hidden.fill(2)
        return [name for name, tensor in weights if residents[name].copy_(tensor) is not None]

    node = ReceiverNode(
        member=Member(ReceiverId("e0/0"), Incarnation(1)),
        ranks=1,
        model=ScriptedModel({"w": stored}, load),
        transport=MemoryTransport(),
        refit=RefitConfig(prewarm_copy=copy),
    )
    if copy:
        classes, reasons = node.prewarm([META])
        assert (classes, reasons["w"][0]) == ({"w": PathClass.UNSUPPORTED}, "LC1")
    else:
        with pytest.raises(OperatorNeeded, match="wrote w during prewarm"):
            node.prewarm([META])
    assert stored.tolist() == [1 if copy else 2] * 4
