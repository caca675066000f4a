"""LSH: the optimum by another integration, candidates and components against brute force."""

import random

import numpy as np
import pytest

from sabia.core.text.dedup import lsh


def optimum(threshold: float, permutations: int, miss_weight: float) -> tuple[int, int]:
    """(bands, rows) of least weighted error, its areas by the trapezoid rule."""
    below, above = np.linspace(0, threshold, 1001), np.linspace(threshold, 1, 1001)
    best = (np.inf, 1, 1)
    for bands in range(1, permutations + 1):
        for rows in range(1, permutations // bands + 1):
            false = np.trapezoid(lsh.hit_probability(below, bands, rows), below)
            missed = np.trapezoid(1 - lsh.hit_probability(above, bands, rows), above)
            error = float((1 - miss_weight) * false + miss_weight * missed)
            best = min(best, (error, bands, rows))
    return best[1], best[2]


@pytest.mark.parametrize("weight", [lsh.MISS_WEIGHT_VERIFIED, lsh.MISS_WEIGHT_UNVERIFIED])
@pytest.mark.parametrize("permutations", [1, 2, 16, 64, 128, 256])
def test_bands_are_of_least_error(permutations: int, weight: float) -> None:
    for threshold in (0.05, 0.3, 0.5, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1.0):
        expected = optimum(threshold, permutations, weight)
        assert lsh.choose_bands(threshold, permutations, weight) == expected


def test_missing_weighs_towards_recall() -> None:
    for threshold in (0.6, 0.7, 0.8, 0.9):
        bands, rows = lsh.choose_bands(threshold, 128, lsh.MISS_WEIGHT_VERIFIED)
        assert bands * rows <= 128
        assert lsh.hit_probability(threshold, bands, rows) > 0.85
    assert lsh.choose_bands(0.8, 128, lsh.MISS_WEIGHT_VERIFIED) == (16, 8)


def test_hit_probability_is_what_happens() -> None:
    """Simulated signatures of a known similarity share a band as often as the formula says."""
    source = np.random.default_rng(2)
    for similarity in (0.5, 0.7, 0.85):
        equal = source.random((4000, 16, 8)) < similarity
        seen = equal.all(axis=2).any(axis=1).mean()
        assert seen == pytest.approx(float(lsh.hit_probability(similarity, 16, 8)), abs=0.03)


def brute_pairs(rows: list[int], digests: list[int], window: int) -> list[tuple[int, int]]:
    buckets: dict[int, list[int]] = {}
    for row, digest in zip(rows, digests, strict=True):
        buckets.setdefault(digest, []).append(row)
    return sorted(
        (first, other)
        for bucket in buckets.values()
        for i, first in enumerate(bucket)
        for other in bucket[i + 1 : i + 1 + window]
    )


@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("spread", [1, 1 << 40, 0x9E3779B97F4A7C15], ids=["low", "high", "all"])
def test_candidates_equal_brute_force(window: int, spread: int) -> None:
    """Digests that differ in their low bits only, in their high bits only, and anywhere."""
    source = np.random.default_rng(window)
    for n in (0, 1, 2, 40, 300):
        few = source.integers(0, max(n // 3, 1), n).astype(np.uint64)
        digests = few * np.uint64(spread)
        rows = np.flatnonzero(source.random(3 * n) < 0.5)[:n]
        digests = digests[: len(rows)]
        got = lsh.bucket_pairs(rows, digests, window)
        assert got.shape == (len(got), 2)
        expected = brute_pairs(rows.tolist(), digests.tolist(), window)
        assert [tuple(pair) for pair in got.tolist()] == expected


def test_a_huge_bucket_gives_few_pairs_and_one_component() -> None:
    n = 20_000
    pairs = lsh.bucket_pairs(np.arange(n), np.zeros(n, np.uint64))
    assert len(pairs) < lsh.WINDOW * n
    assert not lsh.join(np.arange(n), pairs).any()


def brute_components(count: int, pairs: list[tuple[int, int]]) -> list[int]:
    label = list(range(count))
    for a, b in pairs:
        low, high = sorted((label[a], label[b]))
        label = [low if x == high else x for x in label]
    return label


def test_components_equal_brute_force() -> None:
    source = random.Random(8)
    for _ in range(200):
        n = source.randrange(1, 40)
        pairs = [(source.randrange(n), source.randrange(n)) for _ in range(source.randrange(2 * n))]
        got = lsh.join(np.arange(n), np.array(pairs, np.int64).reshape(-1, 2))
        assert got.tolist() == brute_components(n, pairs)


@pytest.mark.parametrize("order", ["up", "down", "shuffled", "star"])
def test_long_chains_become_one_component(order: str) -> None:
    n = 50_000
    chain = np.stack((np.arange(n - 1), np.arange(1, n)), axis=1)
    if order == "down":
        chain = chain[::-1, ::-1]
    elif order == "shuffled":
        names = np.random.default_rng(0).permutation(n)
        chain = names[chain]
    elif order == "star":
        chain[:, 0] = n - 1
        chain = chain[:-1]
        chain = np.concatenate((chain, [[0, n - 1]]))
    assert not lsh.join(np.arange(n), chain).any()


@pytest.mark.slow
def test_planted_pairs_are_found_as_often_as_the_curve_says() -> None:
    """Whole sketches of documents of a known exact similarity, by bins of it."""
    from sabia.kernels.minhash.definitions import SketchConfig
    from sabia.kernels.minhash.interface import jaccard, sketch

    source, config = random.Random(5), SketchConfig(5, *lsh.choose_bands(0.7, 128, 0.95))
    texts: list[str] = []
    for _ in range(6000):
        words = [f"w{source.randrange(10**6)}" for _ in range(200)]
        other = list(words)
        for _ in range(source.randrange(1, 19)):
            other[source.randrange(len(other))] = f"x{source.randrange(10**6)}"
        texts += [" ".join(words), " ".join(other)]
    raw = [text.encode() for text in texts]
    offsets = np.concatenate(([0], np.cumsum([len(r) for r in raw]))).astype(np.int64)
    data = np.frombuffer(b"".join(raw), np.uint8)
    made = sketch(data, offsets, config, "numba")
    starts = np.concatenate(([0], np.cumsum(made.counts)))
    pairs = np.arange(len(texts)).reshape(-1, 2)
    truth = jaccard(made.shingles, starts, pairs, "numba")
    found = (made.digests[0::2] == made.digests[1::2]).any(axis=1)
    expected = lsh.hit_probability(truth, config.bands, config.rows)
    bins = np.digitize(truth, np.arange(0.4, 1.0, 0.1))
    seen = 0
    for each in np.unique(bins):
        inside = bins == each
        if inside.sum() >= 300:
            seen += 1
            assert abs(found[inside].mean() - expected[inside].mean()) < 0.03
    assert seen >= 4
