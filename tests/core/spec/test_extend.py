"""Longer contexts, judged by transformers' own frequencies, and larger vocabularies."""

import copy
from typing import Any

import pytest

from sabia.core.errors import UsageError
from sabia.core.spec import from_config, inverse_frequencies, new_config
from sabia.core.spec.extend import extend_context, extend_vocabulary
from sabia.core.spec.rope import Rope

BASE = new_config("llama", hidden=64, layers=2, vocab=101, heads=4, head_dim=20, context=128)
NEW_KEYS = {k: v for k, v in BASE.items() if k != "rope_theta"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}
}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64}
LONGROPE |= dict.fromkeys(("short_factor", "long_factor"), [1.5] * 10)
GEMMA3 = {k: v for k, v in BASE.items() if k != "rope_theta"} | {
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}


def ropes(config: dict[str, Any]) -> list[Rope]:
    """The rotation of each layer."""
    return [layer.mixer.rope for layer in from_config(config).layers]


@pytest.mark.parametrize("config", [BASE, NEW_KEYS], ids=["old keys", "new keys"])
def test_a_larger_base_slows_all_rotations(config: dict) -> None:
    before = copy.deepcopy(config)
    longer = extend_context(config, 512, theta=500000)
    assert config == before and from_config(longer).max_positions == 512
    assert ropes(longer) == [Rope(20, 500000.0)] * 2
    assert ropes(extend_context(config, 512)) == ropes(config)


@pytest.mark.parametrize("config", [BASE, NEW_KEYS], ids=["old keys", "new keys"])
def test_yarn_has_the_frequencies_of_transformers(config: dict) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    longer = extend_context(extend_context(config, 256, factor=2), 1024, factor=8)
    theirs = transformers.AutoConfig.for_model(**longer)
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
    rope = ropes(longer)[0]
    assert inverse_frequencies(rope) == pytest.approx(frequencies.tolist(), rel=1e-6)
    assert rope.amplitude == pytest.approx(amplitude)
    assert rope.original_length == 128 and theirs.max_position_embeddings == 1024


def test_local_layers_turn_as_before() -> None:
    local, everywhere = ropes(extend_context(GEMMA3, 1024, theta=5e6, factor=8))
    assert (local.kind, local.theta) == ("default", 10000.0)
    assert (everywhere.kind, everywhere.theta, everywhere.factor) == ("yarn", 5e6, 8.0)


def test_the_text_part_of_a_larger_model_is_extended() -> None:
    whole = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {}}
    longer = extend_context(whole, 512, theta=4e6)
    assert from_config(longer).max_positions == 512
    assert ropes(longer)[1].theta == 4e6 and whole["text_config"] is GEMMA3


def test_a_vocabulary_grows_where_the_configuration_has_it() -> None:
    whole = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {}}
    for config in (BASE, whole):
        spec = from_config(config)
        grown = extend_vocabulary(spec, 128)
        assert grown == from_config(grown.config) and grown.tensors()[0].shape[0] == 128
        assert grown.config.keys() == config.keys() and spec.vocab_size == 101
    assert GEMMA3["vocab_size"] == 101


@pytest.mark.parametrize(
    ("change", "arguments", "named"),
    [
        ({}, {"max_positions": 128}, "more than the model's 128"),
        ({}, {"max_positions": 512, "factor": 2}, "expected 4 or more"),
        ({}, {"max_positions": 512, "factor": 0.5}, "factor"),
        ({}, {"max_positions": 512, "theta": 0}, "theta"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"max_positions": 512, "factor": 4},
            "linear",
        ),
        (
            {"rope_scaling": LONGROPE},  # rotations of all lengths are equal, but not their size
            {"max_positions": 512},
            "'longrope', whose rotations depend on the number of positions",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            {"max_positions": 512},
            "depend on the number of positions",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict, arguments: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        extend_context(BASE | change, **arguments)
