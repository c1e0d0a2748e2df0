"""Errors keep type, message and fields on their way to another process."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator

import pytest

from nemo_dcr import errors

VALUES = {"int": 3, "str": "text"}


def leaves(kind: type[errors.NemoDcrError]) -> Iterator[type[errors.NemoDcrError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from leaves(each)


@pytest.mark.parametrize("kind", list(leaves(errors.NemoDcrError)), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("carry", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_an_error_arrives_as_it_was(kind, carry) -> None:  # type: ignore[no-untyped-def]
    own = kind.__init__ is not Exception.__init__
    names = list(inspect.signature(kind.__init__).parameters.values())[1:] if own else []
    error = kind(*(VALUES[name.annotation] for name in names)) if names else kind("a message")
    again = carry(error)
    assert (type(again), str(again), again.args, vars(again)) == (kind, str(error), error.args, vars(error))
    with pytest.raises(kind):
        raise again
