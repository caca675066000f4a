"""The published speeds of generation and RL steps have the right form and agree in themselves."""

import pytest
from published_generation import load

from sabia.core.plan.chips import load_chips

SHAPES, KINDS = load()


def test_every_row_names_a_known_model_and_chip():
    for row in [row for rows in KINDS.values() for row in rows]:
        assert row["model"] in SHAPES
        assert row["chip"] in load_chips()
        assert all(value > 0 for key, value in row.items() if key.endswith(("_s", "_ms", "_chip")))


def test_there_are_enough_rows_to_judge_by():
    assert {kind: len(rows) for kind, rows in KINDS.items()} == {
        "batch": 29,
        "first": 16,
        "load": 223,
        "grpo": 28,
    }


@pytest.mark.parametrize("row", KINDS["grpo"], ids=lambda row: f"{row['table']} {row['model']}")
def test_tokens_of_a_step_agree_with_its_time(row):
    tokens = row["tokens_per_s_chip"] * row["chips"] * row["step_s"] / row["samples"]
    slack = 0.17 if row["model"] == "qwen3-235b-a22b" and row["off_policy"] else 0.03
    assert tokens == pytest.approx(row["mean_tokens"] + row["prompt"], rel=slack)
    assert row["mean_tokens"] + row["prompt"] < row["limit_tokens"]
    assert (row["generation_chips"] > 0) == (row["off_policy"] > 0)
