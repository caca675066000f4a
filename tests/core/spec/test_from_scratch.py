"""Shapes for models from scratch: what is given, what is filled in, what is refused."""

import pytest

from sabia.core.errors import UsageError
from sabia.core.spec import from_config, new_config, parameter_count, parse_shape
from sabia.core.spec.layers import Attention, GatedDeltaNet


def test_shape_text_gives_arguments() -> None:
    text = "d=128, layers=4,heads=4,kv=2,ffn=384,vocab=4k,context=1k,theta=1e4,tied=false"
    shape = parse_shape(text)
    assert shape == {
        "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 4000,
        "context": 1024, "rope_theta": 1e4, "tied": False,
    }  # fmt: skip
    spec = from_config(new_config(**shape))
    assert (spec.hidden_size, len(spec.layers), spec.vocab_size) == (128, 4, 4000)
    assert not spec.tied and spec.layers[0].mixer.kv_heads == 2


def test_defaults_are_the_usual_proportions() -> None:
    small = from_config(new_config(hidden=128, layers=1, vocab=10)).layers[0]
    assert (small.mixer.heads, small.mixer.head_dim, small.mlp.width) == (4, 32, 352)
    large = from_config(new_config("qwen3", hidden=1024, layers=1, vocab=10)).layers[0]
    assert (large.mixer.heads, large.mixer.head_dim, large.mlp.width) == (16, 64, 2752)


@pytest.mark.parametrize("text", ["d128", "depth=4", "tied=yes", "d=many"])
def test_bad_shapes_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_shape(text)


@pytest.mark.parametrize(
    "shape", [{"heads": 3}, {"heads": 4, "kv_heads": 3}, {"heads": 64}, {"family": "bert"}]
)
def test_shapes_that_do_not_fit_are_refused(shape: dict) -> None:
    with pytest.raises(UsageError, match="expected"):
        new_config(**({"hidden": 64, "layers": 1, "vocab": 10} | shape))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_fresh_mixtures_have_the_dense_model_s_active_width(family: str) -> None:
    shape = parse_shape(f"family={family},d=128,layers=2,vocab=100,ffn=384,experts=6,chosen=3")
    last = from_config(new_config(**shape)).layers[-1].mlp
    assert (last.router.experts, last.router.top_k, last.width) == (6, 3, 128)
    assert last.shared == (128 if family == "deepseek_v3" else 0)
    wide = from_config(new_config(**shape | parse_shape("expert_ffn=40,chosen=1"))).layers[-1].mlp
    assert (wide.width, wide.router.top_k) == (40, 1)


@pytest.mark.parametrize(
    "text",
    [
        "family=llama,experts=4",
        "family=mixtral,experts=2,chosen=3",
        "family=deepseek_v3,kv=1",
        "family=qwen3_moe,expert_ffn=-1",
    ],
)
def test_mixtures_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        new_config(**parse_shape("d=64,layers=2,vocab=10," + text))


@pytest.mark.parametrize(
    "family", ["mistral", "gemma2", "gemma3", "olmo2", "qwen3_5", "qwen3_next"]
)
@pytest.mark.parametrize("layers", [1, 8])
def test_fresh_models_of_every_kind_are_what_transformers_builds(family: str, layers: int) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    config = new_config(
        **parse_shape(f"family={family},d=128,layers={layers},vocab=100,context=64")
    )
    spec = from_config(config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config)
        )
    assert type(theirs).__name__ == config["architectures"][0]
    assert parameter_count(spec) == theirs.num_parameters()
    last = spec.layers[-1].mixer
    assert isinstance(last, Attention) and (last.window is None or family == "mistral")


def test_a_fresh_hybrid_has_three_delta_nets_to_one_attention() -> None:
    config = new_config(**parse_shape("family=qwen3_next,d=128,layers=8,vocab=100,experts=6"))
    spec = from_config(config)
    kinds = [isinstance(layer.mixer, GatedDeltaNet) for layer in spec.layers]
    assert kinds == [True, True, True, False] * 2
    delta, full = spec.layers[0].mixer, spec.layers[3].mixer
    assert (delta.key_heads, delta.value_heads, delta.value_dim) == (4, 8, 32)
    assert full.rope.dim == 8 and full.output_gate and spec.layers[0].mlp.shared_gate
