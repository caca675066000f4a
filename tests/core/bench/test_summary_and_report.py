"""Summaries from score rows alone, and the page that shows them."""

import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from sabia.core.bench import report, statistics
from sabia.core.bench.metrics import LOGLIKELIHOOD, MAXIMUM, NO_ANSWER, NO_VERDICT
from sabia.core.bench.result_summary import summarise, to_json
from sabia.core.bench.score_rows import Score, from_batch, scores_of, to_batches


def answers(model: str, right: list[int], task: str = "sums", samples: int = 1) -> list[Score]:
    rows: list[Score] = []
    for i, value in enumerate(right):
        detail = {"response": f"{model} says {value}", "question": f"q{i}", "answer": 1}
        values = {"exact_match": value}
        rows += scores_of(model, task, f"i{i // samples}", i % samples, values, detail)
    return rows


A = [1, 1, 1, 0, 0, 1, 1, 0, 1, 1]
B = [1, 0, 0, 1, 0, 1, 0, 0, 1, 0]


def test_values_intervals_and_pairs() -> None:
    found = summarise([*answers("a", A), *answers("b", B)])
    a, b = found.result("a", "sums"), found.result("b", "sums")
    assert (a.interval.value, b.interval.value) == (0.7, 0.4)
    assert a.interval == statistics.of_answers(0.7, 10)
    (pair,) = found.comparisons
    assert (pair.paired.regressed, pair.paired.fixed) == (4, 1)
    assert pair.worse == ("i1", "i2", "i6", "i9") and pair.better == ("i3",)
    assert pair.paired.p_value == statistics.mcnemar_exact(4, 1)
    assert pair.paired.difference.value == pytest.approx(-0.3)


def test_only_items_that_both_have_are_compared() -> None:
    found = summarise([*answers("a", A), *answers("b", B[:4])])
    assert found.comparisons[0].paired.items == 4
    assert found.comparisons[0].paired.difference.value == pytest.approx(-0.25)


def test_samples_are_clustered_by_item() -> None:
    found = summarise(answers("a", [1, 1, 1, 1, 0, 0, 0, 0], samples=4))
    result = found.result("a", "sums")
    assert (result.items, result.samples_per_item) == (2, 4)
    assert result.interval.method == "agresti_coull_t_clustered"
    assert (
        result.interval.half_width > statistics.mean_interval([1, 1, 1, 1, 0, 0, 0, 0]).half_width
    )


def test_perplexities_are_ratios_of_sums_and_lower_is_better() -> None:
    rows = []
    for model, nats in (("a", [-10.0, -30.0]), ("b", [-9.0, -33.0])):
        for i, value in enumerate(nats):
            sums = {LOGLIKELIHOOD: value, "bytes": 10.0 * (i + 1), "words": 2.0, "tokens": 5.0}
            rows += scores_of(model, "prose", f"d{i}", 0, sums)
    found = summarise(rows)
    assert found.headlines["prose"] == "bits_per_byte"
    assert found.result("a", "prose").interval.value == pytest.approx(40 / 30 / math.log(2))
    assert found.result("a", "prose", "token_perplexity").interval.value == pytest.approx(
        math.exp(4)
    )
    (pair,) = found.comparisons
    assert pair.worse == ("d1",) and pair.better == ("d0",)
    assert (pair.paired.regressed, pair.paired.fixed) == (1, 1)


def test_points_are_summed_and_missing_verdicts_are_no_zeros() -> None:
    rows = []
    for i, points in enumerate((0.65, 0.2, 1.25)):
        rows += scores_of("a", "exam", f"t{i}", 0, {"points": points, MAXIMUM: 1.25})
    rows += scores_of("a", "exam", "t3", 0, {NO_VERDICT: 1.0})
    result = summarise(rows).result("a", "exam")
    assert (result.interval.value, result.maximum) == (2.1, 3.75)
    assert (result.items, result.no_verdict) == (3, 1)
    silent = summarise(scores_of("a", "exam", "t", 0, {NO_VERDICT: 1.0})).results[0]
    assert math.isnan(silent.interval.value) and silent.no_verdict == 1


def test_overall_is_given_where_all_models_have_all_tasks() -> None:
    rows = [*answers("a", A), *answers("b", B), *answers("a", B, "mc"), *answers("b", A, "mc")]
    found = summarise(rows)
    assert found.overall["a"].value == pytest.approx(0.55)
    holm = sorted(c.p_holm for c in found.comparisons)
    assert holm == [pytest.approx(2 * statistics.mcnemar_exact(4, 1))] * 2 or max(holm) == 1
    assert summarise([*rows, *answers("a", A, "third")]).overall == {}


def test_rows_survive_their_records() -> None:
    rows = [
        *answers("a", A[:3]),
        *scores_of("b", "x", "i", 2, {"acc": 1.0, "acc_norm": 0.0}, {"k": "é"}),
    ]
    back = [score for batch in to_batches(rows) for score in from_batch(batch, "?")]
    assert back == rows


def test_json_names_units_and_is_plain() -> None:
    made = to_json(summarise([*answers("a", A), *answers("b", B)]))
    text = json.dumps(made, allow_nan=False)
    assert made["results"][0]["value_share"] == 0.7 and "ci_low_share" in made["results"][0]
    assert made["paired"][0]["difference_share"] == pytest.approx(-0.3)
    assert made["paired"][0]["regressed_items"] == ["i1", "i2", "i6", "i9"]
    assert "NaN" not in text


