"""Published training throughputs: read the data file, expand its tables, count their operations.

The data are tests/core/plan/published_steps.toml, which says what each field means. The counter
is independent of the planner's own: matrix products of the shapes in that file, nothing else.
"""

import tomllib
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "core" / "plan" / "published_steps.toml"
UNKNOWN = "unknown"

Row = dict[str, Any]


def expand(table: dict[str, Any]) -> list[Row]:
    """The rows of a table as dicts: its fixed fields, then one of its `rows`."""
    fixed = table.get("fixed", {})
    return [fixed | dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def load() -> tuple[dict[str, Row], list[dict[str, Any]]]:
    """(shapes by model name, tables); each table has its expanded rows under `expanded`."""
    data = tomllib.loads(FILE.read_text())
    shapes = {row["name"]: row for group in data["models"] for row in expand(group)}
    return shapes, [table | {"expanded": expand(table)} for table in data["table"]]


def tokens_per_s_chip(row: Row) -> float | None:
    """Trained tokens per second and chip as printed, or from the total or the step's time."""
    if isinstance(row.get("tokens_per_s"), int | float):
        return row["tokens_per_s"] / row["chips"]
    if isinstance(row.get("tokens_per_s_chip"), int | float):
        return row["tokens_per_s_chip"]
    if isinstance(row.get("step_s"), int | float) and row.get("gbs", UNKNOWN) != UNKNOWN:
        return row["gbs"] * row["seq"] / row["step_s"] / row["chips"]
    return None


def attention_params(shape: Row) -> int:
    """Weights of the projections of one attention layer, grouped-query or latent."""
    h, n = shape["hidden"], shape["heads"]
    if "kv_rank" not in shape:
        return h * shape["head_dim"] * 2 * (n + shape["kv_heads"])
    nope, rope, value = shape["nope_dim"], shape["rope_dim"], shape["v_dim"]
    query = shape["q_rank"] * (h + n * (nope + rope))
    key_value = h * (shape["kv_rank"] + rope) + shape["kv_rank"] * n * (nope + value)
    return query + key_value + n * value * h


def matmul_params(shape: Row) -> int:
    """Weights that each token is multiplied with: no embedding, only the experts it goes to."""
    h, layers = shape["hidden"], shape["layers"]
    mtp = shape.get("mtp_layers", 0)
    matrices = 3 if shape["gated"] else 2
    dense = matrices * h * shape.get("ffn", 0)
    mixture = 0
    if "experts" in shape:
        used = shape["top_k"] + shape["shared_experts"]
        mixture = matrices * h * shape["moe_ffn"] * used + h * shape["experts"]
    mixtures = (layers - shape.get("dense_layers", 0)) // shape.get("moe_every", 1)
    mixtures = mixtures + mtp if mixture else 0
    blocks = (layers + mtp) * attention_params(shape) + mixtures * mixture
    dense_blocks = layers + mtp - mixtures
    return blocks + dense_blocks * dense + (1 + mtp) * shape["vocab"] * h + mtp * 2 * h * h


def flops_per_token(shape: Row, seq: int, convention: str) -> float:
    """Operations per trained token under one of the file's conventions."""
    factor = {"4nd": 4, "6nd": 6, "palm": 6, "causal": 6}[convention]
    products = factor * matmul_params(shape)
    if convention in ("4nd", "6nd"):
        return products
    width = shape["heads"] * shape.get("head_dim", 0) * 2
    if "kv_rank" in shape:
        width = shape["heads"] * (shape["nope_dim"] + shape["rope_dim"] + shape["v_dim"])
    full = seq if convention == "palm" else seq / 2
    window = min(shape.get("window", seq), seq)
    local = seq if convention == "palm" else window * (1 - window / (2 * seq))
    windowed = shape.get("window_layers", 0)
    layers = shape["layers"] + shape.get("mtp_layers", 0)
    return products + 6 * width * ((layers - windowed) * full + windowed * local)


def countable(shape: Row, row: Row) -> bool:
    """Whether the row's convention and the model's shape allow to count operations."""
    return shape.get("complete", True) and row.get("flops", UNKNOWN) != UNKNOWN
