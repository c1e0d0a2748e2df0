"""A trainer rank that learns by GRPO: the FSDP2 trainer of this project with another objective.

Every rank takes half of the samples, in the order in which they were asked for. One step is one forward pass, one
backward pass and one AdamW update with a constant rate. The log probabilities of the policy before the update are the
trainer's side of the divergence. Stored bits are compared before and after the update, which gives the change rate
whatever method sends the weights.
Not handled: several updates for one batch; a batch of another size than whole rows for each rank.

Paper: Section 8, Appendix E (GRPO, AdamW, constant rate); Figure 2 (change rate)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.grpo.objective import clipped_loss, divergence
from nemo_dcr.testing.trainer import Fsdp2Trainer


@dataclass(frozen=True, slots=True)
class Row:
    """One completion as the trainer learns from it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """By the policy that sampled."""
    advantage: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What one rank says of a step; `problem` says why the transition may not begin."""

    loss: float
    """This rank's part of the mean over all tokens."""
    divergences: tuple[float, ...]
    """Of this rank's rows, each a sum over its tokens."""
    changed: int
    """BF16 elements of this rank's shards whose stored bits changed."""
    elements: int
    digest: str
    """Of every stored bit of this rank's shards."""
    problem: str = ""


class GrpoTrainer(Fsdp2Trainer):
    """Rank `rank` of `world` that learns from completions."""

    def learn(self, rows: tuple[Row, ...]) -> Learned:
        """One optimizer step on the rows of all ranks.

        Raises: ValueError when the rows cannot be shared out evenly.
        """
        if len(rows) % self.world:
            raise ValueError(f"{len(rows)} rows cannot be shared out among {self.world} ranks")
        count = len(rows) // self.world
        mine = rows[self.rank * count : (self.rank + 1) * count]
        tokens = sum(len(row.tokens) for row in rows)
        new, old, mask = self._log_probabilities(mine)
        advantage = torch.tensor([row.advantage for row in mine], dtype=torch.float32)
        loss = clipped_loss(new, old, advantage, mask, tokens)
        # FSDP averages over ranks; the parts of the ranks add up to the mean over all tokens.
        (loss * self.world).backward()  # type: ignore[no-untyped-call]
        before = {name: self.candidate_words(name) for name in self._parameters}
        self._optimize()
        self.steps += 1
        changed, state = 0, hashlib.sha256()
        for name, words in before.items():
            after = self.candidate_words(name)
            changed += int((words != after).sum())
            state.update(after.data)
        return Learned(
            loss=float(loss.detach()),
            divergences=tuple(divergence(new.detach(), old, mask).tolist()),
            changed=changed,
            elements=sum(words.size for words in before.values()),
            digest=state.hexdigest(),
        )

    def _log_probabilities(self, rows: tuple[Row, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Of the sampled tokens, by this policy and by the one that sampled, and their mask: [rows, positions] each.

        Padding follows the text, where causal attention lets no sampled token see it.
        """
        longest = max(len(row.prompt) + len(row.tokens) for row in rows)
        first = min(len(row.prompt) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        old = torch.zeros(len(rows), longest)
        mask = torch.zeros(len(rows), longest)
        for index, row in enumerate(rows):
            start, end = len(row.prompt), len(row.prompt) + len(row.tokens)
            tokens[index, :end] = torch.tensor((*row.prompt, *row.tokens))
            old[index, start:end] = torch.tensor(row.logprobs, dtype=torch.float32)
            mask[index, start:end] = 1.0
        kept = longest - first + 1  # the position before a token tells its probability
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
        scores = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        new = scores.gather(-1, tokens[:, first:, None]).squeeze(-1)
        return new, old[:, first:], mask[:, first:]
