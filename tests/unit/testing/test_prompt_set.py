"""Batches are a pure function of seed, step and rank."""

from __future__ import annotations

from nemo_dcr.testing.prompts import PROMPTS, batch, text


def test_same_arguments_give_the_same_texts():
    assert batch(seed=1, step=2, rank=3, size=4) == batch(seed=1, step=2, rank=3, size=4)


def test_steps_ranks_and_seeds_see_different_texts():
    seen = {tuple(batch(seed=s, step=t, rank=r, size=4)) for s in range(2) for t in range(8) for r in range(2)}
    assert len(seen) == 32


def test_every_prompt_is_reached():
    drawn = {each for step in range(200) for each in batch(seed=0, step=step, rank=0, size=4)}
    assert drawn == {text(index) for index in range(len(PROMPTS))}


def test_prompts_are_distinct():
    assert len(set(PROMPTS)) == len(PROMPTS)
