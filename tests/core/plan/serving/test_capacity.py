"""What fits on a replica, and what its tokens cost at full load."""

import pytest
from plain_models import fixed_batch_seconds, weights_fit
from published_generation import architecture, load

from sabia.core.errors import Infeasible
from sabia.core.plan.chips import find_chip
from sabia.core.plan.counting.assumed import assumed_architecture
from sabia.core.plan.serving.decode import Replica, decode_step, prefill
from sabia.core.plan.serving.traffic import (
    PASS_TOKENS,
    cheapest,
    full_load,
    largest_batch,
    loads,
    workspace_bytes,
)

SHAPES, _ = load()
H100 = find_chip("h100")
LLAMA = architecture(SHAPES["llama-3-8b"])


def test_room_is_memory_less_weights_and_workspace():
    engine = Replica(LLAMA, H100)
    assert engine.engine_bytes == pytest.approx(0.9 * 81_559 * 2**20)
    assert engine.chip_weight_bytes == pytest.approx(2 * 8_030_261_248)
    assert workspace_bytes(engine) == PASS_TOKENS * 4 * (4096 + 14336) * 2
    left = engine.engine_bytes - engine.chip_weight_bytes - workspace_bytes(engine)
    assert largest_batch(Replica(LLAMA, H100), 8192) == int(left / (131_072 * 8192))
    half = Replica(LLAMA, H100, memory_share=0.5)
    assert largest_batch(half, 8192) < largest_batch(Replica(LLAMA, H100), 8192)


def test_what_does_not_fit_says_what_would():
    with pytest.raises(Infeasible, match=r"1 x h100: llama-2-70b in bf16 needs 14\d GB per chip"):
        largest_batch(Replica(architecture(SHAPES["llama-2-70b"]), H100), 4096)
    with pytest.raises(Infeasible, match=r"use 8 chips$"):
        largest_batch(Replica(LLAMA, H100), 4e6)
    with pytest.raises(Infeasible, match="use shorter sequences or another chip"):
        largest_batch(Replica(LLAMA, H100), 1e9)


def test_the_size_that_is_named_fits():
    model = architecture(SHAPES["llama-2-70b"])
    with pytest.raises(
        Infeasible, match="use 2 chips or --weights fp8 or --weights int8"
    ) as message:
        largest_batch(Replica(model, H100), 4096)
    assert str(message.value).count("--weights") == 2
    assert largest_batch(Replica(model, H100, 2), 4096) >= 1
    assert largest_batch(Replica(model, H100, 1, "fp8"), 4096) >= 1


def test_a_trillion_parameters_on_eight_chips():
    model = assumed_architecture(1e12, 32e9)
    b200, b300 = find_chip("b200"), find_chip("b300")
    assert weights_fit(model, b200, 8, "fp8")
    assert not weights_fit(model, b200, 8, "bf16")
    assert weights_fit(model, b300, 8, "bf16")


def test_full_load_serves_a_batch_in_the_time_of_an_answer():
    load = full_load(Replica(LLAMA, H100), 1000, 500)
    window = load.batch * load.first.seconds + 500 * load.step.seconds
    assert load.seconds_per_answer == pytest.approx(window)
    assert load.output_tokens_per_s_chip == pytest.approx(load.batch * 500 / window)
    usd = 1000 * load.usd_per_million_input(2.0) + 500 * load.usd_per_million_output(2.0)
    assert usd / 1e6 == pytest.approx(window / load.batch * 2.0 / 3600)


def test_replicas_are_powers_of_two_that_hold_the_model():
    replicas = loads(architecture(SHAPES["llama-2-70b"]), H100, 1000, 1000)
    assert [load.replica.chips for load in replicas] == [2, 4, 8]
    best = cheapest(replicas)
    assert best.request_chip_s == min(load.request_chip_s for load in replicas)
    only = loads(LLAMA, H100, 1000, 1000, most_chips=2, batch=7)
    assert [(load.replica.chips, load.batch) for load in only] == [(1, 7), (2, 7)]
    with pytest.raises(Infeasible, match="1 x h100"):
        loads(architecture(SHAPES["llama-2-70b"]), H100, 1000, 1000, most_chips=1)


def test_a_model_beyond_a_node_gets_the_smallest_replica_across_nodes():
    replicas = loads(architecture(SHAPES["deepseek-v3"]), H100, 1000, 1000)
    assert {load.replica.chips for load in replicas} == {32}


def test_mixtures_are_split_both_ways():
    replicas = loads(architecture(SHAPES["qwen3-30b-a3b"]), H100, 1000, 1000)
    splits = [(load.replica.chips, load.replica.attention) for load in replicas]
    assert splits == [(1, "tensor"), (2, "data"), (2, "tensor"), (4, "data"), (4, "tensor"),
                      (8, "data"), (8, "tensor")]  # fmt: skip
    latent = loads(
        architecture(SHAPES["deepseek-v3"]), find_chip("b200"), 1000, 1000, weights="fp8"
    )
    assert cheapest(latent).replica.attention == "data"


def test_a_fixed_batch_is_a_prefill_and_steps():
    replica = Replica(LLAMA, H100)
    steps = sum(decode_step(replica, 8, 100 + i).seconds for i in range(49))
    whole = prefill(replica, 100, 8).seconds + steps
    assert fixed_batch_seconds(replica, 100, 50, 8) == pytest.approx(whole, rel=1e-3)
