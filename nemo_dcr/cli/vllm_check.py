"""The independent oracle for vLLM: every stored bit of a rank against a plain dense load of a checkpoint by vLLM.

A fresh model of vLLM is built at the rank's place, without an engine, poisoned and loaded by its native loader. The
form of the job, and the comparison of trackers, are those of `nemo_dcr.testing.dense_check`. Nothing of the source,
receiver or protocol code takes part.
Run as `python -m nemo_dcr.cli.vllm_check JOB.json`, or with `-` for many jobs, as `dense_check`.

Paper: Section 6 (dense refit as the reference), Appendix C (post-apply checks)   Proofs: Proposition 1
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from nemo_dcr.adapters.vllm.forged import ForgedModel, Place
from nemo_dcr.bits.tensors import integer_view
from nemo_dcr.testing.checkpoint import read_checkpoint
from nemo_dcr.testing.dense_check import POISON, Stored, check_jobs, run_job, storage_of


@functools.lru_cache(maxsize=1)  # instances of one layout are compared with one load
def expected_storage(checkpoint: Path, rank: int, tp: int) -> dict[str, Stored]:
    """The storage of rank `rank` of `tp` after a plain dense load of `checkpoint` into a fresh model."""
    model = ForgedModel(checkpoint, Place(tp, rank))
    for parameter in model.module.parameters():
        width = parameter.element_size()
        poison = int.from_bytes(bytes([POISON]) * width, "little", signed=width > 1)
        integer_view(parameter.detach()).fill_(poison)
    model.load_weights((meta.name, tensor) for meta, tensor in read_checkpoint(checkpoint))
    return storage_of(model.module)


if __name__ == "__main__":
    raise SystemExit(check_jobs(sys.argv[1:], functools.partial(run_job, expected=expected_storage)))
