"""Stand-ins for packages that need a GPU, only in the environment of `make megatron`: set-up installs this file there.

Megatron-Bridge imports these packages whether or not a model uses them. A stand-in can be imported, and its names can
be base classes and arguments of `isinstance`; calling one raises. They appear when Bridge is imported: megatron-core
asks for the packages, does without, and would take a stand-in for the real one, so it goes first. `typing.override`,
which Python 3.11 lacks, is the real one of typing_extensions.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

import typing_extensions

STUBS = {
    "transformer_engine": "layers and FP8 tensors for GPUs; Bridge's adapters name its layers as classes they may meet",
}
"""Package -> what it is and who asks for it."""

ASK_FIRST = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.models.mamba",
    "megatron.core.optimizer",
    "megatron.training.models",
)
"""Modules that ask whether a package is there and do without; imported before the stand-ins appear."""


class Absent(type):
    """The type of every name of a stand-in."""

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        """Raises: RuntimeError, always."""
        raise RuntimeError(f"{cls.__module__}.{cls.__name__} is a stand-in for a package that needs a GPU")

    def __getattr__(cls, name: str) -> Absent:
        return _absent(f"{cls.__module__}.{cls.__name__}", name)


class AbsentModule(types.ModuleType):
    """A module of a stand-in."""

    def __getattr__(self, name: str) -> Absent:
        return _absent(self.__name__, name)


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of `STUBS` and their modules, from the import of Bridge on."""

    def __init__(self) -> None:
        self.open = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A package, for the names of `STUBS` and whatever is inside of them; nothing for any other name."""
        if fullname == "megatron.bridge" and not self.open:
            for name in ASK_FIRST:
                importlib.import_module(name)
            self.open = True
        if self.open and fullname.partition(".")[0] in STUBS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty one."""
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """For every process of the environment, when it starts."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    sys.meta_path.insert(0, StubFinder())


def _absent(module: str, name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {"__module__": module})
