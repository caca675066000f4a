"""With interruptions the whole answer follows the expected end: verdict, JSON, error, script, bill.

The settings are random. The Monte Carlo of each is `--simulate`, whose process test_process.py
holds to a save-by-save oracle.
"""

import random
import re

import pytest

from sabia.core.errors import ExitCode, Infeasible
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.answer import PlanOutput, answer
from sabia.core.units import format_duration, parse_duration

DAY_S = 86400.0


def planned(given: dict) -> PlanOutput:
    """The answer to options as on the command line; unset ones may be False."""
    return answer(PlanOptions.read({k: v for k, v in given.items() if v is not False}))


def random_settings(rng: random.Random) -> dict:
    """A run of 1B to 70B on some chips, or on as many as the deadline needs."""
    given = {
        "params": rng.choice([1e9, 8e9, 70e9]),
        "tokens": 10 ** rng.uniform(10.5, 12),
        "chip": rng.choice(["h100", "b200", "a100"]),
        "deadline": f"{rng.choice([3, 10, 30, 90])}d",
        "price": "2",
        "failure_rate": rng.choice([0.0, 0.001, 0.01]),
        "bucket_gbps": rng.choice([0.5, 2.0, 8.0]),
        "restart": f"{rng.choice([2, 15, 60])}m",
    }
    if rng.random() < 0.5:
        given["chips"] = rng.choice([8, 64, 256, 1024])
    if rng.random() < 0.7:
        given["preempt"] = f"{10 ** rng.uniform(0.5, 2.5):.1f}h"
        if rng.random() < 0.5:
            given["capacity_wait"] = f"{10 ** rng.uniform(-1, 1.3):.1f}h"
    if rng.random() < 0.3:
        given |= {"repair": f"{rng.choice([1, 12])}h", "spare_nodes": rng.choice([0, 1, 2])}
    kind = rng.choice(["", "", "synchronous", "peer_copies", "copies", "limit"])
    if kind in ("synchronous", "peer_copies"):
        given[kind] = True
    elif kind == "copies":
        given["checkpoint_copies"] = 2
    elif kind == "limit":
        given |= {"job_limit": f"{rng.choice([12, 24, 72])}h", "queue": f"{rng.choice([1, 6])}h"}
    return given


def drawn(given: dict, expected_s: float, seed: int):
    """The simulated run, of as many draws as fix its mean to half a percent."""
    runs, error, stops = 250, 1.0, {}
    while error > 0.005 and runs <= 64_000:
        simulated = given | {"simulate": runs, "seed": seed}
        stops = planned(simulated).report["stops"]["simulated"]
        error = stops["wall_s"]["error"] / expected_s
        runs *= 4
    return stops


def agree(seed: int) -> None:
    """The answer of one random setting says the same everywhere, or exits with 3."""
    rng = random.Random(seed)
    given = random_settings(rng)
    deadline_s = parse_duration(given["deadline"])
    layout = {"fixed_layout": "micro-batch=1", "search": True} if rng.random() < 0.3 else {}
    try:
        output = planned(given | layout)
    except Infeasible as late:
        assert late.exit_code == ExitCode.INFEASIBLE
        advised = re.search(r"--deadline (\d+d)(?:,|$)", str(late))
        if advised:  # the deadline is one that can be met
            assert parse_duration(advised[1]) > deadline_s
            planned(given | layout | {"deadline": advised[1]})
        return
    report = output.report
    row, stops = report["rows"][0], report["stops"]
    end_s = row["finishes_s"]
    assert row["meets_deadline"] and end_s <= deadline_s * (1 + 1e-9)
    assert stops["wall_s"] == end_s and stops["work_s"] == row["work_s"] <= end_s
    billed_usd = stops["billed_s"] * stops["billed_chips"] / 3600 * (1 if "preempt" in given else 2)
    assert row["costs"][0]["cost_usd"] == pytest.approx(billed_usd)
    words = f"{end_s / DAY_S:.1f} days" if end_s >= DAY_S else format_duration(end_s)
    assert f"finishes in {words}" in output.text and "with interruptions" in output.text
    if layout and row["chips"] % 8 == 0:
        script = planned(given | layout | {"emit": "slurm"})
        assert f"{row['chips']} {'spot ' if 'preempt' in given else ''}" in script.text
        assert f"{given['chip']} for {format_duration(end_s)};" in script.text
        assert script.report["rows"] == report["rows"]
    simulated = drawn(given | layout, end_s, seed)
    assert simulated["wall_s"]["mean"] == pytest.approx(end_s, rel=0.02)
    assert simulated["billed_s"]["mean"] == pytest.approx(stops["billed_s"], rel=0.02)


@pytest.mark.parametrize("seed", range(16))
def test_random_settings_have_one_answer(seed):
    agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16, 200))
def test_more_random_settings_have_one_answer(seed):
    agree(seed)


MODEL = {"params": 1.6e12, "active": 49e9, "deadline": "30d"}
SPOT = MODEL | {"spot": True, "preempt": "6h", "capacity_wait": "12h"}


@pytest.mark.parametrize("search", [False, True])
def test_a_cluster_that_waits_for_capacity_is_larger(search):
    report = planned(SPOT | {"search": search}).report
    calm = planned(MODEL | {"search": search}).report
    row, without = report["rows"][0], calm["rows"][0]
    assert row["finishes_s"] <= 30 * DAY_S and row["chips"] > without["chips"]
    assert report["stops"]["waited_capacity_s"] > 10 * DAY_S


def test_fewest_chips_in_time_are_the_fewest():
    row = planned(SPOT).report["rows"][0]
    planned(SPOT | {"chips": row["chips"]})
    with pytest.raises(Infeasible, match=f"use --chips {row['chips']} or --deadline"):
        planned(SPOT | {"chips": row["chips"] - 1})
