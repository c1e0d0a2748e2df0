"""The stand-ins for packages that need a GPU: calling one raises, and megatron-core did not take them for real."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import megatron_stubs
import pytest

from tests.megatron import trainer

pytestmark = pytest.mark.megatron
LIST = Path(__file__).parents[2] / "requirements" / "megatron_stubs.py"


def test_environment_has_the_listed_stand_ins_and_no_other() -> None:
    assert Path(megatron_stubs.__file__).read_text() == LIST.read_text()
    standing_in = {name.partition(".")[0] for name, module in sys.modules.items() if is_stand_in(module)}
    assert standing_in == set(megatron_stubs.STUBS)
    assert importlib.util.find_spec("no_such_package") is None


def is_stand_in(module: object) -> bool:
    return isinstance(module, megatron_stubs.AbsentModule)


def test_calling_a_stand_in_raises() -> None:
    import transformer_engine.pytorch as absent

    with pytest.raises(RuntimeError, match=r"transformer_engine\.pytorch\.Linear is a stand-in"):
        absent.Linear(3, 4)
    with pytest.raises(RuntimeError, match="is a stand-in"):
        absent.module.GroupedLinear()

    class Layer(absent.Linear):
        pass

    with pytest.raises(RuntimeError, match="is a stand-in"):
        Layer()
    assert not isinstance(trainer.Layout(), absent.Linear)


def test_megatron_core_did_not_take_a_stand_in_for_the_real_package() -> None:
    believing = [
        name
        for name, module in sys.modules.items()
        if name.startswith("megatron.core") and getattr(module, "HAVE_TE", False) is True
    ]
    assert believing == []
