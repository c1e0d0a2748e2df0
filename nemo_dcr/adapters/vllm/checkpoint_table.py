"""The tensor table of a checkpoint that has a configuration and no weights.

Names, shapes and dtypes come from the headers of safetensors files where there are some, else from the transformers
class that the configuration names: it is made without memory, and its state is named as transformers would save it.
Not handled: architectures that transformers does not have; they need a checkpoint with headers.

Paper: Section 3 (canonical tensors)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from nemo_dcr.bits.tensors import dtype_name
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.directory import open_checkpoint
from nemo_dcr.errors import InvalidConfig


def table_of_config(config: Any, *, dtype: str = "bfloat16") -> list[TensorMeta]:
    """Every tensor that transformers would save for `config`, by name.

    Raises: InvalidConfig when transformers has no class of the architecture.
    """
    names = list(config.architectures or [])
    # vLLM's registry spells some names with other capitals.
    spelled = {name.casefold(): name for name in dir(transformers)}
    model_class = getattr(transformers, spelled.get(names[0].casefold(), ""), None) if names else None
    if model_class is None:
        raise InvalidConfig("config.json", f"transformers has no class for {names}; give a directory with weights")
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=getattr(torch, dtype))
    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = revert_weight_conversion(model, {name: tensor for name, tensor in state.items() if name not in ignored})
    # A wrapped language model goes by two names; both renamings are reverted, one on top of the other.
    named = {name.replace("language_model.model.model.", "language_model.model."): state[name] for name in state}
    return [TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in sorted(named.items())]


def table_of_directory(directory: Path) -> list[TensorMeta]:
    """The table of a local directory: of its safetensors headers, or of its `config.json`.

    Raises: InvalidConfig when it has neither, or an architecture without a class; CheckpointInvalid for bad headers.
    """
    if any(directory.glob("*.safetensors")):
        return sorted(tensor.stored for tensor in open_checkpoint(directory).tensors.values())
    if not (directory / "config.json").is_file():
        raise InvalidConfig("MODEL", f"{directory} has neither safetensors files nor a config.json")
    return table_of_config(AutoConfig.from_pretrained(directory))
