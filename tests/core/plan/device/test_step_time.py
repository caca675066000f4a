"""Step time: operations of an ideal machine, bubbles, formats, recomputation, bands."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from published_steps import flops_per_token, load
from step_cases import architecture, calibration_cases

from sabia.core.errors import UsageError
from sabia.core.plan.chips import find_chip
from sabia.core.plan.device.layout import Layout, Stack, Workload, find_stack
from sabia.core.plan.device.step_time import step_time
from sabia.core.plan.device.step_work import Constants, load_bands, products
from sabia.core.plan.memory import RECIPES

SHAPES, _ = load()
IDEAL = Constants(
    gpu=1, tpu=1, balance=0, shape=0, attention=1, elementwise=1, collective=1, exposed=0,
    grouped=0, routed_tpu=1, exposed_routed=0, launch_s=0, sinks=1,
)  # fmt: skip
H100 = replace(find_chip("h100"), matmul_ceiling=1.0)
FREE = replace(H100, hbm_bytes_per_s=1e30, scale_up_bytes_per_s=1e30, network_bytes_per_s=1e30)
MEGATRON, FSDP = find_stack("megatron"), find_stack("fsdp")
SHAPE_175B = {
    "hidden": 12288, "layers": 96, "heads": 96, "kv_heads": 96, "head_dim": 128, "ffn": 49152,
    "gated": False, "vocab": 51200,
}  # fmt: skip
KEEPS_SCORES = Stack("matrix", attention_matrix=True, reruns_all=True)


def work(name="llama-3-8b", sequence=4096, rows=64, **changed):
    return Workload(architecture(SHAPES[name]), sequence, rows, RECIPES["adamw16"], **changed)


@pytest.mark.parametrize("name", ["llama-3-8b", "mpt-7b", "gemma3-12b", "deepseek-v3-mtp"])
def test_an_ideal_chip_takes_the_models_operations(name):
    workload = work(name, rows=2)
    seen = step_time(workload, Layout(recompute="none"), FREE, FSDP, IDEAL)
    plain, causal = (flops_per_token(SHAPES[name], 4096, c) for c in ("6nd", "causal"))
    assert seen.parts["matmul"] + seen.parts["head"] == pytest.approx(
        workload.batch_tokens * plain / 989e12
    )
    assert seen.parts["attention"] == pytest.approx(
        workload.batch_tokens * (causal - plain) * 3.5 / 3 / 989e12
    )


def test_the_host_bounds_small_micro_batches_of_mixtures():
    slow, layout = replace(IDEAL, launch_s=0.01), Layout(expert=8, recompute="none")
    layers, passes = 48, 64 / 8

    def seen(stack=MEGATRON, chip=H100, name="qwen3-30b-a3b", **changed):
        return step_time(work(name), replace(layout, **changed), chip, stack, slow)

    bound = seen()
    busy = bound.total_s - sum(bound.parts[part] for part in ("head", "replicas", "optimizer"))
    assert bound.parts["launches"] > 0 and busy == pytest.approx(layers * passes * 0.01)
    assert seen(pipe=2, expert=4, virtual=1).parts["launches"] > 0
    half = seen(replace(MEGATRON, launched=0.2))
    assert half.parts["launches"] == 0 and half.total_s < bound.total_s
    for other in (
        seen(find_stack("megatron-graphs")), seen(micro_batch=8), seen(name="llama-3-8b", expert=1),
        seen(FSDP, find_chip("tpu-v5p")),
    ):  # fmt: skip
        assert other.parts["launches"] == 0


def test_attention_is_slower_with_sinks_and_faster_in_a_narrow_format():
    learned, plain = work("gpt-oss-120b"), work("gpt-oss-120b", precision="fp8")
    constants = replace(IDEAL, sinks=3.0)

    def attention(workload, **stack):
        changed = replace(MEGATRON, **stack)
        layout = Layout(expert=8, recompute="none")
        return step_time(workload, layout, H100, changed, constants).parts["attention"]

    fused = attention(learned, fused_sinks=True)
    assert attention(learned) == pytest.approx(3 * fused)
    assert attention(plain, fused_sinks=True) == pytest.approx(fused)
    narrow = attention(plain, fused_sinks=True, narrow_attention=True)
    rate = H100.fp8_flops_per_s * H100.fp8_matmul_ceiling
    assert narrow == pytest.approx(fused * H100.bf16_flops_per_s / rate)
    assert attention(work()) == attention(work(), fused_sinks=True)


def test_products_are_all_of_a_layer():
    for name in ("llama-3-8b", "mpt-7b", "mixtral-8x7b", "deepseek-v3"):
        for kind in architecture(SHAPES[name]).layers:
            params = sum(one.params for one in products(kind))
            assert params == pytest.approx(kind.matmul_params)


def test_full_recomputation_is_a_third_more_only_if_all_runs():
    base = step_time(work(), Layout(recompute="none"), FREE, FSDP, IDEAL)
    every = step_time(work(), Layout(recompute="full"), FREE, MEGATRON, IDEAL)
    early = step_time(work(), Layout(recompute="full"), FREE, FSDP, IDEAL)
    assert every.parts["matmul"] == pytest.approx(base.parts["matmul"] * 4 / 3)
    layer = SHAPES["llama-3-8b"]
    last = layer["ffn"] * layer["hidden"] / architecture(layer).layers[0].matmul_params
    assert early.parts["matmul"] == pytest.approx(base.parts["matmul"] * (4 - last) / 3)
    assert (
        every.parts["attention"]
        == early.parts["attention"]
        == pytest.approx(base.parts["attention"] * 4.5 / 3.5)
    )


def test_selective_recomputation_runs_what_is_not_kept():
    none = step_time(work(), Layout(recompute="none"), FREE, FSDP, IDEAL)
    kept = step_time(work(), Layout(recompute="selective"), FREE, FSDP, IDEAL)
    h, kv, f = 4096, 1024, 14336  # key, middle and up again, of two h·h, two h·kv and three h·f
    again = (kv + h + f) / (2 * h + 2 * kv + 3 * f)
    assert kept.parts["matmul"] == pytest.approx(none.parts["matmul"] * (1 + again / 3))
    assert kept.parts["attention"] == none.parts["attention"]
    scores = step_time(work(), Layout(recompute="selective"), FREE, KEEPS_SCORES, IDEAL)
    full = step_time(work(), Layout(recompute="none"), FREE, KEEPS_SCORES, IDEAL)
    assert scores.parts["attention"] == pytest.approx(full.parts["attention"] * 4 / 3)
    assert scores.parts["matmul"] == full.parts["matmul"]


def test_frozen_weights_save_a_third_of_the_products():
    full = step_time(work(), Layout(recompute="none"), FREE, FSDP, IDEAL)
    lora = step_time(work(adapter_params=10**7), Layout(recompute="none"), FREE, FSDP, IDEAL)
    assert lora.parts["matmul"] == pytest.approx(full.parts["matmul"] * 2 / 3)
    assert lora.parts["attention"] == full.parts["attention"]


def test_narrow_formats_serve_the_layers_products_only():
    wide = step_time(work(), Layout(), FREE, FSDP, IDEAL)
    chip = replace(FREE, fp8_matmul_ceiling=1.0)
    narrow = step_time(work(precision="fp8"), Layout(), chip, FSDP, IDEAL)
    assert narrow.parts["matmul"] == pytest.approx(wide.parts["matmul"] * 989 / 1979)
    assert (narrow.parts["attention"], narrow.parts["head"]) == (
        wide.parts["attention"],
        wide.parts["head"],
    )
    real = [step_time(work(precision=p), Layout(), H100, FSDP, IDEAL) for p in ("bf16", "fp8")]
    assert real[1].parts["elementwise"] > real[0].parts["elementwise"]  # casts


@pytest.mark.parametrize(
    ("pipe", "virtual", "rows"), [(2, 1, 8), (4, 1, 16), (4, 2, 16), (8, 4, 8)]
)
def test_the_bubble_is_p_minus_1_over_vm(pipe, virtual, rows):
    layout = Layout(pipe=pipe, virtual=virtual, recompute="none")
    seen = step_time(work(rows=rows), layout, FREE, FSDP, IDEAL)
    layers = seen.parts["matmul"] + seen.parts["attention"] + seen.parts["elementwise"]
    assert seen.parts["bubble"] == pytest.approx(layers * (pipe - 1) / (virtual * rows))


def test_the_last_stage_has_the_head_and_a_layer_less_where_there_is_room():
    even = step_time(work(), Layout(pipe=4), FREE, FSDP, IDEAL)
    whole = step_time(work(), Layout(), FREE, FSDP, IDEAL)
    assert even.parts["head"] == pytest.approx(whole.parts["head"])
    assert even.parts["matmul"] == pytest.approx(whole.parts["matmul"] / 4)
    odd = step_time(work("llama-3-405b"), Layout(pipe=16), FREE, FSDP, IDEAL)  # 126 layers
    assert odd.parts["head"] == 0  # less than a layer
    assert odd.parts["matmul"] == pytest.approx(
        step_time(work("llama-3-405b"), Layout(), FREE, FSDP, IDEAL).parts["matmul"] * 8 / 126
    )


def test_thin_slices_and_small_experts_are_slower_per_operation():
    real = replace(IDEAL, shape=0.5)
    one = step_time(work(), Layout(), FREE, FSDP, real)
    slow = replace(FREE, hbm_bytes_per_s=3.35e12)
    assert (
        step_time(work(), Layout(tensor=8), slow, FSDP, real).parts["matmul"]
        > one.parts["matmul"] / 8
    )
    moe, real = work("qwen3-30b-a3b", rows=8), replace(IDEAL, grouped=0.5)
    alone = step_time(moe, Layout(), slow, FSDP, real).parts["matmul"]
    shared = step_time(moe, Layout(expert=8), slow, replace(FSDP, expert_imbalance=1), real)
    assert shared.parts["matmul"] < alone / 8  # eight times the tokens an expert


def test_experts_have_a_rate_of_their_own_on_tpus():
    v5p, moe = find_chip("tpu-v5p"), work("mixtral-8x7b")
    slow = replace(IDEAL, routed_tpu=0.5)
    layout = Layout(recompute="none")
    full, half = (step_time(moe, layout, v5p, FSDP, c) for c in (IDEAL, slow))
    routed = 3 * 2 * 4096 * 14336 / architecture(SHAPES["mixtral-8x7b"]).layers[0].matmul_params
    assert half.parts["matmul"] == pytest.approx(full.parts["matmul"] * (1 + routed))
    for workload, chip in ((moe, H100), (work(), v5p)):
        seen = [step_time(workload, layout, chip, FSDP, c).total_s for c in (IDEAL, slow)]
        assert seen[0] == seen[1]


def test_slices_of_experts_gather_every_copy():
    """Of 2 copies of a token each, whole experts on tensor ranks none."""
    moe, layout = work("mixtral-8x7b", rows=8), Layout(tensor=4, recompute="none")
    sliced = step_time(moe, layout, H100, FSDP, IDEAL)
    tokens = moe.batch_tokens * 2 * 4096 * 2  # copies, hidden, bytes
    assert sliced.parts["expert"] == pytest.approx(32 * 4 * tokens * 3 / 4 / 450e9)
    whole = step_time(moe, replace(layout, experts_over_tensor=True), H100, FSDP, IDEAL)
    assert whole.parts["expert"] == pytest.approx(
        sliced.parts["expert"] / 4
    )  # exchanged, not gathered
    assert whole.parts["tensor"] == sliced.parts["tensor"]


def test_an_exchange_of_experts_and_its_imbalance_cost():
    moe = work("mixtral-8x7b")
    near = step_time(moe, Layout(expert=8), H100, FSDP)
    far = step_time(moe, Layout(expert=8, tensor=8), H100, FSDP)
    assert near.parts["expert"] > 0 and far.parts["expert"] > near.parts["expert"] / 8
    even = step_time(moe, Layout(expert=8), H100, replace(FSDP, expert_imbalance=1.0))
    assert even.parts["matmul"] < near.parts["matmul"]


def test_collectives_hide_beside_work_as_the_software_can():
    layout = Layout(fsdp=64, tensor=8, recompute="none")
    hidden = step_time(work(rows=512), layout, H100, FSDP)
    bare = step_time(work(rows=512), layout, H100, replace(FSDP, hides_data=False))
    asynchronous = step_time(work(rows=512), layout, H100, replace(FSDP, hides_tensor=True))
    assert bare.parts["shards"] > 1.2 * hidden.parts["shards"]
    assert asynchronous.parts["tensor"] < hidden.parts["tensor"] / 2
    assert hidden.parts["matmul"] == bare.parts["matmul"]


def test_zero_levels_move_what_they_should():
    workload, slow = work(rows=64), replace(FREE, scale_up_bytes_per_s=1e9, scale_up_domain=8)
    stack = replace(FSDP, hides_data=False, reduce_bytes=2)
    seen = {
        zero: step_time(workload, Layout(fsdp=8, zero=zero, micro_batch=2), slow, stack, IDEAL)
        for zero in (0, 1, 2, 3)
    }
    params, passes = workload.architecture.params, 4
    unit = params * 2 * 7 / 8 / 1e9
    assert seen[0].parts["replicas"] == pytest.approx(2 * unit)
    assert seen[1].parts["replicas"] == pytest.approx(2 * unit)
    assert seen[2].parts["shards"] == pytest.approx(passes * 2 * unit)
    assert seen[3].parts["shards"] == pytest.approx(passes * 3 * unit)
    assert seen[0].parts["shards"] == 0 and seen[3].parts["replicas"] == 0


def test_zero3_of_2021_across_nodes():
    """Table 2 of arXiv 2104.04473: 175B at a batch of 1536; 144, 88 and 44 TFLOP/s a GPU."""
    case = next(c for c in calibration_cases() if c.workload.architecture.name == "gpt-175b")
    workload = replace(case.workload, batch_rows=1536)
    operations = flops_per_token(SHAPE_175B, 2048, "palm") * 4 / 3 - 6 * 51200 * 12288 / 3
    operations *= workload.batch_tokens
    for chips, micro_batch, published in ((384, 4, 144), (768, 2, 88), (1536, 1, 44)):
        layout = Layout(fsdp=chips, micro_batch=micro_batch, sequence_parallel=False)
        seen = step_time(workload, layout, case.chip, find_stack("zero-2021"))
        assert operations / seen.total_s / chips / 1e12 == pytest.approx(published, rel=0.25)
        assert seen.binding == "shards"
        assert seen.total_s > 2 * step_time(workload, layout, case.chip, FSDP).total_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_arrays_give_what_numbers_give(zero, recompute):
    names = ("data", "fsdp", "expert", "context", "tensor", "pipe", "micro_batch", "virtual")
    sizes = ((1, 2), (1, 16), (1, 4), (1, 2), (1, 8), (1, 4), (1, 2), (1, 2))
    table = np.array(list(itertools.product(*sizes)))
    layout = Layout(
        **{name: table[:, n] for n, name in enumerate(names)}, zero=zero, recompute=recompute
    )
    for name, chip in (("mixtral-8x7b", "h100"), ("llama-3-70b", "v5p")):
        many = step_time(work(name), layout, find_chip(chip), MEGATRON)
        assert many.total_s.shape == (len(table),) and np.isfinite(many.total_s).all()
        for row in range(0, len(table), 13):
            numbers = {n: int(v) for n, v in zip(names, table[row], strict=True)}
            one = step_time(
                work(name), Layout(**numbers, zero=zero, recompute=recompute),
                find_chip(chip), MEGATRON,
            )  # fmt: skip
            assert one.total_s == pytest.approx(many.total_s[row], rel=1e-12)


@pytest.mark.parametrize(
    ("chip", "precision", "field"),
    [("a100", "fp8", "fp8_tflops"), ("h100", "nvfp4", "fp4_tflops"),
     ("tpu-v7", "int8", "int8_tops")],
)  # fmt: skip
def test_a_format_without_a_rate_is_refused_by_the_chips_field(chip, precision, field):
    with pytest.raises(UsageError, match=f"no {field} of {chip}"):
        step_time(work(precision=precision), Layout(), find_chip(chip), FSDP)


def test_a_chip_without_bandwidth_is_refused_by_its_field():
    with pytest.raises(UsageError, match="hbm_tb_s"):
        step_time(work(), Layout(), replace(H100, hbm_bytes_per_s=None), FSDP)


def test_the_band_is_what_judged_steps_took_and_wider_for_mixtures():
    def width(name):
        seen = step_time(work(name), Layout(fsdp=64), H100, FSDP)
        assert seen.low_s < seen.total_s < seen.high_s
        return seen.high_s / seen.low_s

    bands = load_bands()
    assert width("llama-3-8b") == pytest.approx(bands["dense"].slow / bands["dense"].fast)
    assert width("mixtral-8x7b") > 1.3 * width("llama-3-8b")
