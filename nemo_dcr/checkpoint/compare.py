"""Where two arrays of stored words differ, without a list of the places.

Counting needs one block of memory, a list of places eight bytes for each. So a comparison counts first.

Paper: Section 5 (compare step)
"""

from __future__ import annotations

import numpy as np

from nemo_dcr.bits import Words
from nemo_dcr.kernels.plain import BLOCK_BYTES


def count_changes(new: Words, old: Words) -> tuple[int, int | None]:
    """How many words differ, and the index of the first one.

    Raises: ValueError when width or length differ.
    """
    if new.dtype != old.dtype or new.shape != old.shape:
        raise ValueError(f"cannot compare {new.dtype}{list(new.shape)} with {old.dtype}{list(old.shape)}")
    step = BLOCK_BYTES // new.itemsize
    count, first = 0, None
    for start in range(0, len(new), step):
        differ = new[start : start + step] != old[start : start + step]
        found = int(np.count_nonzero(differ))
        if found and first is None:
            first = start + int(np.argmax(differ))
        count += found
    return count, first
