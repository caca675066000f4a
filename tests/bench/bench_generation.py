"""How far the planner's generation and GRPO steps are from published ones, row by row.

Run: python tests/bench/bench_generation.py. The rows (tests/core/plan/published_generation.toml)
were written down before the formulas; nothing is fitted on them. Errors are predicted time over
published time, less one. Of GRPO steps the training part is taken at the planner's own utilization
presets (dense 50 %, sparse 30 % of the BF16 peak), everything else from the formulas; a last line
gives the same with the step-time model on the published layouts instead.
"""

import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from plain_models import fixed_batch_seconds
from published_generation import Row, architecture, load

from sabia.core.plan.chips import find_chip
from sabia.core.plan.device.layout import Layout, Workload, find_stack
from sabia.core.plan.device.step_time import step_time
from sabia.core.plan.memory import RECIPES
from sabia.core.plan.serving import rollout
from sabia.core.plan.serving.decode import Replica, prefill
from sabia.core.plan.serving.rollout import Lengths
from sabia.core.plan.serving.traffic import full_load

SHAPES, KINDS = load()
MFU = {"dense": 0.50, "sparse": 0.30}
COLOCATED_SHARE, APART_SHARE = 0.6, 0.8  # gpu_memory_utilization of the recipes
LOAD_SHARE = 0.95  # kv_cache_free_gpu_mem_fraction of the page


def replica(row: Row) -> Replica:
    """The replica that generates in a row."""
    model = architecture(SHAPES[row["model"]])
    cache = row.get("cache", "bf16")
    split = row.get("attention", "tensor")
    return Replica(model, find_chip(row["chip"]), row["tensor"], row["weights"], cache, split)


def batch_error(row: Row) -> float:
    """Predicted over published time of a fixed batch, less one."""
    mine = fixed_batch_seconds(replica(row), row["prompt"], row["output"], row["batch"])
    published = row["batch"] * row["output"] / (row["tokens_per_s_chip"] * row["tensor"])
    return mine / published - 1


def load_error(row: Row) -> float:
    """Predicted over published time of a token at full load, less one."""
    engine = replace(replica(row), memory_share=LOAD_SHARE)
    load = full_load(engine, row["prompt"], row["output"], row["requests"])
    return row["tokens_per_s_chip"] / load.output_tokens_per_s_chip - 1


def spread_error(row: Row) -> float | None:
    """As batch_error, each key-value head read once per query head; None without groups."""
    engine = replica(row)
    kind = engine.architecture.layers[0]
    groups = kind.heads // kind.kv_heads
    if groups == 1:
        return None
    wide = {"cache_width", "key_width", "value_width"}
    spread = replace(kind, **{name: groups * getattr(kind, name) for name in wide})
    model = replace(engine.architecture, layers=(spread,))
    mine = fixed_batch_seconds(
        replace(engine, architecture=model), row["prompt"], row["output"], row["batch"]
    )
    return mine * row["tokens_per_s_chip"] * row["tensor"] / (row["batch"] * row["output"]) - 1


def first_error(row: Row) -> float:
    """Predicted over published time to the first token, less one."""
    return prefill(replica(row), row["prompt"]).seconds * 1e3 / row["first_token_ms"] - 1


def training_s(row: Row) -> float:
    """All optimizer steps of a row, by the step-time model on the published layout."""
    training = row["chips"] - row["generation_chips"]
    tensor, context, pipe = row["train_tensor"], row["train_context"], row["train_pipe"]
    ranks = training // (tensor * context * pipe)
    expert = min(row["train_expert"], ranks)
    layout = Layout(
        data=ranks // expert, expert=expert, tensor=tensor, context=context, pipe=pipe, zero=1
    )
    length = row["mean_tokens"] + row["prompt"]
    model = architecture(SHAPES[row["model"]])
    work = Workload(model, length, row["train_samples"], RECIPES["megatron18"])
    step = step_time(work, layout, find_chip(row["chip"]), find_stack("megatron"))
    return row["samples"] / row["train_samples"] * step.total_s


def grpo_step(row: Row, train_s: float | None = None) -> rollout.Step:
    """A published GRPO step as the planner sees it; `train_s` stands in for its training."""
    engine = replica(row)
    sampling = rollout.Sampling(
        prompts=row["samples"] // 16,
        group=16,
        prompt_tokens=row["prompt"],
        lengths=Lengths(row["mean_tokens"], row["limit_tokens"] - row["prompt"]),
        slots=row.get("slots"),
    )
    apart = row["generation_chips"]
    training = row["chips"] - apart
    model = engine.architecture
    mfu = MFU["sparse" if model.expert_params else "dense"]
    flops = 6 * model.matmul_params * sampling.tokens
    train = flops / (training * engine.chip.bf16_flops_per_s * mfu)
    parts = {
        "reward": 0.0,
        "log-probs": train / 3 * 2,
        "training": train if train_s is None else train_s,
        "weights": rollout.hand_over_seconds(engine, bool(apart)),
    }
    engine = replace(engine, memory_share=APART_SHARE if apart else COLOCATED_SHARE)
    if not apart:
        return rollout.colocated(engine, sampling, row["chips"], parts)
    return rollout.split(engine, sampling, apart, training, parts, row["off_policy"])


def grpo_error(row: Row) -> float:
    """Predicted over published time of a step, less one."""
    return grpo_step(row).seconds / row["step_s"] - 1


ERRORS = {"batch": batch_error, "load": load_error, "first": first_error, "grpo": grpo_error}


def summary(errors: list[float]) -> str:
    """Mean, mean size, share within 25 %, worst."""
    sizes = [abs(error) for error in errors]
    near = sum(size <= 0.25 for size in sizes) / len(sizes)
    return (
        f"{len(errors)} rows: mean {statistics.mean(errors):+.0%}, mean size "
        f"{statistics.mean(sizes):.0%}, {near:.0%} within 25 %, worst {max(errors, key=abs):+.0%}"
    )


def main() -> None:
    """Print every row's error and each kind's summary."""
    for kind, error_of in ERRORS.items():
        errors = []
        for row in KINDS[kind]:
            errors.append(error_of(row))
            what = {k: v for k, v in row.items() if k in ("batch", "tensor", "prompt", "output")}
            if kind == "grpo":
                step = grpo_step(row)
                what = {name: round(seconds, 1) for name, seconds in step.parts.items()}
                what |= {"chips": row["chips"], "off": row["off_policy"], "of": row["step_s"]}
            print(f"{kind:<6}{row['chip']:<6}{row['model']:<16}{errors[-1]:+7.0%}  {what}")
        print(f"== {kind}: {summary(errors)}\n")
    spread = [error for row in KINDS["batch"] if (error := spread_error(row)) is not None]
    print(f"== batch, grouped queries as if each head had its own cache: {summary(spread)}")
    placed = [grpo_step(row, training_s(row)).seconds / row["step_s"] - 1 for row in KINDS["grpo"]]
    print(f"== grpo with predicted training steps: {summary(placed)}")


if __name__ == "__main__":
    main()
