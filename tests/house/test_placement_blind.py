"""The native loader alone knows where a tensor goes: no architecture and no parameter name in the refit itself.

Fails on such a word anywhere in the named components, comments included, so that no rule about a model can creep in.
"""

from __future__ import annotations

import re

import pytest

PLACEMENT_BLIND = ("receiver", "codec", "protocol", "transport", "runtime", "control")
ARCHITECTURE = re.compile(
    r"llama|qwen|mistral|mixtral|gemma|nemotron|mamba|deepseek|smollm|gpt|kimi|\bphi\d|"
    r"q_proj|k_proj|v_proj|o_proj|qkv|gate_up|gate_proj|up_proj|down_proj|in_proj|out_proj|"
    r"embed_tokens|\bembeddings?\b|lm_head|\bexperts?\b|\bmoe\b|\bmlp|self_attn|\battention\b|layer_?norm|rotary|\brope\b|kv_head",
    re.IGNORECASE,
)


def placement_knowledge(module) -> list[str]:
    """The native loader alone knows where a tensor goes (G3): no architecture or parameter-name pattern."""
    if module.name.split(".")[1:2] == [] or module.name.split(".")[1] not in PLACEMENT_BLIND:
        return []
    lines = enumerate(module.text.splitlines(), 1)
    return [f"{module.path}:{number}: {hit[0]}" for number, line in lines if (hit := ARCHITECTURE.search(line))]


def test_no_component_of_the_refit_knows_an_architecture(package):
    assert [fault for module in package for fault in placement_knowledge(module)] == []


@pytest.mark.parametrize("component", PLACEMENT_BLIND)
@pytest.mark.parametrize(
    "text",
    [
        "if name.endswith('q_proj.weight'): pass",
        "LlamaForCausalLM = 1",
        "x = 1  # like the experts of a mixture",
        "def f():\n    return 'model.embed_tokens'",
    ],
)
def test_placement_rule_can_fail(component, text, parse_module):
    assert placement_knowledge(parse_module(f"nemo_dcr/{component}/a.py", text)) != []


def test_placement_rule_lets_plain_words_pass(parse_module):
    text = "# properly embedded; a group of tasks\nname = tensor.name\n"
    assert placement_knowledge(parse_module("nemo_dcr/receiver/a.py", text)) == []
    assert placement_knowledge(parse_module("nemo_dcr/testing/a.py", "q_proj = 1")) == []
