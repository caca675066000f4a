"""The gate: its tests next to plain arithmetic, how often it errs, and what it refuses."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from in_process import sabia

from sabia.core.bench import statistics
from sabia.core.bench.gate import (
    GREEN,
    RED,
    UNDECIDED,
    Check,
    Difference,
    Scores,
    difference,
    failed,
    judge,
    mean_of,
)
from sabia.core.bench.gate_file import Gate, Rule, load_gate
from sabia.core.bench.metrics import MAXIMUM, NO_ANSWER
from sabia.core.bench.result_summary import tabulate
from sabia.core.bench.score_rows import Score, schema, to_batches
from sabia.core.bench.verdict_rows import Entry, VerdictRow
from sabia.core.errors import ExitCode, UsageError
from sabia.core.shards.outputs import open_file

TASKS = tuple(f"t{number}" for number in range(5))
EACH = {f"c{number}": [task] for number, task in enumerate(TASKS)}


def rows(
    model: str, task: str, values: np.ndarray | list[float], metric: str = "acc", size: int = 0
) -> list[Score]:
    return [
        Score(model, task, f"i{n}", 0, metric, float(v), None, f"g{n // size}" if size else "")
        for n, v in enumerate(values)
    ]


def scores_of(made: list[Score], verdicts: list[VerdictRow] | None = None) -> Scores:
    table, groups = tabulate(made)
    headlines = {row.task: row.metric for row in made if row.metric not in (MAXIMUM, NO_ANSWER)}
    return Scores(table, groups, headlines, {}, verdicts or [])


def drawn(draw: np.random.Generator, items: int, drop: float) -> list[Score]:
    """Two models of equal strength but for a drop in the first task, which the last makes up."""
    made = []
    for number, task in enumerate(TASKS):
        shift = {0: -drop, len(TASKS) - 1: drop}.get(number, 0.0)
        ease = draw.beta(1.5, 1.0, items)
        made += rows("base", task, (draw.random(items) < ease).astype(float))
        made += rows("new", task, (draw.random(items) < ease + shift).astype(float))
    return made


def test_one_check_by_hand() -> None:
    """Ten pairs, two worse and one better: with the two pairs that are added the mean is -1/12 and
    the sum of squares 3 + 1 - 12/144."""
    first = [1.0] * 6 + [0.0] * 4
    second = [0.0] * 2 + [1.0] * 5 + [0.0] * 3
    check = judge(Gate("a", (Rule("task", "t", 0.25),)), scores_of(
        [*rows("a", "t", first), *rows("b", "t", second)]))[0]  # fmt: skip
    found = check.difference
    assert found.value == pytest.approx(-0.1) and found.middle == pytest.approx(-1 / 12)
    squares = sum((y - x + 1 / 12) ** 2 for x, y in zip(first, second, strict=True)) + 1
    assert found.error == pytest.approx(math.sqrt(squares * 12 / 11) / 12)
    half = statistics.t_value(11, 0.9) * found.error
    assert (check.low, check.high) == pytest.approx((-1 / 12 - half, -1 / 12 + half))
    t = (-1 / 12 + 0.25) / found.error
    assert check.p_value == pytest.approx(1 - statistics.t_p_value(t, 11) / 2)
    assert (check.verdict, found.worse, found.better) == (UNDECIDED, ("i0", "i1"), ("i6",))
    z = 1.6448536 + 0.8416212
    assert check.needed == math.ceil(10 * (z * found.error / 0.25) ** 2)


def test_a_regression_in_one_capability_of_five_is_named() -> None:
    draw = np.random.default_rng(1)
    gate = Gate("base", (Rule("capability", "*", 0.02),), capabilities=EACH)
    named = 0
    for _ in range(40):
        checks = judge(gate, scores_of(drawn(draw, 1_500, 0.1)))
        assert abs(sum(c.difference.value for c in checks)) < 0.1  # the mean of all stays
        named += [c.name for c in checks if c.verdict == RED] == ["c0"]
        assert [c.name for c in failed(gate, checks)] == [
            c.name for c in checks if c.verdict == RED
        ]
    assert named >= 38


@pytest.mark.slow
@pytest.mark.parametrize("items", [15, 60, 400])
@pytest.mark.parametrize("allowed", [0.01, 0.05])
def test_equal_models_are_red_and_falls_green_as_rarely_as_stated(
    items: int, allowed: float
) -> None:
    draw = np.random.default_rng([items, round(allowed * 100)])
    gate = Gate("base", (Rule("capability", "*", allowed),), capabilities=EACH)
    red = green = 0
    for _ in range(400):
        equal = judge(gate, scores_of(drawn(draw, items, 0.0)))
        red += any(check.verdict == RED for check in equal)
        fallen = judge(gate, scores_of(drawn(draw, items, 0.2)))
        green += fallen[0].verdict == GREEN
    assert red <= 0.05 * 400 and green <= 0.05 * 400 + 2 * math.sqrt(400 * 0.05 * 0.95)


def test_the_number_of_items_needed_tells_equal_models_in_four_of_five_cases() -> None:
    draw = np.random.default_rng(3)

    def pairs(items: int) -> Check:
        ease = draw.beta(1.0, 1.0, items)
        made = [*rows("a", "t", (draw.random(items) < ease).astype(float)),
                *rows("b", "t", (draw.random(items) < ease).astype(float))]  # fmt: skip
        return judge(Gate("a", (Rule("task", "t", 0.05),)), scores_of(made))[0]

    needed = [check.needed for check in (pairs(200) for _ in range(60)) if check.needed > 200]
    size = round(float(np.median(needed)))
    green = sum(pairs(size).verdict == GREEN for _ in range(200))
    assert 0.72 <= green / 200 <= 0.88


def test_clusters_widen_and_samples_of_an_item_are_one() -> None:
    draw = np.random.default_rng(4)
    shock = np.repeat(draw.normal(0, 0.3, 30), 10)
    before, after = draw.random(300), np.clip(draw.random(300) + shock, 0, 1)
    made = [rows("a", "t", before, size=size) + rows("b", "t", after, size=size)
            for size in (0, 10)]  # fmt: skip
    gate = Gate("a", (Rule("task", "*", 0.05),))
    alone, grouped = (judge(gate, scores_of(each))[0].difference for each in made)
    assert alone.value == pytest.approx(grouped.value)
    assert grouped.error > 1.5 * alone.error and grouped.degrees == 31
    keys = {(f"i{n // 10}", n % 10): float(v) for n, v in enumerate(before)}
    other = {(f"i{n // 10}", n % 10): float(v) for n, v in enumerate(after)}
    sampled = difference(keys, other, {}, 1.0)
    assert sampled is not None and sampled.items == 30
    assert sampled.error == pytest.approx(grouped.error)


def test_a_mean_of_tasks_and_its_degrees_of_freedom() -> None:
    parts = [Difference(-0.1, -0.1, 0.02, 9, 10), Difference(0.3, 0.2, 0.04, 99, 100)]
    mean = mean_of(parts)
    assert (mean.value, mean.middle, mean.items) == pytest.approx((0.1, 0.05, 110))
    assert mean.error == pytest.approx(math.sqrt(0.02**2 + 0.04**2) / 2)
    welch = (0.02**2 + 0.04**2) ** 2 / (0.02**4 / 9 + 0.04**4 / 99)
    assert mean.degrees == pytest.approx(welch)


def test_points_are_compared_in_points_and_perplexity_falls_upwards() -> None:
    draw = np.random.default_rng(5)
    points = draw.integers(0, 11, 50).astype(float)
    made = [*rows("a", "p", points, "points"), *rows("b", "p", points - 0.5, "points")]
    made += rows("a", "p", [10.0] * 50, MAXIMUM) + rows("b", "p", [10.0] * 50, MAXIMUM)
    check = judge(Gate("a", (Rule("task", "p", 2.0),)), scores_of(made))[0]
    assert check.difference.value == pytest.approx(-25.0) and check.unit == "points"
    assert check.verdict == RED
    nats = -draw.random(50) - 1
    made = [row for model, by in (("a", 1.0), ("b", 1.3))
            for row in (*rows(model, "d", nats * by, "loglikelihood_nats"),
                        *rows(model, "d", [2.0] * 50, "bytes"))]  # fmt: skip
    table, groups = tabulate(made)
    scores = Scores(table, groups, {"d": "bits_per_byte"}, {})
    check = judge(Gate("a", (Rule("task", "d", 0.1),)), scores)[0]
    expected = -float(np.mean(-nats * 0.3 / 2 / math.log(2)))
    assert check.difference.value == pytest.approx(expected) and check.verdict == RED


def test_answers_that_are_missing_count_as_wrong() -> None:
    made = [*rows("a", "t", [1.0] * 100), *rows("b", "t", [1.0] * 60)]
    made += [Score("b", "t", f"i{n}", 0, NO_ANSWER, 1.0) for n in range(60, 100)]
    check = judge(Gate("a", (Rule("task", "t", 0.1),)), scores_of(made))[0]
    assert check.difference.value == pytest.approx(-0.4)
    assert (check.verdict, check.difference.missing) == (RED, 40)


def test_rubric_items_and_the_noise_of_repeats() -> None:
    draw = random.Random(6)
    verdicts = [
        VerdictRow(model, "r", f"i{n}", 0, Entry(item, "", float(draw.random() < share), 1.0))
        for model, shares in (("a", (0.9, 0.5)), ("b", (0.5, 0.5)), ("a2", (0.8, 0.5)))
        for item, share in zip(("cites", "is short"), shares, strict=True)
        for n in range(400)
    ]
    made = [row for model in ("a", "b", "a2") for row in rows(model, "r", [0.5] * 400, "share")]
    gate = Gate("a", (Rule("rubric_item", "*", 0.05),), repeats=("a2",))
    checks = judge(gate, scores_of(made, verdicts))
    assert [(c.candidate, c.name, c.verdict == RED) for c in checks] == [
        ("b", "cites (r)", True), ("b", "is short (r)", False)]  # fmt: skip
    values = {(row.model, row.item_id): row.entry.value
              for row in verdicts if row.entry.item == "cites"}  # fmt: skip
    noise = np.mean([values["a2", f"i{n}"] - values["a", f"i{n}"] for n in range(400)])
    assert checks[0].noise == pytest.approx(abs(noise))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]]\ntask = '*'\nmax_drop = 0.1", "baseline is missing"),
        ("baseline = 'a'", "no [[rule]]"),
        ("baseline = 'a'\n[[rule]]\ntask = '*'", "max_drop = None (expected a number above 0)"),
        ("baseline = 'a'\n[[rule]]\ntask = '*'\nmax_drop = 0", "max_drop = 0 "),
        ("baseline = 'a'\n[[rule]]\ntask = '*'\nmax_drop = true", "max_drop = True "),
        ("baseline = 'a'\n[[rule]]\nmax_drop = 1", "expected a pattern for one of capability"),
        ("baseline = 'a'\n[[rule]]\ntask = '*'\ncapability = 'b'\nmax_drop = 1", "for one of"),
        ("baseline = 'a'\n[[rule]]\ntaks = '*'\nmax_drop = 1", "'taks' (did you mean task?)"),
        ("baseline = 'a'\nconfidance = 1\n[[rule]]\ntask = '*'\nmax_drop = 1", "confidence?"),
        ("baseline = 'a'\nconfidence = 95\n[[rule]]\ntask = '*'\nmax_drop = 1", "in (0.5, 1)"),
        ("baseline = 'a'\nundecided = 'x'\n[[rule]]\ntask = '*'\nmax_drop = 1", "undecided = 'x'"),
        ("baseline = 'a'\nrepeats = 'b'\n[[rule]]\ntask = '*'\nmax_drop = 1", "a list of models"),
        ("baseline = 'a'\n[[rule]]\ntask = '*'\nmetric = 'x'\nmax_drop = 1", "metric = 'x'"),
        ("baseline = 'a'\n[capabilities]\nm = 't'\n[[rule]]\ntask = 't'\nmax_drop = 1", "a list"),
    ],
)
def test_files_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "gate.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_gate(str(tmp_path / "gate.toml"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        (Gate("x", (Rule("task", "*", 0.1),)), "no scores of 'x' (expected one of a, b)"),
        (Gate("a", (Rule("task", "*", 0.1),), repeats=("b",)), "a model other than 'a'"),
        (Gate("a", (Rule("task", "u*", 0.1),)), "no task matches 'u*'"),
        (Gate("a", (Rule("capability", "*", 0.1),)), "no capability matches '*'"),
        (Gate("a", (Rule("rubric_item", "*", 0.1),)), "no rubric item matches '*'"),
        (Gate("a", (Rule("task", "*", 0.1, "acc_norm"),)), "no items in common"),
    ],
)
def test_gates_that_do_not_fit(gate: Gate, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        judge(gate, scores_of([*rows("a", "t", [1.0]), *rows("b", "t", [0.0])]))
    assert message in str(caught.value)


def test_tasks_in_other_units_need_rules_of_their_own() -> None:
    made = [row for model in "ab" for row in rows(model, "p", [1.0, 2.0], "points")]
    gate = Gate("a", (Rule("capability", "m", 1.0),), capabilities={"m": ["p"]})
    with pytest.raises(UsageError, match="p is measured in points"):
        judge(gate, scores_of(made))


def test_one_item_is_never_enough() -> None:
    """Nor are a few that all agree."""
    gate = Gate("a", (Rule("task", "*", 0.05),), undecided="fail")
    for count in (1, 3, 20):
        made = [*rows("a", "t", [1.0] * count), *rows("b", "t", [1.0] * count)]
        checks = judge(gate, scores_of(made))
        assert [c.verdict for c in failed(gate, checks)] == [UNDECIDED] and checks[0].needed > count
    made = [*rows("a", "t", [1.0] * 500), *rows("b", "t", [1.0] * 500)]
    assert judge(gate, scores_of(made))[0].verdict == GREEN


def test_the_command_ends_with_3_and_says_why(tmp_path: Path) -> None:
    draw = np.random.default_rng(8)
    for name, wanted in (("fallen", 0.25), ("equal", 0.0)):
        made = drawn(draw, 1_000, wanted)
        for model in ("base", "new"):
            with open_file(str(tmp_path / f"{name}-{model}.parquet"), schema()) as writer:
                for batch in to_batches([row for row in made if row.model == model]):
                    writer.write(batch)
    names = "\n".join(f"{name} = {json.dumps(tasks)}" for name, tasks in EACH.items())
    rule = "[[rule]]\ncapability = '*'\nmax_drop = 0.08\n"
    (tmp_path / "gate.toml").write_text(f"baseline = 'base'\n[capabilities]\n{names}\n{rule}")
    for name, code in (("fallen", ExitCode.INFEASIBLE), ("equal", ExitCode.OK)):
        inputs = [tmp_path / f"{name}-{model}.parquet" for model in ("base", "new")]
        done = sabia("eval", *inputs, "--gate", tmp_path / "gate.toml", "--json",
                     "--report", tmp_path / f"{name}.html")  # fmt: skip
        assert done.exit_code == code, done.output
        checks = json.loads(done.stdout)["gate"]
        verdicts = {check["name"]: check["verdict"] for check in checks}
        if name == "fallen":
            assert verdicts.pop("c0") == "red" and "new: c0 (red)" in done.output
            assert len(checks[0]["regressed_items"]) == 50
        assert set(verdicts.values()) == {"green"}
        assert "<h2>Gate</h2>" in (tmp_path / f"{name}.html").read_text()
