"""Layouts enumerated and priced one by one, in plain loops: the judge of the planner's search.

Written from what each training software documents, with no rule, array or order of the search.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from plain_models import attention_layer, decoder, with_experts

from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.device.layout import Layout, Workload
from sabia.core.plan.device.memory import device_memory
from sabia.core.plan.device.step_time import step_time


def model(draw, mixture: bool) -> Architecture:
    """A random decoder whose sizes have several divisors, not only powers of two."""
    heads, groups = draw.choice([4, 6, 8, 12]), draw.choice([1, 2])
    layer = attention_layer(heads * 64, heads, heads // groups, 64, draw.choice([768, 960]))
    kinds = [replace(layer, count=draw.choice([2, 3, 4, 6, 8, 10]))]
    if mixture:
        sparse = with_experts(layer, heads * 64, draw.choice([4, 6, 8]), 2, 192, 384)
        kinds.append(replace(sparse, count=draw.choice([2, 4, 6])))
    return decoder("small", heads * 64, 4096, tuple(kinds))


def meshes(chips: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Every way to write `chips` as a product over `axes`."""
    sizes = [n for n in range(1, chips + 1) if chips % n == 0]
    for values in itertools.product(sizes, repeat=len(axes)):
        product = 1
        for value in values:
            product *= value
        if product == chips:
            yield dict(zip(axes, values, strict=True))


def mesh_allowed(m: dict[str, int], work: Workload, chip, stack: str) -> bool:
    """Whether the model can be cut so, and is worth it."""
    arch, tensor, pipe = work.architecture, m.get("tensor", 1), m.get("pipe", 1)
    context, depth = m.get("context", 1), arch.depth
    if tensor > chip.scale_up_domain or pipe > depth:
        return False
    for kind in arch.layers:
        if kind.heads % tensor or (kind.mlp_width and kind.mlp_width % tensor):
            return False
        copies = stack == "megatron" and tensor % kind.kv_heads == 0
        if kind.kv_heads % tensor and not copies:
            return False
        if kind.experts and (kind.experts % m["expert"] or m["expert"] < 1):
            return False
        if kind.experts and stack != "megatron" and kind.expert_width % tensor:
            return False
    if stack in ("sabia", "maxtext") and arch.hidden % m["fsdp"]:
        return False
    pieces = 2 if stack in ("fsdp", "megatron") else 1
    if work.sequence % (pieces * context):
        return False
    if stack != "sabia" and work.sequence % (context * tensor):
        return False
    if stack in ("sabia", "fsdp"):
        longest = (depth + pipe - 1) // pipe
        if longest * pipe > depth * 1.125:
            return False
    elif not even(depth, pipe, stack):
        return False
    return work.batch_rows % (m["data"] * m["fsdp"] * m.get("expert", 1)) == 0


def even(depth: int, runs: int, stack: str) -> bool:
    """Whether stages have equal runs of layers, the ends counted where the software may."""
    extra = (0, 1, 2) if stack == "megatron" else (0,)
    return any((depth + more) % runs == 0 for more in extra)


def layouts(m: dict[str, int], work: Workload, stack: str) -> Iterator[Layout]:
    """Every layout of a mesh."""
    rows = m["data"] * m["fsdp"] * m.get("expert", 1)
    sparse = any(kind.experts for kind in work.architecture.layers)
    for micro in range(1, work.batch_rows + 1):
        if work.batch_rows % (rows * micro):
            continue
        passes = work.batch_rows // (rows * micro)
        for virtual in range(1, 13 if stack != "sabia" else 2):
            pipe = m.get("pipe", 1)
            fits = pipe > 1 and passes % pipe == 0
            if virtual > 1 and not (fits and even(work.architecture.depth, pipe * virtual, stack)):
                continue
            for recompute in ("none", "selective", "full"):
                for zero in {"megatron": (1,), "fsdp": (2, 3)}.get(stack, (3,)):
                    if zero == 2 and m["fsdp"] == 1:
                        continue
                    for over in (False, True) if stack == "megatron" else (False,):
                        if placed(m, work, over, sparse):
                            yield Layout(
                                **m,
                                micro_batch=micro,
                                virtual=virtual,
                                recompute=recompute,
                                zero=zero,
                                experts_over_tensor=over,
                                sequence_parallel=stack != "sabia",
                            )


def placed(m: dict[str, int], work: Workload, over: bool, sparse: bool) -> bool:
    """Whether experts lie evenly: whole ones over tensor, or slices of all."""
    if over and (m["tensor"] == 1 or not sparse):
        return False
    for kind in work.architecture.layers:
        if over and kind.experts and kind.experts % (m["expert"] * m["tensor"]):
            return False
        if not over and kind.experts and kind.expert_width % m["tensor"]:
            return False
    return True


def survey(work: Workload, chip, stack, counts):
    """(meshes, candidates, [(seconds, chips, bytes, layout)])."""
    sparse = any(kind.experts for kind in work.architecture.layers)
    axes = ("data", "fsdp", *(["expert"] if sparse else []), "context", "tensor", "pipe")
    number, priced = 0, []
    for chips in counts:
        for m in meshes(chips, axes):
            number += 1
            if not mesh_allowed(m, work, chip, stack.name):
                continue
            for layout in layouts(m, work, stack.name):
                total = device_memory(work, layout, stack).total
                seconds = step_time(work, layout, chip, stack).total_s
                priced.append((seconds, chips, total, layout))
    return number, len(priced), priced


def front(points: list[tuple[float, int]]) -> set[tuple[float, int]]:
    """The points that no other beats, each compared with each."""

    def beaten(a: tuple[float, int]) -> bool:
        return any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in points)

    return {point for point in points if not beaten(point)}
