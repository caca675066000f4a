"""Operations by hand: conventions, windows, sparse keys, recomputation, LoRA, low precisions."""

from dataclasses import replace

import numpy as np
import pytest
from plain_models import attention_layer, decoder, with_experts

from sabia.core.errors import UsageError
from sabia.core.plan.counting import operations as ops
from sabia.core.plan.counting.architecture import Architecture, Sparse

H, HEADS, KV, D, F, V, L = 64, 4, 2, 20, 96, 101, 3
ATTENTION, MLP = H * D * 2 * (HEADS + KV), 3 * H * F


@pytest.fixture
def dense() -> Architecture:
    layer = attention_layer(H, HEADS, KV, D, F)
    return decoder("dense", H, V, (replace(layer, count=L),))


@pytest.fixture
def sparse() -> Architecture:
    layer = attention_layer(H, HEADS, KV, D, F)
    routed = with_experts(layer, H, experts=8, top_k=2, width=32, shared_width=16)
    return decoder("sparse", H, V, (layer, replace(routed, count=2)))


def test_conventions_by_hand(dense: Architecture) -> None:
    weights = 6 * (L * (ATTENTION + MLP) + V * H)
    scores = 12 * L * 50 * HEADS * D
    assert ops.training_flops_per_token(dense, 50, "6nd") == weights
    assert ops.training_flops_per_token(dense, 50, "palm") == weights + scores
    assert ops.training_flops_per_token(dense, 50, "causal") == weights + scores / 2
    with pytest.raises(UsageError, match="expected one of 6nd, palm, causal"):
        ops.training_flops_per_token(dense, 50, "8nd")  # type: ignore[arg-type]


def test_llama_405b_at_8k() -> None:
    layer = replace(attention_layer(16384, 128, 8, 128, 53248), count=126)
    model = decoder("405B", 16384, 128256, (layer,))
    assert model.params == 405_853_388_800
    assert ops.training_flops_per_token(model, 8192, "6nd") == pytest.approx(2.4225e12, rel=1e-4)
    assert ops.training_flops_per_token(model, 8192, "causal") == pytest.approx(2.524e12, rel=1e-3)


def test_parts_of_a_model(sparse: Architecture) -> None:
    first, routed = (replace(kind, count=1) for kind in sparse.layers)
    parts = [
        ops.operations(replace(sparse, layers=(kind,)), 50, "palm") for kind in (first, routed)
    ]
    assert parts[0].linear == 2 * (ATTENTION + MLP)
    assert parts[1].linear == 2 * (ATTENTION + 3 * H * 16 + 8 * H + 2 * 3 * H * 32)
    assert parts[0].mixing == parts[1].mixing == 4 * 50 * HEADS * D
    whole = ops.operations(sparse, 50, "palm")
    assert whole.head == parts[0].head == 2 * V * H
    totals = [part.total - part.head for part in parts]
    assert whole.total == totals[0] + 2 * totals[1] + whole.head
    assert ops.training_flops_per_token(sparse, 50, "palm") == 3 * whole.total


def test_a_window_bounds_the_keys_and_an_encoder_sees_both_sides(dense: Architecture) -> None:
    (layer,) = dense.layers
    local = replace(dense, layers=(replace(layer, window=10),))
    assert ops.operations(local, 50, "palm").mixing == 4 * L * 10 * HEADS * D
    assert ops.operations(local, 5, "palm").mixing == ops.operations(dense, 5, "palm").mixing
    encoder = replace(local, causal=False)
    assert ops.operations(encoder, 50, "causal").mixing == 4 * L * 20 * HEADS * D


def test_chosen_keys_and_their_choice() -> None:
    layer = replace(attention_layer(H, HEADS, KV, D, F), sparse=Sparse(16, 4, 8, index_width=7))
    assert layer.keys(1000) == 16 + 8
    assert layer.keys(24) == 16 + 6
    assert layer.keys(10) == 10
    assert layer.score_products(1000) == 24 * 2 * HEADS * D + 7 * 250
    merged = replace(layer, sparse=Sparse(16, 100))
    assert merged.keys(1000) == 16 + 10


def test_prediction_layers_pay_for_their_head_and_joint(dense: Architecture) -> None:
    extra = replace(dense, extra=(replace(dense.layers[0], count=1),), extra_params=2 * H * H)
    more = ops.training_flops_per_token(extra, 50) - ops.training_flops_per_token(dense, 50)
    assert more == 6 * (ATTENTION + MLP + V * H + 2 * H * H)


def test_lora_leaves_out_two_thirds_of_the_backward_pass_of_weights(dense: Architecture) -> None:
    edges = L * (2 * (H + HEADS * D) + 2 * (H + KV * D) + 3 * (H + F))
    assert ops.adapter_params(dense, 4) == 4 * edges
    done = ops.training_flops_per_token(dense, 50, "6nd", 4)
    assert done == 4 * dense.matmul_params + 6 * 4 * edges
    big = decoder(
        "big", 8192, 32000, (replace(attention_layer(8192, 64, 8, 128, 28672), count=80),)
    )
    whole = ops.training_flops_per_token(big, 64, "causal")
    adapted = ops.training_flops_per_token(big, 64, "causal", rank=8)
    assert adapted / whole == pytest.approx(2 / 3, rel=5e-3)


def test_experts_take_no_adapters(sparse: Architecture) -> None:
    attention = 2 * (H + HEADS * D) + 2 * (H + KV * D)
    assert ops.adapter_params(sparse, 1) == 3 * attention + 3 * (H + F) + 2 * 3 * (H + 16)


def test_arrays_of_lengths_as_numbers(dense: Architecture) -> None:
    (layer,) = dense.layers
    local = replace(dense, layers=(layer, replace(layer, count=1, window=10)))
    lengths = np.array([4, 64, 1024])
    flops = ops.training_flops_per_token(local, lengths, "palm")
    assert flops.tolist() == [ops.training_flops_per_token(local, n, "palm") for n in (4, 64, 1024)]
