"""Lengths of answers: means, tails and quantiles against closed forms and random draws."""

import math
import random

import pytest

from sabia.core.errors import UsageError
from sabia.core.plan.serving.rollout import Lengths


def test_without_a_limit_the_longest_is_a_harmonic_number_of_means():
    for count in (1, 10, 1000):
        harmonic = sum(1 / i for i in range(1, count + 1))
        assert Lengths(500).longest_of(count) == pytest.approx(500 * harmonic, rel=1e-4)


@pytest.mark.parametrize(("mean", "limit"), [(1060, 4000), (3200, 3990)])
def test_cut_answers_keep_the_mean(mean, limit):
    lengths, rng = Lengths(mean, limit), random.Random(5)
    drawn = [min(limit, lengths.scale * -math.log(rng.random())) for _ in range(100_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.02)
    cut = sum(length == limit for length in drawn) / len(drawn)
    assert lengths.quantile(1 - cut) == pytest.approx(limit, rel=0.01)
    longest = [max(drawn[i : i + 20]) for i in range(0, len(drawn), 20)]
    assert lengths.longest_of(20) == pytest.approx(sum(longest) / len(longest), rel=0.02)


def test_strata_stand_for_all_answers():
    for lengths in (Lengths(800), Lengths(800, 1000), Lengths(800, 5000)):
        strata = lengths.strata(96)
        assert sum(strata) / 96 == pytest.approx(800)
        assert strata == sorted(strata)


@pytest.mark.parametrize("fields", [(0,), (100, 100), (200, 100)])
def test_impossible_lengths_are_refused(fields):
    with pytest.raises(UsageError, match="expected"):
        Lengths(*fields)
