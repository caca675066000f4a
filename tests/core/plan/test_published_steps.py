"""The published step times have the right form: fields, units, provenance, figures that agree.

Nothing of the planner is under test here; its step-time model is judged on these rows elsewhere.
Where a source prints both tokens/s and TFLOP/s, their ratio must be the operations per token of
the stated shape under the stated convention; where it prints steps, tokens/s must follow.
"""

import datetime
import re

import pytest
from published_steps import (
    UNKNOWN,
    countable,
    flops_per_token,
    load,
    matmul_params,
    tokens_per_s_chip,
)

from sabia.core.plan.chips import load_chips

SHAPES, TABLES = load()
ROWS = [(table, row) for table in TABLES for row in table["expanded"]]
COUNTS = {
    "chips", "seq", "gbs", "mbs", "local_batch", "data", "fsdp", "tensor", "pipe", "context",
    "expert", "virtual", "slices", "grad_accum", "zero", "params", "hbm_gb", "hbm_tb_s", "power_w",
}  # fmt: skip
FIGURES = {
    "step_s", "tokens_per_s", "tokens_per_s_chip", "tflops_chip", "mfu_percent", "memory_gib",
}  # fmt: skip
WORDS = {
    "model", "chip", "precision", "recompute", "kind", "schedule", "software", "flops",
    "weight_dtype", "packed", "calibration",
}  # fmt: skip
NEEDED = {"model", "chip", "chips", "seq", "gbs", "precision", "recompute", "flops"}
FORMATS = {"bf16", "fp8", "fp8_full", "fp8-cs", "fp8-mx", "mxfp8", "nvfp4", "int8"}
CONTRADICTED = {  # the page's accumulation is not its batch over its layout: 64 and 8 would be
    ("bridge-25.11", "qwen3-235b-a22b", "gb300"),
    ("bridge-25.11", "gpt-oss-120b", "h100"),
}
PEAK = {"h100": 989.5, "a100": 312, "tpu-v5e": 197, "tpu-v5p": 459}


def name(item) -> str:
    return item["id"] if "id" in item else item["source"]


@pytest.mark.parametrize("table", TABLES, ids=name)
def test_each_table_says_where_it_comes_from(table):
    assert re.match(r"[\w.-]+/[\w.-]+@[0-9a-f]{9,40} \S+\.md$", table["source"])
    assert isinstance(table["date"], datetime.date)
    assert datetime.date(2020, 1, 1) < table["date"] < datetime.date(2026, 12, 1)
    assert table["title"] and table["note"].endswith(".")
    fields = set(table["columns"]) | set(table["fixed"])
    assert set(table.get("derived", [])) <= fields
    assert not set(table["columns"]) & set(table["fixed"])
    assert fields >= NEEDED, NEEDED - fields


@pytest.mark.parametrize("table", TABLES, ids=name)
def test_fields_have_their_kind_and_unit(table):
    for row in table["expanded"]:
        assert set(row) <= COUNTS | FIGURES | WORDS, set(row) - COUNTS - FIGURES - WORDS
        for field in COUNTS & set(row):
            value, least = row[field], 0 if field in ("fsdp", "mbs") else 1
            assert value == UNKNOWN or (not isinstance(value, bool) and value >= least), field
        for field in FIGURES & set(row):
            assert row[field] == UNKNOWN or row[field] > 0, field
        assert row["precision"].split()[0] in FORMATS
        assert row["flops"] in ("6nd", "4nd", "palm", "causal", UNKNOWN)
        assert re.fullmatch(
            r"none|selective|minimal|full|unknown|keep \S+@(host|hbm)( \S+@hbm)?", row["recompute"]
        )
        assert row.get("mfu_percent", 50) < 75 and row.get("memory_gib", 50) < 96


def test_models_and_chips_are_known():
    used = {row["model"] for _, row in ROWS}
    assert used == set(SHAPES)
    assert {row["chip"] for _, row in ROWS} <= set(load_chips())


def test_tables_are_distinct_and_the_rows_are_enough():
    assert len({table["id"] for table in TABLES}) == len(TABLES)
    fresh = [row for _, row in ROWS if not row.get("calibration", False)]
    assert len(fresh) >= 300 and len(ROWS) - len(fresh) == 19
    assert {"h100", "a100", "gb200", "tpu-v5p", "tpu-v6e", "tpu-v7"} <= {r["chip"] for r in fresh}


def whole(row, *fields) -> bool:
    return all(row.get(field, UNKNOWN) != UNKNOWN for field in fields)


def test_layouts_use_all_chips():
    for table, row in ROWS:
        grid = row.get("tensor", 1) * row.get("pipe", 1)
        if "NeMo" in table["source"] or "Bridge" in table["source"]:
            assert row["chips"] % (grid * row.get("context", 1)) == 0, (table["id"], row)
        elif whole(row, "fsdp"):
            devices = row["chips"] * (2 if row["chip"] == "tpu-v7" else 1)
            ranks = row["fsdp"] * row.get("data", 1) * grid * row.get("context", 1)
            assert ranks == devices, (table["id"], row)


def test_batches_fit_the_layout():
    for table, row in ROWS:
        if not whole(row, "gbs", "mbs", "chips"):
            continue
        devices = row["chips"] * (2 if row["chip"] == "tpu-v7" else 1)
        split = row.get("tensor", 1) * row.get("pipe", 1) * row.get("context", 1)
        if row["chip"].startswith("tpu"):  # MaxText counts per device, tensor ranks too
            split = 1
        per_pass = row["mbs"] * devices / split
        assert row["gbs"] % per_pass == 0, (table["id"], row)
        run = (table["id"], row["model"], row["chip"])
        if "grad_accum" in row and run not in CONTRADICTED:
            assert row["gbs"] == per_pass * row["grad_accum"], (table["id"], row)


def test_tokens_follow_from_the_step_time():
    checked = 0
    for table, row in ROWS:
        if whole(row, "step_s", "gbs", "tokens_per_s_chip"):
            derived = row["gbs"] * row["seq"] / row["step_s"] / row["chips"]
            assert derived == pytest.approx(row["tokens_per_s_chip"], rel=0.01), (table["id"], row)
            checked += 1
    assert checked >= 40


def test_operations_follow_from_the_shape():
    checked = set()
    for table, row in ROWS:
        shape = SHAPES[row["model"]]
        speed = tokens_per_s_chip(row)
        if speed and whole(row, "tflops_chip") and countable(shape, row):
            count = flops_per_token(shape, row["seq"], row["flops"])
            if "params" in row:  # this source counts every parameter
                count += 6 * (row["params"] - matmul_params(shape))
            assert speed * count / 1e12 == pytest.approx(row["tflops_chip"], rel=0.02), (
                table["id"], row, count * speed / 1e12,
            )  # fmt: skip
            checked.add((table["id"], str(row)))
    assert len(checked) >= 220


def test_utilisation_follows_from_the_peak():
    for table, row in ROWS:
        if whole(row, "mfu_percent", "tflops_chip"):
            peak = PEAK[row["chip"]] * (2 if row["precision"] == "fp8" else 1)
            derived = 100 * row["tflops_chip"] / peak
            assert derived == pytest.approx(row["mfu_percent"], rel=0.01), (table["id"], row)


def test_parameters_follow_from_the_shape():
    for table, row in ROWS:
        if "params" in row:
            shape = SHAPES[row["model"]]
            positions = row["seq"] * shape["hidden"] if shape["learned_positions"] else 0
            count = matmul_params(shape) + positions
            assert row["params"] == pytest.approx(count, rel=1e-3), (table["id"], row)
