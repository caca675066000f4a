"""The planner's options: what is assumed, what is refused, and the rows of lists of runs."""

from unittest import mock

import pytest

from sabia.core.errors import UsageError
from sabia.core.options import about
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import memory, request
from sabia.core.plan.device.layout import find_stack
from sabia.core.plan.device.step_work import RATE_FIELD
from sabia.core.plan.serving.decode import CACHE_BYTES
from sabia.core.plan.stops.failures import StopModel

TABLE = PlanOptions.table


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tokens", "700B", lambda asked: asked.run.tokens == 700e9),
        ("seq", "4k", lambda asked: asked.run.sequence == 4096),
        ("batch_tokens", "2M", lambda asked: asked.run.batch_tokens == 2e6),
        ("state_recipe", "jax10", lambda asked: asked.run.recipe.name == "jax10"),
        ("chip", "h100", lambda asked: asked.cluster.chip.name == "h100"),
        ("mfu", "30%", lambda asked: asked.cluster.mfu == 0.3),
        ("deadline", "9w", lambda asked: asked.deadlines_s == [9 * 7 * 86400]),
    ],
)
def test_the_default_that_help_shows_is_the_one_that_is_used(name, text, value):
    assert TABLE[name].default_text() == TABLE[name].unset
    with mock.patch.object(TABLE[name], "unset", text):
        assert value(request.build(PlanOptions(params=8e9)))


def test_defaults_of_stops_are_those_of_the_options():
    model = StopModel()
    assert model.failures_per_chip_day == PlanOptions.assumed("failure_rate") == 0.001
    assert model.restart_s == PlanOptions.assumed("restart") == 900
    assert model.bucket_bytes_per_s == PlanOptions.assumed("bucket_gbps") * 1e9 == 8e9
    assert (model.spot_share, model.copies) == (0.5, 1)
    assert (
        f"that of `--stack`: {find_stack('sabia').utilisation:.0%}"
        in about.long_help(PlanOptions)["utilisation"]
    )


@pytest.mark.parametrize(
    ("name", "known"),
    [("state_recipe", memory.RECIPES), ("cache", CACHE_BYTES), ("precision", RATE_FIELD)],
)  # fmt: skip
def test_choices_are_what_the_planner_knows(name, known):
    assert set(TABLE[name].choices) == set(known)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"objective": "time"}, "--objective: only with --search"),
        ({"stack": "sabia"}, "--stack: only with --search or --fixed-layout"),
        ({"emit": "slurm"}, "--emit: only with --search or --fixed-layout"),
        ({"stage": "serve", "tokens": "500B"}, "--tokens: only with --stage pretrain or sft"),
        ({"stage": "serve", "mfu": "40%"}, "--mfu: only with --stage pretrain, sft or grpo"),
        ({"stage": "eval", "carbon": True}, "--carbon: only with --stage pretrain or sft"),
        ({"stage": "grpo", "explain": True, "search": True}, "--explain: only with --stage"),
        ({"stage": "eval", "compare": "h100"}, "--compare: only with --stage pretrain or sft"),
        ({"weights": "bf16"}, "--weights: only with --stage serve, grpo or eval"),
        ({"prompts": 64}, "--prompts: only with --stage grpo"),
        ({"stage": "eval", "judge_active": 1}, "--judge-active: only with --judge-params"),
        ({"model": "x", "layers": 2}, "--layers: not together with --model"),
        ({"lora": True, "state_recipe": "muon"}, "--state-recipe: not together with --lora"),
        ({"peer_copies": True, "job_limit": "1d"}, "--peer-copies: not together with --job-limit"),
        ({"peer_copies": True, "synchronous": True}, "--peer-copies: not together with"),
        ({"capacity_wait": "1h"}, "--capacity-wait: only with --preempt"),
        ({"spare_nodes": 0}, "--spare-nodes: only with --repair"),
        ({"seed": 0}, "--seed: only with --simulate"),
        ({"budget": "x.toml", "nodes": 2}, "--nodes: not together with --budget"),
        ({"pue": 0.9}, "--pue: 0.9 is out of range"),
        ({"carbon_intensity": 385}, "--carbon-intensity: 385 is out of range .expected 0 to 2"),
        # options that were accepted and had no effect
        ({"stage": "sft", "tokens": "1B", "items": 9}, "--tokens: not together with --items"),
        ({"stage": "sft", "tokens": "1B", "repeats": 2}, "--repeats: only with --items or --stage"),
        ({"stage": "sft", "tokens": "1B", "prompt_tokens": 9}, "--prompt-tokens: only with"),
        ({"stage": "eval", "judge_calls": 0, "judge_price": "1,2"}, "--judge-price: only with"),
        ({"stage": "eval", "api_price": "1,2", "layers": 9}, "--layers: not together with"),
        ({"stage": "eval", "api_price": "1,2", "weights": "fp8"}, "--weights: with --api-price"),
        ({"search": True, "emit": "slurm", "carbon": True}, "--emit: not together with --carbon"),
        ({"search": True, "emit": "slurm", "to": "jsonl"}, "--emit: not together with --to"),
        ({"spot": True, "price": "2"}, "--spot: with --price only together with --preempt"),
        ({"json": True, "to": "jsonl"}, "--to: not together with --json"),
        ({"json": True, "out": "-"}, "--out -: not together with --json"),
    ],
)
def test_options_without_a_meaning_are_refused_whatever_their_value(given, words):
    model = {} if "model" in given or "budget" in given else {"params": "8B"}
    with pytest.raises(UsageError, match=words):
        PlanOptions.read(model | given)


