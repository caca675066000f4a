"""Published speeds of generation and of RL steps: read the data file, expand its tables and shapes.

The data are tests/core/plan/published_generation.toml, which says what each field means; shapes
that it does not have are those of published_steps.toml.
"""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import published_steps
from plain_models import attention_layer, decoder, with_experts

from sabia.core.plan.counting.architecture import Architecture, LayerKind

FILE = Path(__file__).parents[1] / "core" / "plan" / "published_generation.toml"

Row = dict[str, Any]


def load() -> tuple[dict[str, Row], dict[str, list[Row]]]:
    """(shapes by model name, rows by kind); each row knows its table's id and source."""
    data = tomllib.loads(FILE.read_text())
    shapes, _ = published_steps.load()
    for group in data["models"]:
        shapes |= {row["name"]: row for row in published_steps.expand(group)}
    kinds: dict[str, list[Row]] = {}
    for table in data["table"]:
        rows = [row | {"table": table["id"]} for row in published_steps.expand(table)]
        kinds.setdefault(table["kind"], []).extend(rows)
    return shapes, kinds


def architecture(shape: Row) -> Architecture:
    """The planner's Architecture of a shape of either file.

    Where only some layers attend to a window, they are spread evenly over dense and sparse ones.
    """
    h, depth = shape["hidden"], shape["layers"]
    dense = _latent(shape) if "kv_rank" in shape else _grouped(shape)
    if "experts" not in shape:
        layers: tuple[LayerKind, ...] = (replace(dense, count=depth),)
    else:
        shared = shape["shared_experts"] * shape["moe_ffn"]
        mixed = with_experts(dense, h, shape["experts"], shape["top_k"], shape["moe_ffn"], shared)
        sparse = (depth - shape.get("dense_layers", 0)) // shape.get("moe_every", 1)
        layers = (replace(dense, count=depth - sparse), replace(mixed, count=sparse))
    share = shape.get("window_layers", 0) / depth
    kinds = tuple(part for kind in layers for part in _windowed(kind, shape, share) if part.count)
    return decoder(shape["name"], h, shape["vocab"], kinds, tied=shape["tied"])


def _windowed(kind: LayerKind, shape: Row, share: float) -> tuple[LayerKind, ...]:
    """The layers of a kind that see all keys, and the `share` that see a window."""
    local = round(kind.count * share)
    whole = replace(kind, count=kind.count - local)
    return (whole, replace(kind, count=local, window=shape["window"])) if local else (whole,)


def _grouped(shape: Row) -> LayerKind:
    sizes = (shape["hidden"], shape["heads"], shape["kv_heads"], shape["head_dim"])
    return attention_layer(*sizes, shape.get("ffn", 0), gated=shape["gated"])


def _latent(shape: Row) -> LayerKind:
    """Multi-head latent attention: one vector of kv_rank + rope_dim a token is kept."""
    heads, keys = shape["heads"], shape["nope_dim"] + shape["rope_dim"]
    plain = attention_layer(shape["hidden"], heads, heads, keys, shape["ffn"])
    return replace(
        plain,
        mixer_params=published_steps.attention_params(shape),
        query_width=heads * keys,
        key_width=heads * keys,
        value_width=heads * shape["v_dim"],
        score_width=heads * (keys + shape["v_dim"]),
        cache_width=shape["kv_rank"] + shape["rope_dim"],
        key_latent=shape["kv_rank"],
    )
