"""Items that tell little or have a wrong key, next to counts and to SciPy's correlation."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from in_process import sabia

from sabia.core.bench.item_analysis import analyses
from sabia.core.bench.result_summary import tabulate
from sabia.core.bench.score_rows import Score, schema, to_batches
from sabia.core.shards.outputs import open_file


def drawn(seed: int, models: int = 16, items: int = 300, wrong: int = 6) -> list[Score]:
    """Answers of models of rising strength; the keys of the last `wrong` items are wrong."""
    draw, made = random.Random(seed), []
    for model in range(models):
        strength = 0.2 + 0.7 * model / models
        for item in range(items):
            hard = (item % 10) / 20
            right = item < 10 or (10 <= item < 300 and draw.random() < strength + 0.2 - hard)
            if item >= items - wrong:  # the better a model is, the less it says what the key says
                right = draw.random() < (0.9 if strength < 0.55 else 0.1)
            if item in (10, 11):
                right = False
            detail = {"question": f"question {item}", "answer": "x"}
            made.append(Score(f"m{model}", "t", f"i{item}", 0, "acc", float(right), detail))
    return made


def test_planted_wrong_keys_are_named_and_few_others() -> None:
    named = others = 0
    for seed in range(10):
        (made,) = analyses(tabulate(drawn(seed))[0])
        wrong = {f"i{number}" for number in range(294, 300)}
        suspects = {one.item for one in made.suspects}
        named += len(suspects & wrong)
        others += len(suspects - wrong)
        assert {f"i{number}" for number in range(10)} <= set(made.solved)
        assert {"i10", "i11"} <= set(made.failed)
        assert all(one.failed_by and one.solved_by for one in made.suspects)
    assert named >= 40 and others <= 6  # of 60, and of 2,900


def test_correlations_and_p_values_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    scores = drawn(3)
    (made,) = analyses(tabulate(scores)[0])
    right = np.array([score.value for score in scores]).reshape(16, 300)
    assert len(made.suspects) >= 3
    for one in made.suspects:
        column = int(one.item[1:])
        rest = right.sum(axis=1) - right[:, column]
        expected = stats.pearsonr(right[:, column], rest, alternative="less")
        assert one.correlation == pytest.approx(expected.statistic)
        assert one.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)


def test_items_without_relation_are_named_as_often_as_stated() -> None:
    draw, named, by_chance = np.random.default_rng(5), 0, 0.0
    for _ in range(10):
        scores = [
            Score(f"m{model}", "t", f"i{item}", 0, "exact_match", float(value))
            for model, row in enumerate(draw.random((12, 400)) < 0.5)
            for item, value in enumerate(row)
        ]
        (made,) = analyses(tabulate(scores)[0])
        named, by_chance = named + len(made.suspects), by_chance + made.by_chance
    assert by_chance == pytest.approx(40, abs=2) and 20 <= named <= 65


def test_few_models_or_other_items_say_nothing() -> None:
    scores = drawn(1, models=5)
    assert analyses(tabulate(scores)[0]) == []
    apart = [Score(f"m{n}", "t", f"of {n}", 0, "acc", 1.0) for n in range(8)]
    assert analyses(tabulate(apart)[0]) == []


def test_the_command_lists_them(tmp_path: Path) -> None:
    with open_file(str(tmp_path / "scores.parquet"), schema()) as writer:
        for batch in to_batches(drawn(2)):
            writer.write(batch)
    done = sabia("eval", tmp_path / "scores.parquet", "--json", "--report", tmp_path / "r.html")
    assert done.exit_code == 0
    assert "of 300 items 10 are solved by all 16 models" in done.output
    (made,) = json.loads(done.stdout)["items"]
    assert made["items"] == 300 and made["suspects"][0]["item"] in (tmp_path / "r.html").read_text()
