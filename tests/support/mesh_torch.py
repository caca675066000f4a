"""Trains models on meshes of gloo processes and says how far they are from one device.

usage: mesh_torch.py RANK SIZE STORE JOB…
All jobs of one number of processes run in one launch, which saves most of the time. The first
process prints JSON: job → report. Jobs (a mesh is written as --mesh has it):
  MODEL:MESH[:SETTING]  → [largest difference of 20 losses, worst gradient, its tensor, learnt, the
                          first wrong result of a product, the first wrong gradient on the way back]
  move:MODEL:MESH:MESH  → whether a state moved through pieces is bit for bit the same, also on one
                          device, and how often each of its elements was written (least, most)
  packed:MODEL:MESH     → loss of packed rows, sum of the losses of their documents on one device
  memory:MESH           → see `memory`
  updates:MODEL:MESH    → optimizer → largest difference of a parameter after 10 given gradients
"""

import ctypes
import json
import sys
from functools import lru_cache, partial
from pathlib import Path

import mesh_cases
import numpy as np
import torch
from whole_state import reading, whole_state

from sabia.core.model.init import init_params
from sabia.core.model.lora import LoraConfig, init_lora
from sabia.core.numerics.optimizers import OPTIMIZERS
from sabia.core.ops.product import Recorder
from sabia.core.parallel.mesh import Mesh, make_mesh
from sabia.core.parallel.world import World
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.optimizer.config import OptimizerConfig
from sabia.core.train.stepper_factory import make_stepper

STEPS = 20
# one hybrid device whose weights are changed by 1e-7 drifts by 1e-3 in 20 steps at the other rate
LR = {"hybrid": 1e-4}
SETTINGS = {
    "remat": {"loss": {"remat": "full"}},
    "matmuls": {"loss": {"remat": "matmuls"}},
    "micro": {"micro_batch": 2},
    "balance": {"loss": {"balance": 0.1, "router_z": 0.01, "z_loss": 1e-3}, "bias_rate": 1e-2},
    "plain": {"drop": ("segments", "positions")},
    "lora": {"lora": LoraConfig(3, 6.0)},
    "freeze": {"optimizer": OptimizerConfig(freeze="embed|norm|attn.k")},
    "compiled": {"compiled": True},
} | {name: {"optimizer": OptimizerConfig(name=name)} for name in ("muon", "soap", "adafactor")}
SETTINGS |= {name: {"precision": name} for name in ("bf16", "fp8", "qat-int8")}


def stepper(
    kind: str, mesh: Mesh, world: World, loss: dict | None = None, drop: object = (), **settings
):
    """A stepper of a model on a mesh."""
    spec, params = mesh_cases.model(kind)
    if "lora" in settings:
        draw = np.random.default_rng(0)
        fresh = init_lora(spec, settings["lora"], 0)
        params |= {k: v + 0.1 * draw.standard_normal(v.shape, np.float32) for k, v in fresh.items()}
    bound = partial(mesh_cases.loss(spec), **(loss or {}))
    return make_stepper("torch", spec, params, bound, mesh=mesh, world=world, **settings)