def test_a_row_may_use_hyphens_numbers_and_switches():
    row = {"batch-tokens": 4e6, "search": True, "chip": "h100", "chips": 8, "layers": None}
    asked = PlanOptions.read(row)
    assert (asked.batch_tokens, asked.search, asked.chip, asked.chips) == (4e6, True, "h100", 8)
    assert list(asked.set_values()) == ["batch_tokens", "chip", "chips", "search"]


def test_zero_is_set_and_none_and_false_are_not():
    asked = PlanOptions(failure_rate=0.0, spot=False, chip=None)
    assert asked.set_values() == {"failure_rate": 0.0}
    assert asked.value("failure_rate") == 0 and asked.value("chip") == "b200"


def test_runs_of_a_list_are_checked_with_the_options_beside_them():
    beside = PlanOptions(inputs=("runs.jsonl",), objective="cost")
    run = beside.changed(inputs=(), **PlanOptions.read_row({"params": "8B", "search": True}))
    assert (run.objective, run.search, run.inputs) == ("cost", True, ())
    with pytest.raises(UsageError, match="--objective: only with --search"):
        beside.changed(inputs=(), **PlanOptions.read_row({"params": "8B", "search": False}))
    assert beside.changed(objective=None).given == {"inputs"}


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"token": 3}, "no option 'token'; did you mean tokens"),
        ({"batch-token": 3}, "did you mean batch-tokens"),
        ({"mfu": "400"}, "100 %"),
        ({"chips": "two"}, "not a number"),
        ({"chips": 10**10}, "expected 1 to 1,000,000,000"),
        ({"objective": "speed"}, "time or cost"),
        ({"seq": "1.5"}, "whole number"),
        ({"search": "perhaps"}, "true or false"),
        ({"chips": True}, "expected a value"),
        ({"chip": ["h100"]}, "expected one value"),
        ({"chip": ""}, "--chip: is empty"),
        ({"out": "x.parquet"}, "--out: cannot be set in a list of runs"),
        ({"plot": "x.svg"}, "--plot: cannot be set in a list of runs"),
    ],
)
def test_rows_that_make_no_sense_are_refused(row, hint):
    with pytest.raises(UsageError, match=hint):
        PlanOptions.read_row(row)
