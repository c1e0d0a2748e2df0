"""Parameters of a `transformers` model in the coordinates of its checkpoint.

transformers 5 renames and fuses tensors while it loads: experts that a checkpoint lists one by one are one parameter of
three axes in the model. The names of the checkpoint stay canonical. `checkpoint_maps` runs the library's own conversion
over symbolic tensors, so that each parameter and persistent buffer gets the index map of what loading would put there.
Not handled: conversions that compute (they are refused with their name), quantised checkpoints.

Paper: Section 5 (canonical names); Appendix A.1   Conditions: SC1, SC5
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_dcr.adapters.pytorch import bare_module, bare_name
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import InvalidConfig, OperatorNeeded, UnsupportedMapping
from nemo_dcr.source.piecewise import IndexMap
from nemo_dcr.source.symbolic import SymbolicTensor


def checkpoint_maps(model: nn.Module, tensors: Iterable[TensorMeta]) -> dict[str, IndexMap]:
    """The index map of each parameter and persistent buffer that loading the checkpoint would fill, by its name.

    A model that is no `PreTrainedModel`, or has no conversion, gets the maps of the tensors with its own names.

    Args:
        model: on any device, `meta` included, and as it is trained; only names and whole shapes are looked at.
        tensors: of the checkpoint.

    Raises: UnsupportedMapping (SC1) for a tensor that the model does not load, (SC5) for a conversion that is no
    movement of elements, or a shape that the model does not have.
    """
    model = bare_module(model)
    shapes = {bare_name(name): tuple(value.shape) for name, value in model.state_dict().items()}
    given = {tensor.name: tensor for tensor in tensors}
    found = (
        _converted(model, given, shapes)
        if hasattr(model, "base_model_prefix")
        else {name: SymbolicTensor.of(tensor) for name, tensor in given.items()}
    )
    for name, symbol in found.items():
        if name not in shapes:
            raise UnsupportedMapping(name, "SC1", "the checkpoint has it, the model does not")
        if symbol.map.shape != shapes[name]:
            detail = f"the model has shape {shapes[name]}, loading the checkpoint gives {symbol.map.shape}"
            raise UnsupportedMapping(name, "SC5", detail)
    return {name: symbol.map for name, symbol in found.items()}


def _converted(
    model: Any, given: dict[str, TensorMeta], shapes: dict[str, tuple[int, ...]]
) -> dict[str, SymbolicTensor]:
    """What `from_pretrained` makes of the tensors: renamed, then converted, in the library's own order."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    used: dict[str, Any] = {}
    for name in sorted(given, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, shapes)
        if target not in shapes and name in shapes:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, shapes)
        if target not in shapes:
            raise UnsupportedMapping(name, "SC1", "the model does not load it")
        if target not in used:
            used[target] = WeightRenaming(name, target) if pattern is None else deepcopy(by_pattern[pattern])
        used[target].add_tensor(target, name, pattern or name, SymbolicTensor.of(given[name]))
    found: dict[str, SymbolicTensor] = {}
    for target, transform in used.items():
        made = transform.convert(target, model=model, config=model.config)
        for name, symbol in made.items():
            found[name] = symbol[0] if isinstance(symbol, list) else symbol
    return found


def count_elements(config: Path) -> int:
    """Elements of the causal language model of a `config.json`; it is built on the meta device, without memory.

    Raises: OperatorNeeded without transformers; InvalidConfig when it cannot build the model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise OperatorNeeded("counting a configuration needs transformers", "pip install transformers")
    import transformers

    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
        with torch.device("meta"):
            of_model = transformers.AutoConfig.for_model(**fields)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(of_model)  # type: ignore[no-untyped-call]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"transformers cannot build {config}: {error}; give its size, such as 500GB"
        raise InvalidConfig("--model", detail) from error
    return sum(parameter.numel() for parameter in model.parameters())
