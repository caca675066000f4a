"""The memory of our own trainer on CPUs: what autograd keeps, byte by byte, and a real run's peak.

The judge of the lists is torch itself: its saved-tensor hooks see every tensor that a forward pass
keeps. Differences of depth and of rows give what a layer keeps of a token. Whole runs, a process
each, are measured in tests/bench/bench_plan_memory.py.
"""

import functools
import math

import numpy as np
import pytest
import torch

from sabia.core.model.storage import hub
from sabia.core.parallel.mesh import Mesh, shard_slices, weight_split
from sabia.core.plan.chips import find_chip
from sabia.core.plan.counting.blocks import from_spec
from sabia.core.plan.device.layout import Layout, Workload, find_stack, stack_on
from sabia.core.plan.device.memory import device_memory, explain
from sabia.core.plan.device.memory_kept import formats, host_tensors
from sabia.core.plan.memory import RECIPES
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper
from sabia.kernels.runtime.torch_fp32 import FP32_COMPUTED

LENGTH = 16
GROUPED = {"kv_heads": 2}
FAMILIES = {
    "llama": GROUPED, "qwen3": GROUPED, "gemma3": GROUPED, "mixtral": GROUPED, "qwen3_moe": GROUPED,
    "deepseek_v3": {}, "olmo2": {},
}  # fmt: skip


def spec_of(family, layers):
    sizes = {"hidden": 64, "vocab": 128, "heads": 4, "context": LENGTH} | FAMILIES[family]
    return from_config(new_config(family, layers=layers, **sizes))


@functools.cache
def saved(family, layers, rows, precision):
    """Bytes of all storages that autograd keeps of one forward pass, the parameters' left out."""
    spec = spec_of(family, layers)
    params = hub.init_params(spec, 0)
    stepper = make_stepper("torch", spec, params, next_token_loss, precision=precision)
    ids = np.random.default_rng(0).integers(0, 128, (rows, LENGTH)).astype(np.int32)
    batch = {"input_ids": ids, "targets": ids, "loss_mask": np.ones(ids.shape, np.float32)}
    micro = stepper._micro_batches(batch)[0]
    own = {p.untyped_storage().data_ptr() for p in stepper.params.values()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = stepper._loss(0).sums(stepper.params, micro)
    saved_bytes = sum(storage.nbytes() for storage in kept.values())
    del loss
    return saved_bytes


CASES = [(family, "fp32") for family in FAMILIES]
CASES += [(family, "bf16") for family in ("gemma3", "qwen3_moe", "deepseek_v3")]


@pytest.mark.parametrize(("family", "precision"), CASES)
def test_a_layer_keeps_what_autograd_keeps(family, precision):
    by_rows = [saved(family, 4, n, precision) - saved(family, 3, n, precision) for n in (2, 4)]
    measured = (by_rows[1] - by_rows[0]) / (2 * LENGTH)
    model = from_spec(spec_of(family, 4))
    given = formats(precision, widened=torch.bfloat16 in FP32_COMPUTED)
    tensors = host_tensors(model.layers[-1], model.hidden, given)
    counted = sum(one.token_bytes for one in tensors)
    # OLMo 2 norms all heads by one factor, the count has one a head
    assert counted == pytest.approx(measured, rel=0.01 if family == "olmo2" else 1e-12)


def work(family="llama", precision="fp32", rows=8, **more):
    model = from_spec(spec_of(family, 4))
    return Workload(model, LENGTH, rows, RECIPES["fsdp-fp32"], precision, **more)


CPU = find_stack("sabia-cpu")


def total(layout, **more):
    return float(device_memory(work(**more), layout, CPU).total)


def plain(**axes):
    return Layout(**{"micro_batch": 8, "recompute": "none"} | axes)


def test_recomputing_and_smaller_micro_batches_take_less():
    whole = total(plain())
    assert total(plain(recompute="full")) < total(plain(recompute="selective")) < whole
    assert total(plain(micro_batch=2)) < whole
    assert total(plain(), packed=True) > whole
    assert total(plain(), adapter_params=1000) < whole


def test_a_tied_head_is_gathered_in_fp32():
    """Since the embedding stays in fp32, and a head does not."""
    sizes = {"hidden": 64, "layers": 2, "vocab": 4096, "heads": 4, "context": LENGTH}
    found = []
    for tied in (True, False):
        model = from_spec(from_config(new_config("llama", **sizes, tied=tied)))
        job = Workload(model, LENGTH, 8, RECIPES["fsdp-fp32"], "bf16")
        found.append(device_memory(job, plain(fsdp=2, micro_batch=4), CPU)["temporaries"])
    assert found[0] - found[1] == (4 - 2) * 4096 * 64


def test_projections_to_latents_are_whole_on_each_tensor_rank():
    """As core.parallel.mesh splits them."""
    spec, mesh = spec_of("deepseek_v3", 4), Mesh(tensor=2)
    held = sum(
        math.prod(
            cut.stop - cut.start for cut in shard_slices(t.shape, weight_split(t, mesh), mesh, 0)
        )
        for t in spec.tensors()
    )
    job = Workload(from_spec(spec), LENGTH, 8, RECIPES["fsdp-fp32"], "fp32")
    counted = device_memory(job, plain(tensor=2), CPU)["weights"] / 4
    assert counted == pytest.approx(held, rel=0.02)  # routers are split in the count


@pytest.mark.parametrize("axis", ["fsdp", "tensor", "context", "pipe", "expert"])
def test_every_split_takes_less_on_a_rank(axis):
    more = {"family": "mixtral"} if axis == "expert" else {}
    micro = 4 if axis in ("fsdp", "pipe", "expert") else 8
    assert total(plain(**{axis: 2}, micro_batch=micro), **more) < total(plain(), **more)


def test_arrays_of_layouts_are_as_single_ones():
    micro = np.array([1.0, 2.0, 4.0, 8.0])
    many = device_memory(work(precision="bf16"), Layout(micro_batch=micro, recompute="full"), CPU)
    alone = [
        device_memory(work(precision="bf16"), Layout(micro_batch=int(n), recompute="full"), CPU)
        for n in micro
    ]
    assert many.total.tolist() == pytest.approx([one.total for one in alone])


def test_a_cpu_has_the_trainers_own_preset_and_terms_are_explained():
    assert stack_on("sabia", find_chip("cpu")) is CPU
    assert stack_on("sabia", find_chip("h100")).name == "sabia"
    explanation = explain(device_memory(work(), plain(), CPU))
    assert "4 layers x 128 tokens x " in explanation and "none recomputed" in explanation
