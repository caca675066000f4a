"""The rules of the search are those of the trainer, and meshes are counted whole."""

import itertools
import math
import random
from dataclasses import replace

import mesh_cases
import numpy as np
import pytest
from plain_models import attention_layer, decoder, with_experts

from sabia.core.errors import UsageError
from sabia.core.parallel.mesh import Mesh, check_fits
from sabia.core.plan.chips import find_chip
from sabia.core.plan.counting.known import from_spec
from sabia.core.plan.device.candidates import all_meshes, factorisations
from sabia.core.plan.device.layout import AXES, Workload, find_stack, load_stacks
from sabia.core.plan.device.search_rules import SearchProblem, check_pinned, rules_of
from sabia.core.plan.memory import RECIPES
from sabia.core.spec import from_config

H100 = find_chip("h100")


def work(model, sequence=24, rows=24):
    return Workload(model, sequence, rows, RECIPES["fsdp-fp32"])


def trains(spec, mesh, rows, length):
    """Whether the trainer takes the mesh."""
    try:
        check_fits(spec, mesh, rows, length)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("name", sorted({*mesh_cases.models()} - {"classifier"}))
def test_the_trainer_takes_what_the_rules_allow_and_nothing_else(name):
    spec = from_config(mesh_cases.models()[name])
    job = work(from_spec(spec))
    draw = random.Random(1)
    taken = 0
    for _ in range(600):
        sizes = dict.fromkeys(AXES, 1)
        for axis in draw.sample(AXES, draw.choice([1, 2, 3])):
            sizes[axis] = draw.choice([1, 2, 3, 4, 6, 12])
        try:
            check_pinned(job, H100, find_stack("sabia").can, sizes)
            allowed = True
        except UsageError:
            allowed = False
        assert allowed == trains(spec, Mesh(**sizes), job.batch_rows, job.sequence), sizes
        taken += allowed
    assert taken > 20


def test_the_trainer_has_no_pipelines_on_tpus():
    def axes(stack, chip):
        return SearchProblem(None, chip, find_stack(stack), {}).can.axes

    assert "pipe" not in axes("sabia", find_chip("v5p"))
    assert "pipe" in axes("sabia", H100)
    assert "pipe" in axes("maxtext", find_chip("v5p"))


def test_factorisations_are_counted():
    for number, parts in itertools.product([1, 6, 8, 12, 60, 97], [1, 2, 3, 4]):
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        loops = sum(
            math.prod(values) == number for values in itertools.product(divisors, repeat=parts)
        )
        assert factorisations(number, parts) == loops
    assert factorisations(1024, 6) == math.comb(15, 5)


@pytest.mark.parametrize("stack", sorted(load_stacks()))
def test_meshes_fall_by_a_reason_or_survive(stack):
    layer = attention_layer(1536, 12, 6, 128, 4608)
    sparse = with_experts(layer, 1536, 24, 2, 768)
    model = decoder("m", 1536, 4096, (replace(layer, count=2), replace(sparse, count=10)))
    job, can = work(model, 4096, 96), find_stack(stack).can
    counts = [1, 7, 48, 96]
    meshes = all_meshes(counts, rules_of(job, H100, can), can.axes, {})
    assert meshes.total == sum(factorisations(n, len(can.axes)) for n in counts)
    assert len(meshes.left) + sum(meshes.rejected.values()) == meshes.total
    chips = np.prod([meshes.fields[axis] for axis in AXES], axis=0)
    assert {*chips.tolist()} <= {*counts}
    rows = list(zip(*(meshes.fields[axis].tolist() for axis in AXES), strict=True))
    assert len({*rows}) == len(rows)


def test_a_pinned_axis_keeps_its_value():
    model = decoder("m", 1536, 4096, (replace(attention_layer(1536, 12, 6, 128, 4608), count=4),))
    job, can = work(model, 4096, 96), find_stack("sabia").can
    free = all_meshes([48], rules_of(job, H100, can), can.axes, {})
    for pinned in ({"tensor": 2}, {"data": 3, "fsdp": 4}, dict.fromkeys(AXES, 1) | {"fsdp": 48}):
        held = all_meshes([48], rules_of(job, H100, can), can.axes, pinned)
        mask = np.all([free.fields[axis] == n for axis, n in pinned.items()], axis=0)
        assert len(held.left) == mask.sum() > 0
    assert all_meshes([48], rules_of(job, H100, can), can.axes, {"tensor": 5}).total == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor": 6}, "tensor=6 does not divide 64 heads; use 4 or 8"),
        ({"tensor": 16}, "tensor=16 does not divide 8 key-value heads; use 8"),
        ({"context": 3}, "context=3 does not divide 8,192 tokens of a row; use 2 or 4"),
        ({"pipe": 81}, "pipe=81 is above 80 layers; use 80"),
        ({"fsdp": 24}, "fsdp=24 does not divide 8,192 hidden units; use 16 or 32"),
        ({"expert": 2}, "expert=2 (expected 1: the model has no experts)"),
        (
            {"data": 3, "fsdp": 4, "expert": 1},
            "data=3 x fsdp=4 = 12 does not divide 512 rows of a batch; use 8 or 16",
        ),
        ({"zero": 2}, "zero=2 (expected one of 3)"),
        ({"virtual": 2}, "virtual=2 (expected 1: this software has no interleaving)"),
        ({"sequence_parallel": True}, "sequence_parallel=True (expected one of False)"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(values, message):
    model = decoder("m", 8192, 4096, (replace(attention_layer(8192, 64, 8, 128, 28672), count=80),))
    with pytest.raises(UsageError) as error:
        check_pinned(work(model, 8192, 512), H100, find_stack("sabia").can, values)
    assert message in str(error.value)


def test_the_trainer_holds_state_in_its_own_way():
    model = decoder("m", 8192, 4096, (replace(attention_layer(8192, 64, 8, 128, 28672), count=80),))
    other = replace(work(model), recipe=RECIPES["adamw16"])
    with pytest.raises(UsageError, match=r"state-recipe: adamw16 .* \(expected fsdp-fp32\)"):
        check_pinned(other, H100, find_stack("sabia").can, {})
    check_pinned(other, H100, find_stack("megatron").can, {})


def test_softwares_differ_in_what_they_cut():
    layer = attention_layer(8192, 64, 4, 128, 28672)
    model = decoder("m", 8192, 4096, (replace(layer, count=126),))
    job = work(model, 8192, 512)
    check_pinned(job, H100, find_stack("megatron").can, {"tensor": 8})  # copies key-value heads
    check_pinned(job, H100, find_stack("llama3").can, {"pipe": 16})  # 126 layers and both ends
    check_pinned(job, H100, find_stack("megatron").can, {"fsdp": 24, "zero": 1})  # flat shards
    for stack, values in (("maxtext", {"tensor": 8}), ("sabia", {"fsdp": 24})):
        with pytest.raises(UsageError, match="does not divide"):
            check_pinned(job, H100, find_stack(stack).can, values)
    with pytest.raises(UsageError, match="does not divide 126 layers; use 14 or 18"):
        check_pinned(job, H100, find_stack("maxtext").can, {"pipe": 16})
    with pytest.raises(UsageError, match="not supported by this software"):
        check_pinned(job, H100, find_stack("zero-2021").can, {"tensor": 2})
