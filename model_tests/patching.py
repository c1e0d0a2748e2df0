"""Functions of the code replaced for a while, whole or in one of their uses.

A patch names a module or class, a function in it, and the replacement. Whoever imported the function by name keeps the
old one, so a patch names the place from which it is called.

Spec: Mutants
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Patch = tuple[Any, str, Callable[..., Any]]
"""A module or class, the name of a function in it, and the replacement."""


@contextmanager
def patched(*patches: Patch) -> Iterator[None]:
    """The code with functions replaced."""
    before = [(place, name, getattr(place, name)) for place, name, _ in patches]
    for place, name, weaker in patches:
        setattr(place, name, weaker)
    try:
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)


def within(place: Any, name: str, *inner: Patch) -> Patch:
    """The patches hold only while the function `name` runs."""
    whole = getattr(place, name)

    def weaker(*args: Any, **kwargs: Any) -> Any:
        with patched(*inner):
            return whole(*args, **kwargs)

    return place, name, weaker


def before(place: Any, name: str, change: Callable[..., tuple[Any, ...]]) -> Patch:
    """The function gets other arguments."""
    whole = getattr(place, name)
    return place, name, lambda *args: whole(*change(*args))


def after(place: Any, name: str, change: Callable[..., Any]) -> Patch:
    """The result of the function is changed: `change(result, *arguments)`."""
    whole = getattr(place, name)
    return place, name, lambda *args, **kwargs: change(whole(*args, **kwargs), *args, **kwargs)


def yes(*_: Any, **__: Any) -> bool:
    return True


def no(*_: Any, **__: Any) -> bool:
    return False


def nobody(*_: Any, **__: Any) -> tuple[Any, ...]:
    return ()
