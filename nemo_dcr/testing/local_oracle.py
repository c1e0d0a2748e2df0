"""Dense loads by the native loader: what every bit of a rank's storage must be at a committed version.

Full canonical words go through the same loader, into storage that this loader filled before. Nothing here knows deltas.

Paper: Section 6.2 (reference)
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words, dtype_name, tensor_from_words
from nemo_dcr.ids import NO_CANDIDATE, CandidateId
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Rule, ToyModel

StoredBits = dict[str, tuple[str, tuple[int, ...], bytes]]


def stored_bits(model: ToyModel) -> StoredBits:
    """Dtype, shape and bytes of every parameter and buffer by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (dtype_name(t.dtype), tuple(t.shape), copied_words(t).tobytes()) for name, t in named}


class DenseOracle:
    """Dense loads of candidates, remembered."""

    def __init__(self, source: LocalSource, rules: Mapping[str, Rule]) -> None:
        self._source = source
        self._rules = rules
        self._canonical: dict[CandidateId, dict[str, Words]] = {}
        self._expected: dict[tuple[int, int, CandidateId], StoredBits] = {}

    def canonical(self, candidate: CandidateId) -> dict[str, Words]:
        """Full canonical words of a candidate."""
        if candidate not in self._canonical:
            self._canonical[candidate] = self._source.canonical(candidate)
        return self._canonical[candidate]

    def load(self, model: ToyModel, candidate: CandidateId) -> None:
        """A dense load by the model's own loader."""
        words = self.canonical(candidate)
        model.load_weights(
            (tensor.name, tensor_from_words(words[tensor.name].copy(), tensor.dtype, tensor.shape))
            for tensor in self._source.tensors
        )

    def expected(self, rank: int, ranks: int, candidate: CandidateId) -> StoredBits:
        """Stored bits of a rank after a dense load of version 0 and then of the candidate."""
        key = (rank, ranks, candidate)
        if key not in self._expected:
            model = ToyModel(self._source.tensors, self._rules, rank, ranks)
            self.load(model, NO_CANDIDATE)
            if candidate != NO_CANDIDATE:
                self.load(model, candidate)
            self._expected[key] = stored_bits(model)
        return self._expected[key]
