"""An engine process that tells in its trace what it holds, and the classes that who knows the candidates makes of it.

A process cannot know whose words it holds: candidates are drawn elsewhere. It can tell a digest of the stored bits of
each item, in the field `words` of the state after a line. Only the thread that writes the storage may read it without
tearing a write, so only lines of that thread have the field: those that move tags and words. After the run the parent,
who knows all candidates, makes the field `stored` of it (digest_classes): the candidates whose dense load at that rank
has the same digest.

    python -m model_tests.digest_engine DIRECTORY INSTANCE RANKS RANK     (as tests.e2e.socket_cluster)

Not handled: engines whose storage is too large to be read at each line, as that of the demo.

Paper: Proposition 1   Spec: store, content
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from model_tests import digest_classes
from model_tests.contents import Faces, Held, ItemName
from model_tests.engines import Table
from model_tests.trace_files import Line
from nemo_dcr.ids import InstanceId, ReceiverId, instance_of
from nemo_dcr.testing.local_oracle import stored_bits
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import ToyModel
from nemo_dcr.trace import Emit, Tracer
from tests.e2e.socket_cluster import RULES, engine, serve, source

WORDS = "words"
"""Field of a line: `item=digest` for each item, with commas between."""


def faces_at(source: LocalSource, ranks: int) -> Faces:
    """Where the items of a source lie at the ranks of an instance."""
    return Faces(source, Table(source.tensors, RULES, {}), ranks)


def digests(held: Mapping[ItemName, Held]) -> dict[ItemName, str]:
    """By item."""
    return {item: hashlib.blake2b(each.data, digest_size=16).hexdigest() for item, each in held.items()}


class DigestTracer:
    """Passes lines on to a tracer, with digests of a model's storage in those of the thread that made this."""

    def __init__(self, model: ToyModel, faces: Faces, tracer: Tracer) -> None:
        self._model, self._faces, self._tracer = model, faces, tracer
        self._writer = threading.get_ident()

    def emit(self, emitted: Emit) -> None:
        """See `Tracer.emit`."""
        if threading.get_ident() == self._writer:
            held = digests(self._faces.held(self._model.rank, stored_bits(self._model)))
            words = ",".join(f"{item}={digest}" for item, digest in sorted(held.items()))
            emitted = replace(emitted, post={**emitted.post, WORDS: words})
        self._tracer.emit(emitted)


def with_classes(lines: Iterable[Line], source: LocalSource, instances: Mapping[InstanceId, int]) -> list[Line]:
    """The lines of a run with `stored` in place of `words`.

    Args:
        source: knows every candidate of the run.
        instances: ranks by instance.
    """

    @cache
    def candidates(ranks: int, rank: int, item: ItemName, digest: str) -> list[str]:
        return [candidate for candidate in source.weights if dense(ranks, rank, candidate)[item] == digest]

    @cache
    def dense(ranks: int, rank: int, candidate: str) -> dict[ItemName, str]:
        faces = at(ranks)
        return digests(faces.held(rank, faces.oracle.expected(rank, ranks, candidate)))  # type: ignore[arg-type]

    @cache
    def at(ranks: int) -> Faces:
        return faces_at(source, ranks)

    def classed(line: Line) -> Line:
        post = dict(line.emitted.post)
        if WORDS not in post:
            return line
        instance, rank = instance_of(ReceiverId(line.node)), int(line.node.rpartition("/")[2])
        ranks, held = instances[instance], dict[tuple[int, str], list[str]]()
        for each in str(post.pop(WORDS)).split(","):
            item, _, digest = each.rpartition("=")
            owner, tensor, _ = at(ranks).owned[item]
            held[int(owner), tensor.name] = candidates(ranks, rank, item, digest)
        post["stored"] = digest_classes.told(held)
        return replace(line, emitted=replace(line.emitted, post=post))

    return [classed(line) for line in lines]


def main(directory: Path, instance: InstanceId, ranks: int, rank: int) -> None:
    """Run one engine rank until it is told to stop."""
    faces = faces_at(source(), ranks)
    serve(*engine(directory, instance, ranks, rank, told=lambda model, tracer: DigestTracer(model, faces, tracer)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), InstanceId(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
