"""A decoding step and a prefill: bytes and operations by hand, published cache sizes, rooflines."""

import random
from dataclasses import replace

import pytest
from published_generation import architecture, load

from sabia.core.errors import UsageError
from sabia.core.plan.chips import find_chip
from sabia.core.plan.counting.architecture import Sparse
from sabia.core.plan.counting.assumed import assumed_architecture
from sabia.core.plan.serving.decode import (
    Replica,
    active_share,
    cache_bytes,
    cache_split,
    decode_step,
    factor,
    find_format,
    flops_per_s,
    prefill,
    weight_bytes,
)

SHAPES, _ = load()
H100 = find_chip("h100")


def model(name):
    return architecture(SHAPES[name])


def part(decoded, name):
    return next(part for part in decoded.parts if part.name == name)


@pytest.mark.parametrize(
    ("name", "kilobytes"),
    [("deepseek-v3", 70.272), ("llama-3-405b", 516.096)],  # arXiv 2505.09343, table 1, BF16
)
def test_published_cache_of_a_token(name, kilobytes):
    replica = Replica(model(name), H100)
    assert cache_bytes(replica, 1) / 1e3 == pytest.approx(kilobytes, rel=1e-12)


def test_cache_of_a_window_is_capped_and_a_state_is_constant():
    plain = model("llama-3-8b")
    kind = replace(plain.layers[0], window=128, state_width=1000, state_products=1)
    replica = Replica(replace(plain, layers=(kind,)), H100, cache="fp8")
    state = 32 * 1000 * 4
    assert cache_bytes(replica, 100) - state == 32 * 2 * 8 * 128 * 100
    assert cache_bytes(replica, 128) == cache_bytes(replica, 100_000)


def test_a_sparse_attention_keeps_all_and_reads_what_it_chooses():
    plain = model("llama-3-8b")
    kind = replace(plain.layers[0], sparse=Sparse(local=0, pooled=1, chosen=2048, index_width=64))
    replica = Replica(replace(plain, layers=(kind,)), H100)
    assert cache_bytes(replica, 32_768) == 131_072 * 32_768
    assert cache_bytes(replica, 32_768, read=True) == 131_072 * 2048
    assert cache_bytes(replica, 1000, read=True) == cache_bytes(replica, 1000)
    times = [part(decode_step(replica, 8, n), "attention").seconds for n in (8192, 65_536)]
    assert times[0] == times[1] == pytest.approx(8 * 131_072 * 2048 / replica.read_bytes_per_s)


def test_deepseek_v4_decodes_long_contexts_for_little():
    """Keys merged from 4 or 128 tokens, a window once a sequence (the config of its release)."""
    v4 = assumed_architecture(1.6e12, 49e9)
    replica = Replica(v4, find_chip("b200"), 16, "fp8", "fp8", "data")
    v3 = Replica(model("deepseek-v3"), find_chip("b200"), 16, "fp8", "fp8", "data")
    ratio = cache_bytes(replica, 131_072) / cache_bytes(v3, 131_072)
    assert ratio < 0.25
    window = sum(kind.count * kind.state_width for kind in v4.layers)
    assert cache_bytes(replica, 0) == window  # one byte an element, kept and read once
    assert cache_bytes(replica, 131_072, read=True) < cache_bytes(replica, 131_072)


def test_heads_that_do_not_divide_are_held_more_than_once():
    llama, latent = model("llama-3-8b").layers[0], model("deepseek-v3").layers[0]
    assert [cache_split(llama, chips) for chips in (1, 2, 8, 16)] == [1, 2, 8, 8]
    assert [cache_split(latent, chips) for chips in (1, 8, 32)] == [1, 1, 1]
    wide = Replica(model("deepseek-v3"), H100, 8)
    assert cache_bytes(wide, 9, on_chip=True) == cache_bytes(wide, 9)


def test_visited_experts_are_the_expectation_of_distinct_draws():
    kind = next(k for k in model("qwen3-30b-a3b").layers if k.experts)
    rng, runs, tokens = random.Random(3), 400, 12
    seen = sum(
        len({e for _ in range(tokens) for e in rng.sample(range(128), 8)}) for _ in range(runs)
    )
    assert active_share(kind, tokens) == pytest.approx(seen / runs / 128, rel=0.01)
    assert active_share(kind, 1) == pytest.approx(8 / 128)
    assert active_share(kind, 1e4) == pytest.approx(1)
    assert active_share(model("llama-3-8b").layers[0], 5) == 0


def test_a_small_batch_reads_all_weights_and_its_cache():
    step = decode_step(Replica(model("llama-3-8b"), H100), 1, 2000)
    read = 3.35e12 * factor("hbm_share")
    lookup = 128256 * 4096 * 2
    weights = 2 * 8_030_261_248 - lookup - 2 * 4096  # all but the input lookup and the last norm
    assert part(step, "weights").seconds == pytest.approx(weights / read)
    assert part(step, "attention").seconds == pytest.approx(131_072 * 2000 / read)
    assert part(step, "launches").seconds == pytest.approx(32 * 10 * 3e-6)
    assert step.binding == "memory"
    assert step.seconds == pytest.approx(sum(part.seconds for part in step.parts))


