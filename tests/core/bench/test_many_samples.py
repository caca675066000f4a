"""Several samples of an item, next to every choice of k of n."""

import json
import math
import random
from itertools import combinations
from pathlib import Path

import pytest
from in_process import sabia

from sabia.core.bench.many_samples import all_pass, by_samples, majority, pass_at
from sabia.core.bench.score_rows import Score, schema, to_batches
from sabia.core.shards.outputs import open_file


def sample_rows(answers: dict[str, list[str | None]], right: str = "7", tokens: int = 5) -> list:
    return [
        Score("m", "t", item, number, "exact_match", float(answer == right),
              {"extracted": answer, "tokens": tokens})
        for item, given in answers.items()
        for number, answer in enumerate(given)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_pass_at_k_is_the_mean_over_all_choices(n: int) -> None:
    for c in range(n + 1):
        flags = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            chosen = list(combinations(flags, k))
            assert pass_at(n, c, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
            assert all_pass(n, c, k) == pytest.approx(sum(map(all, chosen)) / len(chosen))


def plain_majority(answers: list[str | None], right: str) -> float:
    votes = [answer for answer in answers if answer is not None]
    most = max((votes.count(answer) for answer in votes), default=0)
    winners = {answer for answer in votes if votes.count(answer) == most}
    return float(right in winners) / len(winners) if winners else 0.0


def test_majority_is_that_of_all_samples_and_the_mean_over_choices() -> None:
    draw = random.Random(1)
    for trial in range(200):
        answers = [draw.choice(["7", "8", "9", None]) for _ in range(draw.randint(1, 8))]
        right = [float(answer == "7") for answer in answers]
        assert majority(right, answers, len(answers)) == plain_majority(answers, "7")
        k = draw.randint(1, len(answers))
        chosen = [plain_majority(list(each), "7") for each in combinations(answers, k)]
        expected = sum(chosen) / len(chosen)
        assert abs(majority(right, answers, k, str(trial)) - expected) < 0.26  # 100 draws
    assert majority([1.0, 0.0], ["7", "8"], 2) == 0.5
    assert majority([0.0, 0.0], [None, None], 2) == 0.0


def test_rows_for_each_k_and_what_is_left_out() -> None:
    answers = {f"i{n}": ["7", "8", "7", "7", "9", "7"] for n in range(30)}
    answers["short"] = ["7"]
    got = by_samples(sample_rows(answers))
    assert [one.k for one in got] == [1, 2, 4, 6] and [one.items for one in got] == [31, 30, 30, 30]
    assert [one.tokens for one in got] == [5, 10, 20, 30]
    last = got[-1]
    values = {name: interval.value for name, interval in last.scores.items()}
    assert values == {"pass@k": 1.0, "pass^k": 0.0, "majority@k": 1.0}
    assert got[1].scores["pass@k"].value == pytest.approx(1 - 1 / math.comb(6, 2))
    assert by_samples(sample_rows({"i": ["7"], "j": ["8"]})) == []
    without = [Score("m", "t", "i", n, "exact_match", 1.0) for n in range(3)]
    (one, *_) = by_samples(without)
    assert "majority@k" not in one.scores and math.isnan(one.tokens)


def test_the_command_shows_them(tmp_path: Path) -> None:
    draw = random.Random(2)
    answers = {f"i{n}": [draw.choice("789") for _ in range(8)] for n in range(50)}
    with open_file(str(tmp_path / "scores.parquet"), schema()) as writer:
        for batch in to_batches(sample_rows(answers)):
            writer.write(batch)
    done = sabia("eval", tmp_path / "scores.parquet", "--json", "--report", tmp_path / "r.html")
    assert done.exit_code == 0 and "majority@k" in done.output
    made = json.loads(done.stdout)["samples"]
    assert [row["k"] for row in made] == [1, 2, 4, 8] and made[3]["tokens_per_item"] == 40
    given = list(answers.values())
    any_right = sum("7" in each for each in given) / 50
    assert made[3]["pass_at_k_value_share"] == pytest.approx(any_right)
    assert made[0]["pass_at_k_value_share"] == made[0]["pass_hat_k_value_share"]
    votes = sum(plain_majority(list(each), "7") for each in given) / 50
    assert made[3]["majority_at_k_value_share"] == pytest.approx(votes)
    assert "Several samples an item" in (tmp_path / "r.html").read_text()
