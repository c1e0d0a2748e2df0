"""Where the commands of the pages run: directories and names that a reader would have by then.

A scene fills a fresh directory, which is the current one while its commands run, and says which words of a page stand
for what here. Names of files are those of the page. When it ends it looks whether they did what the page says.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nemo_dcr.adapters.huggingface import checkpoint_maps
from nemo_dcr.adapters.owner import Owner
from nemo_dcr.adapters.pytorch import module_tasks
from nemo_dcr.adapters.receiver import Receiver
from nemo_dcr.bits import equal_words
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.control import open_control
from nemo_dcr.record import Committed
from nemo_dcr.testing.checkpoint import tensor_table
from nemo_dcr.testing.control_calls import bootstrap, commit, granted, prepare
from tests.documents.blocks import blocks_of
from tests.unit.checkpoint.checkpoints import flipped, tensor, write_checkpoint

PLANNER = Path(__file__).resolve().parents[2] / "nemo_dcr/planner"


@dataclass
class Scene:
    """What the commands find."""

    words: Mapping[str, str] = field(default_factory=dict)
    """Words of the page and what stands for them here."""
    names: dict[str, Any] = field(default_factory=dict)
    """Names that Python blocks find."""
    checks: list[Callable[[Scene], bool]] = field(default_factory=list)
    """What has to hold once the commands ran."""
    opened: ExitStack = field(default_factory=ExitStack)
    """What ends with the scene."""

    def close(self) -> None:
        """Look whether the commands did what the page says, and end the scene. Raises: AssertionError."""
        with self.opened:
            assert all(check(self) for check in self.checks), [check.__name__ for check in self.checks]


def checkpoints(place: Path) -> Scene:
    """Three versions of a checkpoint and the deltas between them, as `docs/checkpoint-deltas.md` names them."""
    first = {"a": tensor("BF16", (40, 25), 1), "b": tensor("F32", (7,), 2)}
    second = {**first, "a": flipped(first["a"], 0, 100, 901)}
    third = {**second, "b": flipped(second["b"], 3)}
    for name, tensors in (("OLD", first), ("NEW", second), ("NEWER", third)):
        write_checkpoint(place / name, tensors, files={"config.json": b"{}"})

    def as_the_page_says(scene: Scene) -> bool:
        made = [(place / name / "model.safetensors").read_bytes() for name in ("OLD", "OUT", "OUT2", "NEW", "NEWER")]
        return made[0] == made[1] == made[3] and made[2] == made[4]

    return Scene(checks=[as_the_page_says])


def record(place: Path) -> Scene:
    """A commit record of thirteen versions."""
    url = f"sqlite:///{place / 'record.sqlite'}"
    control = open_control(url)
    epoch, last = bootstrap(control)
    for number in range(1, 13):
        attempt = granted(prepare(control, epoch, last, f"c{number}"))
        reply = commit(control, epoch, last, attempt, f"c{number}")
        assert isinstance(reply, Committed)
        last = reply.record
    return Scene({"URL": url})


def plans(place: Path) -> Scene:
    """A model directory and rates of one's own."""
    write_checkpoint(place / "DIR", {"a": tensor("BF16", (64, 64))})
    shutil.copy(PLANNER / "paper.toml", place / "rates.toml")
    return Scene()


def settings(place: Path) -> Scene:
    """The file of settings that stands on the page."""
    page = PLANNER.parents[1] / "docs/configuration.md"
    (file,) = (block for block in blocks_of(page.name, page.read_text(encoding="utf-8")) if block.language == "toml")
    (place / "refit.toml").write_text(file.text, encoding="utf-8")
    return Scene(checks=[lambda scene: scene.names["settings"]["codec"].chunk_target_bytes == 256 << 20])


def checkout(place: Path) -> Scene:
    """The checkout itself; nothing is written."""
    return Scene()


def trainer(place: Path) -> Scene:
    """A model, its checkpoint in MODEL_DIRECTORY, and an engine that serves the run in RUN_DIRECTORY."""

    class Rank(torch.nn.Linear):
        def load_weights(self, weights: Any) -> None:
            for _, full in weights:
                self.weight.data.copy_(full)

    torch.manual_seed(0)
    model = torch.nn.Linear(16, 8, bias=False)
    (place / "MODEL_DIRECTORY").mkdir()
    save_file({"weight": model.weight.detach().bfloat16()}, place / "MODEL_DIRECTORY/model.safetensors")
    engine = Rank(16, 8, bias=False, dtype=torch.bfloat16)
    names = {
        "Owner": Owner,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batches": [torch.randn(4, 16) for _ in range(2)],
        "loss": lambda answer: answer.square().sum(),
    }

    def served(scene: Scene) -> bool:
        same = equal_words(copied_words(engine.weight), copied_words(model.weight.bfloat16()))
        return same and scene.names["version"] == 2

    scene = Scene(names=names, checks=[served])
    scene.opened.enter_context(Receiver(engine, directory="RUN_DIRECTORY"))
    return scene


def transformers(place: Path) -> Scene:
    """A model of the library and the directory that it was saved in."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, dtype="bfloat16"
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(place / "model")
    names = {
        "checkpoint_maps": checkpoint_maps,
        "module_tasks": module_tasks,
        "tensor_table": tensor_table,
        "trained_model": model,
        "checkpoint": place / "model",
    }
    return Scene(names=names, checks=[lambda scene: len(scene.names["tasks"]) > 0])


SCENES: dict[str, Callable[[Path], Scene]] = {
    scene.__name__: scene for scene in (checkpoints, record, plans, settings, checkout, trainer, transformers)
}