def batch(one, step: int, drop: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """This process's rows of a step."""
    part, parts = one.row_part
    whole = mesh_cases.batch(one.spec, step)
    return {k: v[part::parts] for k, v in whole.items() if k not in drop}


def run(kind: str, mesh: Mesh, world: World, setting: str) -> tuple[list[float], dict, dict]:
    """(losses, gradients of the first batch, results of its products by the name of the matrix)."""
    settings = SETTINGS.get(setting, {})
    one = stepper(kind, mesh, world, **settings)
    rows = partial(batch, one, drop=settings.get("drop", ()))
    ops, recorder = one._loss(0).ops, Recorder()
    if setting != "compiled":
        ops.set_rules((recorder, *ops.rules))
    gradients = one.gradients(rows(0))
    outputs = {name: x.detach().float().numpy() for name, x in recorder.outputs.items()}
    ops.set_rules(rule for rule in ops.rules if rule is not recorder)
    found = [one.step(rows(n), LR.get(kind, 3e-3), np.ones(1), number=n) for n in range(STEPS)]
    assert {row.extra_sums[0] for row in found} == {world.size}
    assert all(row.updated for row in found)
    if "expert_load" in found[0].extras:
        gradients["expert_load"] = found[0].extras["expert_load"]
    return [row.loss for row in found], gradients, outputs


@lru_cache(None)
def alone(kind: str, setting: str) -> tuple[list[float], dict, dict]:
    """The run of one device."""
    return run(kind, Mesh(), World(), setting)


def compare(job: str, world: World) -> list:
    """The report of one job."""
    kind, mesh, setting = (*job.split(":"), "")[:3]
    theirs, other, outputs = run(kind, make_mesh(mesh, world.size), world, setting)
    if not world.leads:
        return []
    losses, gradients, wanted = alone(kind, setting)
    worst = mesh_cases.apart(gradients, other)
    name = max(worst, key=worst.__getitem__)
    gap = max(abs(a - b) for a, b in zip(losses, theirs, strict=True))
    # results that every process has whole: those behind an exchange
    whole = {k: x for k, x in outputs.items() if k in wanted and x.shape == wanted[k].shape}
    ahead = mesh_cases.apart({k: wanted[k] for k in whole}, whole)
    wrong = [k for k, gap in ahead.items() if gap > 1e-4]
    behind = [k for k in reversed(worst) if worst[k] > 1e-4]
    first = [" ".join(names[:1]) for names in (wrong, behind)]
    return [gap, worst[name], name, losses[0] - losses[-1], *first]


def written(one, world: World) -> tuple[dict[str, np.ndarray], list[int]]:
    """The whole state from all processes' pieces; least and most pieces that hold an element."""
    mine = [(p.name, p.offset, p.global_shape, np.asarray(p.array)) for p in one.pieces()]
    told = [None] * world.size
    torch.distributed.all_gather_object(told, mine)
    arrays: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for name, offset, shape, array in (piece for pieces in told for piece in pieces):
        place = tuple(slice(o, o + n) for o, n in zip(offset, array.shape, strict=True))
        arrays.setdefault(name, np.empty(shape, array.dtype))[place] = array
        counts.setdefault(name, np.zeros(shape, int))[place] += 1
    seen = np.concatenate([count.reshape(-1) for count in counts.values()])
    return arrays, [int(seen.min()), int(seen.max())]


def move(kind: str, first: str, second: str, world: World) -> list:
    """Train on one mesh, go on from its pieces on another and on one device."""
    settings = {"optimizer": OptimizerConfig(name="adafactor" if kind == "moe" else "adamw")}
    one = stepper(kind, make_mesh(first, world.size), world, **settings)
    for n in range(3):
        one.step(batch(one, n), 3e-3)
    state, counts = written(one, world)
    other = stepper(kind, make_mesh(second, world.size), world, **settings)
    other.load(reading(state))
    moved, _ = written(other, world)
    alone = stepper(kind, Mesh(), World(), **settings)
    alone.load(reading(state))
    back = whole_state(alone)
    same = set(state) == set(moved) == set(back) and state["count"] == 3
    same &= all(np.array_equal(state[k], moved[k]) for k in state)
    return [bool(same and all(np.array_equal(state[k], back[k]) for k in state)), counts]


def packed(kind: str, mesh: str, world: World) -> list[float]:
    """Loss of packed rows on a mesh, and of each document by itself on one device."""
    one = stepper(kind, make_mesh(mesh, world.size), world)
    found = one.evaluate(batch(one, 0))
    whole, alone, total = mesh_cases.batch(one.spec, 0), stepper(kind, Mesh(), World()), 0.0
    for row, segments in enumerate(whole["segments"]):
        for number in set(segments.tolist()) - {0}:
            here = segments == number
            part = {k: whole[k][row, here][None] for k in ("input_ids", "targets", "loss_mask")}
            alone_found = alone.evaluate(part)
            total += alone_found.loss * alone_found.weight
    return [found.loss * found.weight, total]


def updates(kind: str, mesh: str, world: World) -> dict[str, float]:
    """Ten updates by given gradients on a mesh and on one device, by every optimizer."""
    report = {}
    for name, record in OPTIMIZERS.items():
        settings = {"soap_every": 3} if "soap_every" in record.settings else {}
        config = OptimizerConfig(name, settings=settings)
        one = stepper(kind, make_mesh(mesh, world.size), world, optimizer=config)
        alone = stepper(kind, Mesh(), World(), optimizer=config)
        draw = np.random.default_rng(0)
        for _ in range(10):
            whole = {k: draw.standard_normal(t.shape, np.float32) for k, t in one.table.items()}
            for each in (one, alone):
                gradients = {
                    k: torch.from_numpy(each.shards.cut(k, whole[k]).copy()) for k in each.params
                }
                each._update(gradients, 1e-2)
        state, wanted = written(one, world)[0], whole_state(alone)
        report[name] = max(float(np.abs(state[k] - wanted[k]).max()) for k in state)
    return report


def memory(mesh: str, world: World) -> list[float]:
    """What a forward pass keeps on an fsdp mesh, and if weights stayed, in parts of all weights."""
    config = new_config("llama", hidden=512, layers=8, vocab=64, heads=8, ffn=1376, tied=False)
    spec = from_config(config)
    loss = partial(next_token_loss, remat="none")
    mesh = make_mesh(mesh, world.size)
    one = make_stepper("torch", spec, init_params(spec, 0), loss, mesh=mesh, world=world)
    micro = {k: torch.from_numpy(v % 64) for k, v in mesh_cases.batch(spec, 0, 1).items()}
    bare, report = lambda function, policy: function, []
    for remat in (None, bare):
        placed = one._loss(0)
        if remat is not None:
            placed.ops.remat = remat
        placed.sums(one.params, micro)[0].backward()  # whatever is allocated once
        before = resident()
        kept = placed.sums(one.params, micro)
        report.append((resident() - before) / sum(4 * t.size for t in spec.tensors()))
        kept[0].backward()
    return report


def resident() -> int:
    """Bytes of this process in memory, without what was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


JOBS = {"memory": memory, "move": move, "packed": packed, "updates": updates}


def report_of(job: str, world: World) -> object:
    """What a job of any kind says."""
    kind, *words = job.split(":")
    return JOBS[kind](*words, world) if kind in JOBS else compare(job, world)


def main(rank: int, size: int, store: str, *jobs: str) -> None:
    """Run all jobs as process `rank` of `size`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    world = World(rank, size, rank)
    report = {job: report_of(job, world) for job in jobs}
    if world.leads:
        print("REPORT" + json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
