"""Elements on a device by the planner's divisors, beside the shards that the trainer cuts.

`core.parallel.mesh` gives the mesh axis that splits each dimension of a tensor; summed
over all tensors of a model that is what one process holds.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from sabia.core.model.storage import hub
from sabia.core.ops.device_torch import TorchOps
from sabia.core.parallel.mesh import Mesh, weight_split
from sabia.core.plan.chips import find_chip
from sabia.core.plan.counting.blocks import from_spec
from sabia.core.plan.device.layout import Layout, Workload, find_stack
from sabia.core.plan.device.memory import device_memory
from sabia.core.plan.device.step_time import step_time
from sabia.core.plan.memory import RECIPES
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper

SHAPE = {"hidden": 4096, "layers": 8, "vocab": 32768, "heads": 32, "context": 4096, "tied": False}
MIXTURE = {"experts": 32, "chosen": 4, "expert_ffn": 1024}
MODELS = {
    "llama": new_config("llama", **SHAPE, kv_heads=8, ffn=14336),
    "qwen3_moe": new_config("qwen3_moe", **SHAPE, kv_heads=8, **MIXTURE),
    "deepseek_v3": new_config("deepseek_v3", **SHAPE, **MIXTURE, shared=1),
}
MESHES = [
    {}, {"fsdp": 8}, {"tensor": 4}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4},
    {"expert": 4}, {"fsdp": 2, "expert": 4}, {"fsdp": 2, "expert": 2, "tensor": 2},
]  # fmt: skip
SMALL = {"llama": 0.001, "qwen3_moe": 0.002, "deepseek_v3": 0.001}  # norms and routers


def shard_elements(spec, mesh):
    """Elements of all tensors that one process holds."""
    return sum(
        math.prod(
            size // (mesh.along(axis) if axis else 1)
            for size, axis in zip(tensor.shape, weight_split(tensor, mesh), strict=True)
        )
        for tensor in spec.tensors()
    )


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_a_device_holds_what_the_trainer_gives_it(family, axes):
    if family == "llama" and "expert" in axes:
        pytest.skip("no experts")
    spec = from_config(MODELS[family])
    job = Workload(from_spec(spec), 4096, 64, RECIPES["adamw16"])
    held = device_memory(job, Layout(**axes), find_stack("sabia"))
    shards = shard_elements(spec, Mesh(**axes))
    assert held["weights"] / 2 <= shards
    assert held["weights"] / 2 == pytest.approx(shards, rel=SMALL[family])
    assert held["optimizer"] == 6 * held["weights"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_table_of_embeddings_stays_in_fp32(tied):
    """A tied head gathers it in FP32 and casts it; one that is only read has no BF16 copy."""
    model = from_spec(from_config(MODELS["llama"] | {"tie_word_embeddings": tied}))
    job, sabia = Workload(model, 4096, 64, RECIPES["fsdp-fp32"]), find_stack("sabia")
    table = model.vocab * model.hidden

    def at_loss(layout):
        states = device_memory(job, layout, sabia).states
        (terms,) = (one.terms for one in states if one.instant == "loss")
        return {term.name: term.bytes for term in terms}

    (kind,) = model.layers
    gathered = at_loss(Layout(fsdp=2))["gathered weights"]
    assert gathered == 2 * kind.params + (2 + 4 * tied) * table
    copies = at_loss(Layout(data=2))["weight copies"]
    assert copies == 2 * (model.params - table * (not tied))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_gathers_the_table_apart_from_the_embedding(tied, monkeypatch):
    """As a step of the trainer does, forward and backward; and so its time has it."""
    sizes = {"hidden": 64, "layers": 2, "vocab": 128, "heads": 4, "context": 8}
    spec = from_config(new_config("llama", **sizes, tied=tied))
    stepper = make_stepper("torch", spec, hub.init_params(spec, 0), next_token_loss)
    ids = np.zeros((1, 8), np.int32)
    batch = {"input_ids": ids, "targets": ids, "loss_mask": np.ones(ids.shape, np.float32)}
    seen, usual = [], TorchOps.gather

    def gather(self, weights, names):
        seen.extend(names.values())
        return usual(self, weights, names)

    monkeypatch.setattr(TorchOps, "gather", gather)
    stepper._loss(0).sums(stepper.params, stepper._micro_batches(batch)[0])[0].backward()
    assert (seen.count("embed"), seen.count("head")) == (1 + tied, 1 - tied)

    model, sabia = from_spec(spec), find_stack("sabia")
    for precision, size in (("bf16", 2), ("fp32", 4)):
        job = Workload(model, 4096, 64, RECIPES["fsdp-fp32"], precision)

        def shards(stack, job=job):
            return step_time(job, Layout(fsdp=16), find_chip("h100"), stack).parts["shards"]

        # of a table of V·h: gathers of embedding and head, and one more gradient of a tied one
        table, layers = model.vocab * model.hidden, model.params - (2 - tied) * model.vocab * 64
        once = 4 * table + (4 if tied else size) * table + (1 + 1) * 4 * table
        wire = (2 * size + 4) * layers + once
        plain = (2 * size + 4) * model.params
        assert shards(sabia) / shards(replace(sabia, wide_embedding=False)) == pytest.approx(
            wire / plain
        )
