"""Signs of rewards that follow length, format or family: planted, absent, and in small samples."""

import itertools
import math
import random

import numpy as np
import pytest

from sabia.core.judge.reward_checks import (
    MIN_Z,
    WINDOW,
    RankSums,
    RewardChecks,
    Traits,
    families,
    format_share,
    same_family,
)


def test_the_sums_are_those_of_all_permutations() -> None:
    """S of the ranks, and its mean and variance over every assignment of rewards, with ties."""
    rng = random.Random(0)
    for _ in range(20):
        n = rng.randrange(3, 7)
        values = [float(rng.randrange(4)) for _ in range(n)]
        rewards = [float(rng.randrange(3)) for _ in range(n)]

        def ranks(numbers: list[float]) -> list[float]:
            order = [
                sum(o < x for o in numbers) + sum(o == x for o in numbers) / 2 for x in numbers
            ]
            return [x - sum(order) / len(order) for x in order]

        x, y = ranks(values), ranks(rewards)
        made = RankSums.of(values, np.array(rewards))
        if not any(x) or not any(y):
            assert made == RankSums()
            continue
        every = [sum(a * b for a, b in zip(x, p, strict=True)) for p in itertools.permutations(y)]
        assert made.product == pytest.approx(sum(a * b for a, b in zip(x, y, strict=True)))
        assert sum(every) / len(every) == pytest.approx(0, abs=1e-9)
        assert made.variance == pytest.approx(sum(s * s for s in every) / len(every))


def groups(rng: np.random.Generator, prompts: int, size: int, slope: float):
    """Texts whose length adds `slope` standard deviations to the reward; prompts differ a lot."""
    made = []
    for _ in range(prompts):
        lengths = rng.integers(10, 200, size)
        reward = slope * (lengths - lengths.mean()) / lengths.std() + rng.normal(size=size)
        reward += 50 * rng.normal() + lengths.mean()  # differences of prompts do not count
        made.append((["x" * n for n in lengths.tolist()], reward))
    return made


def test_planted_length_warns_and_its_absence_or_few_samples_do_not() -> None:
    rng = np.random.default_rng(0)
    planted = Traits.of(groups(rng, 32, 8, 1.0))
    assert planted.follows["length"].sure and planted.follows["length"].correlation > 0.5
    assert Traits.of(groups(rng, 32, 8, -1.0)).follows["length"].correlation < -0.5
    assert "rewards follow the length" in planted.warnings("here")["length"]
    for _ in range(200):
        assert not Traits.of(groups(rng, 32, 8, 0.0)).warnings("here")
    # one prompt of perfect order: z = √(n - 1)
    few = RankSums.of(range(8), np.arange(8.0))
    assert (
        few.correlation == pytest.approx(1)
        and few.z == pytest.approx(math.sqrt(7))
        and not few.sure
    )
    assert math.sqrt(7) < MIN_Z
    assert RankSums.of([1, 2, 3], np.array([0, np.nan, 1])) == RankSums()
    # missing rewards are left out
    whole = RankSums.of([1, 2, 3, 4], np.array([0.0, 1, 1, 2]))
    assert RankSums.of([1, 9, 2, 3, 4], np.array([0.0, np.nan, 1, 1, 2])) == whole


def test_sums_can_be_added() -> None:
    rng = np.random.default_rng(1)
    parts = groups(rng, 10, 6, 0.3)
    together = Traits.of(parts).numbers
    apart = np.sum([Traits.of([part]).numbers for part in parts], axis=0)
    assert len(together) == len(Traits.of(()).numbers) and together == pytest.approx(apart.tolist())
    assert Traits.from_numbers(together).numbers == together


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("", 0.0),
        ("plain words\n\nand * more - of 3.5 them", 0.0),
        ("# Title\ntext\n- one\n* two\n+ three\n1. four\n2) five", 6 / 7),
        ("a **bold** word\n__bold__ too\n2 * 3 * 4\n**", 0.5),
        ("   ## indented\n    1) list", 1.0),
        ("#hashtag\n-dash", 0.0),
    ],
)
def test_format(text: str, share: float) -> None:
    assert format_share(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("runs/Qwen3-1.7B", "Qwen/Qwen2.5-72B-Instruct", True),
        ("Qwen3-4B/final", "qwq-32b", True),
        ("deepseek-r1-distill-llama-8b", "Meta-Llama-3.1-70B", True),
        ("Mixtral-8x7B", "mistral-large", True),
        ("run/final", "run", True),
        ("run/final", "other", False),
        ("sabiá-3", "sabia-2-small", True),
        ("olmo-2", "gpt-4o", False),
        ("graphite", "phi-4", False),
        ("judge", "m", False),
    ],
)
def test_families(one: str, two: str, same: bool) -> None:
    assert bool(same_family(one, ["nothing-like-it", two])) is same
    assert families(one) and bool(families(one) & families(two)) is same


def test_each_kind_of_warning_comes_once_also_after_a_restart() -> None:
    rng = np.random.default_rng(2)
    checks, lines = RewardChecks(), []
    for step in range(6):
        texts = groups(rng, 8, 8, 2.0)
        if step == 4:
            texts[0][0][0] = '{"verdicts": [{"item": "a", "met": true}]}'
        row = checks.add(Traits.of(texts).numbers)
        assert row["break_outs"] == (step == 4) and row["reward_length"] > 0.5
        assert set(row) == {"reward_length", "reward_format", "format", "break_outs"}
        lines.append(checks.warnings() + checks.family("Qwen3-8B", ["gpt-4", "Qwen3-32B"]))
        checks = RewardChecks(list(checks.window), set(checks.warned))
    assert [len(line) for line in lines] == [2, 0, 0, 0, 1, 0]
    assert "judge Qwen3-32B is of the family of Qwen3-8B" in lines[0][1]
    assert "1 of 320 answers hold" in lines[4][0]
    for _ in range(WINDOW):
        checks.add(Traits.of(groups(rng, 8, 8, 0.0)).numbers)
    assert len(checks.window) == WINDOW