def test_a_large_batch_is_bound_by_operations():
    replica = Replica(model("llama-3-8b"), H100)
    weights_part = part(decode_step(replica, 4096, 10), "weights")
    products = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert weights_part.seconds == pytest.approx(2 * 4096 * products / (989e12 * 0.803))
    assert weights_part.bound == "compute"


def test_a_sparse_batch_of_one_reads_only_its_experts():
    sparse, fine = Replica(model("qwen3-30b-a3b"), H100), find_format("bf16")
    one = part(decode_step(sparse, 1, 1), "weights").seconds * sparse.read_bytes_per_s
    visited = sparse.architecture.active_params - 151936 * 2048
    assert one == pytest.approx(2 * visited, rel=1e-3)
    many = part(decode_step(sparse, 200, 1), "weights").seconds * sparse.read_bytes_per_s
    assert many == pytest.approx(
        weight_bytes(sparse.architecture, fine) - 2 * 151936 * 2048, rel=0.01
    )


def test_a_prefill_counts_causal_attention_and_one_head_a_prompt():
    replica, tokens = Replica(model("llama-3-8b"), H100), 8192
    first_pass = prefill(replica, tokens)
    layers = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    rate = 989e12 * 0.803
    assert part(first_pass, "weights").seconds == pytest.approx(
        2 * (tokens * layers + 128256 * 4096) / rate
    )
    assert part(first_pass, "attention").seconds == pytest.approx(
        2 * tokens * 32 * (2 * 4096) * tokens / 2 / rate
    )


def test_a_windowed_prefill_grows_linearly():
    plain = model("llama-3-8b")
    kind = replace(plain.layers[0], window=256)
    replica = Replica(replace(plain, layers=(kind,)), H100)
    times = [part(prefill(replica, n), "attention").seconds for n in (65_536, 131_072)]
    assert times[1] / times[0] == pytest.approx(2, rel=0.01)


def test_tensor_parallelism_splits_the_work_and_adds_messages():
    one, four = (decode_step(Replica(model("llama-2-70b"), H100, t), 8, 500) for t in (1, 4))
    for name in ("weights", "attention"):
        assert part(one, name).seconds / part(four, name).seconds == pytest.approx(4)
    messages = part(four, "messages").seconds
    assert messages == pytest.approx(80 * 2 * (10e-6 + 1.5 * 8 * 8192 * 2 / 450e9))
    across = decode_step(Replica(model("llama-2-70b"), H100, 16), 512, 500)
    assert part(across, "messages").seconds == pytest.approx(
        80 * 2 * (10e-6 + 2 * 15 / 16 * 512 * 8192 * 2 / 400e9)
    )


def test_attention_by_data_spreads_sequences_and_experts():
    sparse, t, batch, context = model("qwen3-30b-a3b"), 8, 4096, 500
    data = Replica(sparse, H100, t, attention="data")
    shared = 2 * (sparse.params - sparse.expert_params)
    assert data.chip_weight_bytes == pytest.approx(shared + 2 * sparse.expert_params / t)
    assert cache_bytes(data, 9, on_chip=True) == pytest.approx(cache_bytes(data, 9) / t)
    step = decode_step(data, batch, context)
    read = 48 * 2 * 4 * 128 * 2 * batch * context / t
    assert part(step, "attention").seconds == pytest.approx(read / data.read_bytes_per_s)
    sent = batch / t * 2048 * 2 * 8 * 7 / 8  # as many copies as there are chips, but its own
    assert part(step, "messages").seconds == pytest.approx(48 * 2 * (10e-6 + sent / 450e9))
    alone = part(decode_step(data, 1, context), "attention").seconds
    assert alone == pytest.approx(part(decode_step(data, t, context), "attention").seconds)


def test_a_latent_cache_is_not_split_by_heads_but_by_data():
    latent = model("deepseek-v3")
    tensor, data = (
        Replica(latent, find_chip("b200"), 8, "fp8", "fp8", a) for a in ("tensor", "data")
    )
    ratio = cache_bytes(tensor, 1, on_chip=True) / cache_bytes(data, 1, on_chip=True)
    assert ratio == pytest.approx(8)
    assert data.chip_weight_bytes < 1.4 * tensor.chip_weight_bytes


def test_formats_set_bytes_and_rates():
    sparse = model("qwen3-30b-a3b")
    sizes = {name: weight_bytes(sparse, find_format(name)) for name in ("bf16", "fp8", "mixed4")}
    assert sizes["bf16"] == pytest.approx(2 * sparse.params)
    assert sizes["fp8"] == pytest.approx(sparse.params, rel=1e-3)
    assert sizes["mixed4"] == pytest.approx(sizes["fp8"] - (1 - 0.5625) * sparse.expert_params)
    assert flops_per_s(H100, "fp8") == pytest.approx(1979e12 * 0.709)
    assert flops_per_s(H100, "fp4") == flops_per_s(H100, "fp8")
    assert flops_per_s(find_chip("a100"), "fp8") == pytest.approx(312e12 * 0.869)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weights": "fp6"}, "--weights: 'fp6'"),
        ({"chip": replace(H100, hbm_bytes_per_s=None)}, "no hbm_tb_s of h100"),
        ({"chip": replace(H100, network_bytes_per_s=None), "chips": 16}, "no nic_gb_s"),
    ],
)
def test_what_cannot_be_computed_is_refused(fields, words):
    with pytest.raises(UsageError, match=words):
        Replica(**{"architecture": model("llama-3-8b"), "chip": H100} | fields)
