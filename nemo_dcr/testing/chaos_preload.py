"""Imported once, by the server that the processes of chaos systems are forked from: everything that they will need.

torch imports hundreds of modules at the first prewarm, for many seconds. Importing this module does one, so that every
process that is forked later has them. It starts no thread and opens no socket.

Paper: Section 6.1 (prewarm)
"""

from __future__ import annotations

import torch

from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.testing import chaos_roles
from nemo_dcr.testing.chaos_source import RULES, TENSORS
from nemo_dcr.testing.toy_loader import ToyModel

__all__ = ["chaos_roles"]


def warm() -> None:
    """Discover the loader paths of the toy model once, and forget them."""
    torch.set_num_threads(1)
    prewarm(ToyModel(TENSORS, RULES, 0, 1), TENSORS)


warm()
