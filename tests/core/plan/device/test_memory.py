"""The memory of a device: published figures to the last digit, limits, arrays against numbers.

The exact rows are those of Korthikanti et al. 2022 (arXiv 2205.05198): figure 1 and the formulas of
table 2 at the sizes of table 3, in GiB a GPU.
"""

from dataclasses import replace

import pytest

from sabia.core.plan.counting.plain import attention_layer, decoder, with_experts
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.memory import device_memory, explain
from sabia.core.plan.device.stack import Stack, find_stack
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.memory import RECIPES

GIB = 2**30
GPT_2022 = Stack("gpt-2022", attention_matrix=True, dropout=True, context_bytes=0)


def gpt(layers, hidden, heads, *, vocab=51200, rows=4, recipe="megatron18"):
    """A GPT of the paper, 2048 tokens a row."""
    one = attention_layer(hidden, heads, heads, hidden // heads, 4 * hidden, gated=False)
    model = decoder("gpt", hidden, vocab, (replace(one, count=layers),), tied=True)
    return Workload(model, 2048, rows, RECIPES[recipe])


def activations(workload, **layout):
    memory = device_memory(workload, Layout(**{"zero": 0, **layout}), GPT_2022)
    return memory["activations"] / GIB


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "gib"),
    [("none", False, 59.25), ("selective", True, 9.5625), ("full", False, 4.5)],
)
def test_activations_of_22b(recompute, sequence_parallel, gib):
    at = {"tensor": 8, "micro_batch": 4, "recompute": recompute}
    assert activations(gpt(48, 6144, 64), **at, sequence_parallel=sequence_parallel) == gib


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "gib"),
    [("none", False, 131.25), ("selective", True, 26.5625)],
)
def test_activations_of_1t_with_64_micro_batches_in_flight(recompute, sequence_parallel, gib):
    at = {"tensor": 8, "pipe": 64, "micro_batch": 1, "recompute": recompute}
    workload = gpt(128, 25600, 160, rows=512)
    assert activations(workload, **at, sequence_parallel=sequence_parallel) == gib


def test_parameters_and_optimizer_of_22b_at_18_bytes():
    workload = gpt(48, 6144, 64, vocab=0)  # the figure counts the layers' matrices, 12Lh²
    norms = 48 * 2 * 6144 + 6144
    memory = device_memory(workload, Layout(tensor=8, micro_batch=4, zero=0), GPT_2022)
    held = memory["weights"] + memory["gradients"] + memory["optimizer"]
    assert (held - 18 * norms / 8) / GIB == 45.5625


@pytest.mark.parametrize(("zero", "gain"), [(1, 3.82), (2, 7.21), (3, 64)])
def test_zero_divides_sixteen_bytes_over_64_ranks(zero, gain):
    workload = gpt(24, 2048, 16, recipe="adamw16")
    whole, split = (
        sum(
            device_memory(workload, Layout(fsdp=64, zero=level), GPT_2022)[name]
            for name in ("weights", "gradients", "optimizer")
        )
        for level in (0, zero)
    )
    assert whole / split == pytest.approx(gain, abs=0.005)


def test_torchtitan_llama_3_8b_is_within_the_band_of_its_measured_peak():
    layers = replace(attention_layer(4096, 32, 8, 128, 14336), count=32)
    model = decoder("llama-3-8b", 4096, 128256, (layers,))
    stack = find_stack("fsdp")
    layout = Layout(fsdp=8, micro_batch=2, recompute="selective")
    memory = device_memory(Workload(model, 8192, 16, RECIPES["fsdp-fp32"]), layout, stack)
    reserved = (memory.total - memory["runtime"]) / GIB  # torch's own figure, without the context
    assert -0.05 < reserved / 77.0 - 1 < 0.15
    assert explain(memory).splitlines()[-1].endswith("fullest at the loss")


def test_a_mixture_is_held_whole_not_by_its_active_parameters():
    dense = attention_layer(2048, 32, 4, 128, 768)
    layer = replace(with_experts(dense, 2048, 128, 8, 768), count=48)
    model = decoder("qwen3-30b-a3b", 2048, 151936, (layer,))
    assert model.active_params < 0.12 * model.params
    memory = device_memory(Workload(model, 4096, 8, RECIPES["adamw16"]), Layout(), GPT_2022)
    assert memory["weights"] == 2 * model.params
    assert memory["optimizer"] == 12 * model.params


def test_arrays_give_what_numbers_give():
    np = pytest.importorskip("numpy")
    tensor, pipe = (x.ravel() for x in np.meshgrid([1, 2, 4], [1, 2, 3, 5]))
    workload = gpt(12, 2048, 16, rows=32)
    for recompute in ("none", "selective", "full"):
        layout = Layout(tensor=tensor, pipe=pipe, recompute=recompute, fsdp=4)
        many = device_memory(workload, layout, GPT_2022)
        for i, (t, p) in enumerate(zip(tensor, pipe, strict=True)):
            one = device_memory(workload, replace(layout, tensor=int(t), pipe=int(p)), GPT_2022)
            assert one.total == pytest.approx(many.total[i], rel=1e-12)
            assert (one.stage, one.instant) == (many.stage[i], many.instant[i])