def test_page_holds_the_numbers_and_parses() -> None:
    rng = np.random.default_rng(0)
    rows = [
        row
        for model, rate in (("base & co", 0.4), ("tuned", 0.8), ("tuned-w4", 0.7))
        for task in ("sums", "<mc>")
        for row in answers(model, (rng.random(300) < rate).astype(int).tolist(), task)
    ]
    found = summarise(rows)
    made = report.render(found, rows, "Evaluation", [("seed", "0")])
    root = ElementTree.fromstring(made.partition("\n")[2])
    text = " ".join(root.itertext())
    for result in found.results:
        assert report.value_text(result) in text
    for pair in found.comparisons:
        assert f"{pair.paired.difference.value:+.4g}" in text
    assert "tuned says 0" in text and "right answer: 1" in text
    assert len(made.encode()) < 1_000_000 and "<script" not in made and "http://www" in made
    svg = "{http://www.w3.org/2000/svg}"
    assert len([r for r in root.iter(f"{svg}rect") if r.get("opacity")]) == 6
    table = report.terminal_table(found)
    assert all(f"{p.model_a} → {p.model_b}" in table for p in found.comparisons)


def test_samples_without_an_answer_are_counted_between_bounds() -> None:
    rows = [*answers("a", [1, 1, 1], "t"), *scores_of("a", "t", "i9", 0, {NO_ANSWER: 1.0})]
    rows += scores_of("a", "t", "i8", 0, {NO_VERDICT: 1.0})
    found = summarise(rows)
    result = found.result("a", "t")
    assert (result.items, result.no_answer, result.no_verdict) == (3, 1, 1)
    assert result.interval.value == 1.0 and result.bounds == (pytest.approx(0.6), 1.0)
    made = to_json(found)["results"][0]
    assert made["missing_as_wrong_share"] == pytest.approx(0.6)
    assert (made["items_without_answer"], made["items_without_verdict"]) == (1, 1)
    for text in (report.render(found, rows, "t"), report.terminal_table(found)):
        assert "0.6 – 1" in text
    assert "missing" not in report.terminal_table(summarise(answers("a", [1, 0])))


def test_bounds_of_points_need_the_maximum_of_what_is_missing() -> None:
    rows = [row for i in range(2) for row in scores_of("a", "t", f"i{i}", 0,
                                                       {"points": 1.0, MAXIMUM: 2.0})]  # fmt: skip
    known = [*rows, *scores_of("a", "t", "x", 0, {NO_ANSWER: 1.0, MAXIMUM: 3.0})]
    assert summarise(known).result("a", "t").bounds == (2.0, 5.0)
    unknown = summarise([*rows, *scores_of("a", "t", "x", 0, {NO_ANSWER: 1.0})])
    assert to_json(unknown)["results"][0]["missing_as_right_points"] is None
    assert "2 – ?" in report.terminal_table(unknown)


def test_capabilities_are_means_of_their_tasks() -> None:
    rows = [*answers("a", A, "x"), *answers("a", B, "y"), *answers("a", B, "z")]
    found = summarise(rows, capabilities={"x": "logic", "y": "logic", "z": "law"})
    assert found.capabilities["logic"]["a"].value == pytest.approx(0.55)
    assert found.capabilities["law"]["a"] == found.result("a", "z").interval
    for text in (report.render(found, rows, "t"), report.terminal_table(found)):
        assert "capability logic" in text and "0.55 [" in text
    assert {c["capability"] for c in to_json(found)["capabilities"]} == {"logic", "law"}
    assert summarise(rows).capabilities == {}


def test_means_of_shares_stay_within_zero_and_one() -> None:
    for value, end in ((0, "low"), (1, "high")):
        rows = [*answers("a", [value] * 3, "x"), *answers("a", [value] * 4, "y")]
        assert getattr(summarise(rows).overall["a"], end) == value


def test_items_of_a_cluster_are_not_independent() -> None:
    """As many right answers, all of a text alike: as sure as one item a text."""
    right = [1] * 8 + [0] * 8 + [1] * 8 + [1] * 8
    alone = summarise(answers("a", right)).result("a", "sums")
    together = [replace(row, cluster=f"text {number // 8}")
                for number, row in enumerate(answers("a", right))]  # fmt: skip
    both = [*together, *(replace(row, model="b", value=1 - row.value) for row in together)]
    made = summarise(both)
    result = made.result("a", "sums")
    assert result.items == alone.items == 32
    assert result.interval.half_width > 1.5 * alone.interval.half_width
    assert result.detectable > 1.5 * alone.detectable
    (pair,) = made.comparisons
    assert pair.paired.test == "student_t_clustered" and pair.paired.items == 32
    assert len(pair.worse) == 24 and len(pair.better) == 8
    back = [score for batch in to_batches(both) for score in from_batch(batch, "?")]
    assert back == both


def test_every_table_says_what_it_can_show() -> None:
    rows = [*answers("a", A * 10), *answers("b", B * 10)]
    found = summarise(rows)
    result, (pair,) = found.result("a", "sums"), found.comparisons
    made = to_json(found)
    assert made["results"][0]["detectable_share"] == result.detectable > 0.1
    assert made["paired"][0]["detectable_share"] == pair.paired.detectable < 0.3
    for text in (report.render(found, rows, "t"), report.terminal_table(found)):
        assert "detectable" in text and f"{result.detectable:.3g}" in text
        assert f"{pair.paired.detectable:.3g}" in text
