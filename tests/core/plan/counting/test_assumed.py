"""Bare counts get a published shape, scaled until the counts are met."""

import random

import pytest

from sabia.core.errors import UsageError
from sabia.core.plan.counting.assumed import assumed_architecture, load_shapes, nearest_shape
from sabia.core.plan.counting.known import architecture_from


def test_shapes_on_file_have_the_counts_they_say() -> None:
    for shape in load_shapes():
        model = architecture_from(shape.config)
        assert model.params == pytest.approx(shape.params, rel=1e-3), shape.name
        assert model.active_params == pytest.approx(shape.active, rel=1e-3), shape.name
        assert model.depth == shape.config["num_hidden_layers"]


def test_the_articles_model() -> None:
    model = assumed_architecture(1.6e12, 49e9)
    assert model.params == pytest.approx(1.6e12, rel=1e-9)
    assert model.active_params == pytest.approx(49e9, rel=1e-8)
    assert (model.depth, model.hidden, model.assumed) == (61, 7168, True)
    assert not model.extra and model.name == "assumed as DeepSeek-V4-Pro"


@pytest.mark.parametrize("shape", load_shapes(), ids=lambda shape: shape.name)
def test_a_published_size_gets_about_its_own_shape(shape) -> None:
    own = architecture_from(shape.config)
    model = assumed_architecture(shape.params, shape.active)
    for ours, theirs in zip(model.layers, own.layers, strict=True):
        assert (ours.count, ours.heads, ours.kv_heads) == (
            theirs.count,
            theirs.heads,
            theirs.kv_heads,
        )
        assert ours.mlp_width == pytest.approx(
            theirs.mlp_width, rel=0.25
        )  # V4 counts its MTP layer
        assert ours.expert_width == pytest.approx(theirs.expert_width, rel=0.08)
        assert ours.experts == pytest.approx(theirs.experts, rel=0.08)


def test_counts_are_met_between_published_sizes() -> None:
    rng, met = random.Random(5), 0
    for _ in range(100):
        active = 10 ** rng.uniform(8.7, 12)
        params = active * rng.choice((1.0, 3.0, 10.0, 30.0))
        try:
            model = assumed_architecture(params, active)
        except UsageError as refused:
            assert "--layers" in str(refused)
            continue
        met += 1
        assert model.params == pytest.approx(params, rel=1e-6)
        assert model.active_params == pytest.approx(active, rel=1e-6)
        for kind in model.layers:
            assert min(kind.mixer_params, kind.mlp_params, kind.heads) > 0
            assert kind.top_k < kind.experts or not kind.experts
    assert met >= 85


@pytest.mark.parametrize("layers, hidden", [(96, 12288), (24, None), (None, 4096)])
def test_given_depth_and_width_are_kept(layers: int | None, hidden: int | None) -> None:
    model = assumed_architecture(175e9, 175e9, layers, hidden)
    assert model.params == pytest.approx(175e9, rel=1e-6)
    assert model.depth == (layers or 126 if hidden is None else layers or model.depth)
    assert model.hidden == (hidden or 16384)
    assert model.layers[0].heads * 128 == model.hidden


def test_depth_of_a_mixture_of_unlike_layers() -> None:
    model = assumed_architecture(1.6e12, 49e9, 80, 8192)
    assert (model.depth, model.hidden) == (80, 8192)
    assert model.params == pytest.approx(1.6e12, rel=1e-8)


def test_a_small_model_gets_a_small_vocabulary() -> None:
    assert assumed_architecture(1e7, 1e7).vocab < 32000


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="smaller --layers or --hidden"):
        assumed_architecture(7e9, 7e9, 80, 16384)


def test_dense_counts_take_dense_shapes() -> None:
    assert nearest_shape(1.6e12, 1.6e12).name == "Llama-3.1-405B"
    assert nearest_shape(8e9, 1.3e9).active < nearest_shape(8e9, 1.3e9).params
