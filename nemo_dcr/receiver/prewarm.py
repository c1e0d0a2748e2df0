"""Prewarm: find every loader path of one rank before anything is written, and refuse the ones that cannot be exact.

The survey runs the native loader under an observer that keeps its writes away from live storage. A loader that writes
live storage all the same, where torch cannot show it before (an array or address taken earlier, another thread), is
found out by the bits: the old ones are put back and every name is refused, since nothing that was seen over
changing storage counts. So is a loader whose threads are still there when it is done.
Loops that place entries are loaded here, so that no refit waits for them.
The engine must have loaded a checkpoint before, so that constant writes (zeroed pad rows) can be compared.
Not handled: tensors derived by arithmetic at load time (`LoaderTable.unwritten` lists what no path writes); a foreign
write that changes no bit.

Paper: Section 6.1 (prewarm), Figure A.8; Table A.2   Proofs: L5 inactive_unchanged, L7 loader_commutes
Conditions: LC1, LC9
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.kernels import hot, placement
from nemo_dcr.receiver.attributes import PinnedAttributes
from nemo_dcr.receiver.conditions import InterceptedWrites, first_breach
from nemo_dcr.receiver.live_storage import ByteCopy, Checksums, LiveStorage
from nemo_dcr.receiver.paths import LoaderTable
from nemo_dcr.receiver.residents import NativeModel, Residents
from nemo_dcr.receiver.survey import Survey
from nemo_dcr.receiver.threads import ThreadCensus

__all__ = ["ByteCopy", "Checksums", "LoaderTable", "prewarm"]


def prewarm(model: NativeModel, tensors: Sequence[TensorMeta], *, keep: type[LiveStorage] = ByteCopy) -> LoaderTable:
    """Make the loader table of `model` for the tensor table of the trainers.

    A name that the loader cannot take exactly becomes UNSUPPORTED with the condition it breaks; `LoaderTable.check`
    raises for it. Live storage has the same bits afterwards, whether this returns or raises. `keep` says how that is
    made sure: `ByteCopy` needs as much host memory as the rank has resident bytes, for the time of this call;
    `Checksums` needs none, and where they differ the engine has to be started again.

    Raises: ValueError when a name comes twice; OperatorNeeded when a thread goes on writing live storage, when a
    storage lost its memory, or when checksums differ; UnsupportedDtype for a resident tensor without an unsigned view.
    """
    if len({meta.name for meta in tensors}) != len(tensors):
        raise ValueError("the tensor table has a name twice")
    hot.warm(sum(meta.nbytes for meta in tensors))
    residents = Residents(model)
    attributes = PinnedAttributes(model)
    live, threads = keep(residents), ThreadCensus()
    try:
        table = Survey(model, residents, attributes, live).table(tensors)
    finally:
        running = threads.outliving()
        residents.put_back()
        attributes.put_back()
        live.put_back()
    by_index = [path.tensor for path in table.paths.values() if path.by_index is not None]
    placement.warm(sum(tensor.nbytes for tensor in by_index), {tensor.width for tensor in by_index})
    breach = first_breach(InterceptedWrites(unseen=live.written, running=running))
    if breach is not None:
        table.refuse(breach)
    return table
