"""Published training steps as the planner's own terms: workload, layout, chip, software, seconds.

Rows of calibration_rows.toml and calibration_mixtures.toml state these directly. Tables of
published_steps.toml speak each in the words of their source; what they mean here is below, decided
from the layout fields alone.
"""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from bridge_software import software
from plain_models import attention_layer, decoder, with_experts
from published_steps import Row, expand, flops_per_token, load, matmul_params

from sabia.core.plan.chips import Chip, find_chip
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.device.layout import Layout, Stack, Workload, find_stack
from sabia.core.plan.memory import RECIPES

ROWS = Path(__file__).parents[1] / "core" / "plan"
CALIBRATION, FURTHER = ROWS / "calibration_rows.toml", ROWS / "further_steps.toml"
MIXTURES, ATTENTION = ROWS / "calibration_mixtures.toml", ROWS / "calibration_attention.toml"


@dataclass(frozen=True)
class Case:
    """One published step. flops: operations of a step under the source's convention, or None."""

    table: str
    label: str
    workload: Workload
    layout: Layout
    chip: Chip
    stack: Stack
    measured_s: float
    model_flops: float


def architecture(shape: Row, positions: int = 0) -> Architecture:
    """The Architecture of a [[models]] row."""
    mixture, dense = _kinds(shape)
    layers, windowed = _counted(shape, mixture, dense)
    extra = ()
    if shape.get("mtp_layers"):
        extra = (replace(mixture or dense, count=shape["mtp_layers"]),)
    found = decoder(
        shape["name"],
        shape["hidden"],
        shape["vocab"],
        tuple(kind for kind in (*layers, *windowed) if kind.count),
        tied=shape["tied"],
        positions=positions,
    )
    joined = 2 * shape["hidden"] ** 2 * shape.get("mtp_layers", 0)
    return replace(found, extra=extra, extra_params=joined)


def _kinds(shape: Row) -> tuple[LayerKind | None, LayerKind]:
    """(a layer with experts, one without)."""
    head_dim = shape.get("head_dim", 128)
    dense = attention_layer(
        shape["hidden"], shape["heads"], shape.get("kv_heads", shape["heads"]), head_dim,
        shape.get("ffn", 0), gated=shape["gated"],
    )  # fmt: skip
    dense = replace(dense, sinks=shape.get("sinks", False))
    if "kv_rank" in shape:
        dense = _latent(dense, shape)
    if "experts" not in shape:
        return None, dense
    width = shape["moe_ffn"]
    shared = shape["shared_experts"] * width
    return with_experts(
        dense, shape["hidden"], shape["experts"], shape["top_k"], width, shared
    ), dense


def _latent(kind: LayerKind, shape: Row) -> LayerKind:
    """Multi-head latent attention in place of grouped queries."""
    h, n = shape["hidden"], shape["heads"]
    nope, rope, value = shape["nope_dim"], shape["rope_dim"], shape["v_dim"]
    query = shape["q_rank"] * (h + n * (nope + rope))
    latent = h * (shape["kv_rank"] + rope) + shape["kv_rank"] * n * (nope + value)
    return replace(
        kind,
        mixer_params=query + latent + n * value * h,
        query_width=n * (nope + rope),
        key_width=n * (nope + rope),
        value_width=n * value,
        score_width=n * (nope + rope + value),
        cache_width=shape["kv_rank"] + rope,
    )


def _counted(
    shape: Row, mixture: LayerKind | None, dense: LayerKind
) -> tuple[list[LayerKind], list[LayerKind]]:
    """(kinds that see everything, kinds with a window), with their counts."""
    layers, local = shape["layers"], shape.get("window_layers", 0)
    routed = (layers - shape.get("dense_layers", 0)) // shape.get("moe_every", 1) if mixture else 0
    kinds = [(mixture, routed), (dense, layers - routed)]
    whole, windowed = [], []
    for kind, count in kinds:
        if kind and count:
            near = round(local * count / layers)
            whole.append(replace(kind, count=count - near))
            windowed.append(replace(kind, count=near, window=shape.get("window")))
    return whole, windowed


def calibration_cases() -> list[Case]:
    """All rows of calibration_rows.toml."""
    return _cases(CALIBRATION)


def mixture_cases() -> list[Case]:
    """All rows of calibration_mixtures.toml."""
    return _cases(MIXTURES)


def attention_cases() -> list[Case]:
    """All rows of calibration_attention.toml."""
    return _cases(ATTENTION)


def further_cases() -> list[Case]:
    """All rows of further_steps.toml."""
    return _cases(FURTHER)


def _cases(path: Path) -> list[Case]:
    data = tomllib.loads(path.read_text())
    shapes, _ = load()
    shapes |= {row["name"]: row for group in data["models"] for row in expand(group)}
    return [
        _stated(table["id"], row, shapes[row["model"]])
        for table in data["table"]
        for row in expand(table)
    ]


def _stated(table: str, row: Row, shape: Row) -> Case:
    stack = find_stack(row["stack"])
    if "keeps" in row:
        stack = replace(stack, selective_keeps=tuple(row["keeps"]))
    stack = replace(stack, **row.get("software", {}))
    if "release" in row:
        stack = replace(stack, **software(row["release"], row["model"], row["chip"]))
    axes = ("data", "fsdp", "expert", "context", "tensor", "pipe", "virtual")
    layout = Layout(
        **{axis: row.get(axis, 1) for axis in axes},
        micro_batch=row["mbs"],
        recompute=row["recompute"],
        zero=row["zero"],
        sequence_parallel=row.get("sequence_parallel", True),
        experts_over_tensor=row.get("over_tensor", False) and row.get("tensor", 1) > 1,
    )
    if layout.chips != row["chips"]:
        raise ValueError(f"{table}: {row} has {layout.chips} chips")
    model = architecture(shape)
    workload = Workload(
        model, row["seq"], row["gbs"], RECIPES[row["recipe"]], precision=row["precision"]
    )
    chip = find_chip(row["chip"])
    if "scale_up_gb_s" in row:
        chip = replace(chip, scale_up_bytes_per_s=row["scale_up_gb_s"] * 1e9)
    flops = step_flops(row, shape)
    return Case(
        table, label_of(row), workload, layout, chip, stack, seconds_of(row, flops, chip), flops
    )


def step_flops(row: Row, shape: Row) -> float:
    """Operations of a step: as the row's convention says, else uncausal attention counted."""
    tokens = row["gbs"] * row["seq"]
    convention = row.get("flops", "palm")
    if convention == "hardware":
        head = 6 * shape["vocab"] * shape["hidden"]
        layers = flops_per_token(shape, row["seq"], "palm") - head
        return tokens * (layers * 4 / 3 + head)
    if convention == "unknown":
        convention = "palm"
    count = flops_per_token(shape, row["seq"], convention)
    if "params" in row:  # this source counts every parameter
        count += 6 * (row["params"] - matmul_params(shape))
    return tokens * count


def seconds_of(row: Row, flops: float, chip: Chip) -> float:
    """Measured seconds of a step, from whatever figure the row has."""
    if _is_figure(row, "step_s"):
        return row["step_s"]
    if _is_figure(row, "tokens_per_s"):
        return row["gbs"] * row["seq"] / row["tokens_per_s"]
    if _is_figure(row, "tokens_per_s_chip"):
        return row["gbs"] * row["seq"] / row["tokens_per_s_chip"] / row["chips"]
    rate = row.get("tflops_chip", 0) * 1e12
    if not rate:
        rate = row["mfu_percent"] / 100 * chip.bf16_flops_per_s
    return flops / rate / row["chips"]


def _is_figure(row: Row, name: str) -> bool:
    return isinstance(row.get(name), int | float)


def label_of(row: Row) -> str:
    layout = " ".join(
        f"{axis[0]}{row[axis]}" for axis in ("tensor", "pipe") if row.get(axis, 1) > 1
    )
    words = (row["model"], f"{row['chips']} {row['chip']}", layout, row.get("recompute", ""))
    return " ".join(word for word in words if word)
