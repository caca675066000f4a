"""Data order: permutations are permutations, mixes keep their weights, nothing depends on state."""

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.shards.order import (
    PERIOD,
    DataOrder,
    Interleave,
    Permutation,
    Stage,
    parse_weights,
)


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097, 65537])
def test_permutation_hits_every_row_once(size: int) -> None:
    found = Permutation(size, 7)(np.arange(size))
    assert np.array_equal(np.sort(found), np.arange(size))


def test_permutation_is_evaluated_anywhere() -> None:
    whole = Permutation(1000, 3)(np.arange(1000))
    assert np.array_equal(Permutation(1000, 3)(np.array([999, 0, 500])), whole[[999, 0, 500]])


def test_permutation_of_a_huge_range() -> None:
    found = Permutation(10**15 + 7, 1)(np.arange(1000))
    assert len(np.unique(found)) == 1000
    assert found.max() > 9 * 10**14
    assert found.min() < 10**14


def test_permutation_looks_random() -> None:
    """Neither neighbours nor halves are related: both statistics within 5 standard errors."""
    size = 20_000
    found = Permutation(size, 11)(np.arange(size)) / size
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / np.sqrt(size)
    assert abs(found[: size // 2].mean() - 0.5) < 5 * np.sqrt(1 / 12 / (size / 2))


def test_keys_and_epochs_give_other_orders() -> None:
    order = DataOrder((500,), seed=1)
    epochs = [order.rows(500 * e, 500) for e in range(3)]
    for rows in epochs:
        assert np.array_equal(np.sort(rows), np.arange(500))
    for a, b in ((epochs[0], epochs[1]), (epochs[1], epochs[2])):
        assert (a == b).mean() < 0.05
    assert (DataOrder((500,), seed=2).rows(0, 500) == epochs[0]).mean() < 0.05


def test_order_never_changes_between_versions() -> None:
    """A resumed run may be of another version: these numbers are part of the format."""
    assert DataOrder((1000,), seed=0).rows(0, 6).tolist() == GOLDEN_PLAIN
    assert DataOrder((10, 1000), 5, (1.0, 3.0)).rows(70_000, 6).tolist() == GOLDEN_MIXED


GOLDEN_PLAIN = [553, 564, 791, 193, 551, 752]
GOLDEN_MIXED = [360, 4, 250, 566, 615, 7]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_processes_reads_the_same_rows(ranks: int) -> None:
    order, batch = DataOrder((100, 37), 3, (2.0, 1.0)), 8
    whole = order.rows(0, 40 * batch)
    parts = [
        np.concatenate([order.rows(step * batch, batch)[rank::ranks] for step in range(40)])
        for rank in range(ranks)
    ]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(whole))


def test_interleave_keeps_weights_in_every_prefix() -> None:
    weights = (5.0, 3.0, 1.5, 0.5)
    source, _ = Interleave(weights).at(np.arange(5_000))
    for end in (1, 7, 100, 999, 5_000):
        counts = np.bincount(source[:end], minlength=4)
        assert np.abs(counts - end * np.array(weights) / 10).max() <= len(weights) / 2 + 1


def test_interleave_positions_count_up_across_periods() -> None:
    index = np.arange(PERIOD - 50, PERIOD + 50)
    source, position = Interleave((1.0, 2.0)).at(index)
    for number in (0, 1):
        assert (np.diff(position[source == number]) == 1).all()


def test_mix_reads_each_source_in_whole_epochs() -> None:
    order = DataOrder((10, 40), 9, (1.0, 1.0))
    rows = order.rows(0, 80)
    small = rows[rows < 10]
    assert len(small) == 40
    for epoch in range(4):
        assert np.array_equal(np.sort(small[10 * epoch : 10 * epoch + 10]), np.arange(10))
    assert np.array_equal(np.sort(rows[rows >= 10]), np.arange(10, 50))
    assert order.epochs(80) == [4.0, 1.0]


def test_epochs_count_over_many_periods() -> None:
    order = DataOrder((10, 40), 9, (1.0, 3.0))
    assert order.epochs(4 * PERIOD) == [PERIOD / 10, 3 * PERIOD / 40]


def test_weights_from_text() -> None:
    assert parse_weights("b=1,a=2.5", ["a", "b", "c"]) == (2.5, 1.0, 0.0)
    assert parse_weights("", ["a"]) is None
    with pytest.raises(UsageError, match="no rows of source 'x'"):
        parse_weights("x=1", ["a"])
    with pytest.raises(UsageError, match="SOURCE=WEIGHT"):
        parse_weights("a=much", ["a"])


def test_refusals() -> None:
    with pytest.raises(UsageError, match="no rows"):
        DataOrder((0,))
    with pytest.raises(UsageError, match="has a weight but no rows"):
        DataOrder((0, 3), 0, (1.0, 1.0))
    with pytest.raises(UsageError, match="expected 0 or more"):
        DataOrder((3, 3), 0, (-1.0, 1.0)).rows(0, 1)


def test_stages_change_the_mix_and_sources_go_on() -> None:
    """Each stage keeps its weights, and no row comes again before its source is through."""
    order = DataOrder((500, 300), 5, (1.0, 1.0), (Stage(200, (3.0, 1.0)), Stage(400, (0.0, 1.0))))
    rows = order.rows(0, 500)
    pieces = [order.rows(start, 50) for start in range(0, 500, 50)]
    assert np.array_equal(rows, np.concatenate(pieces))
    books = rows >= 500
    assert [int(books[a:b].sum()) for a, b in ((0, 200), (200, 400), (400, 500))] == [100, 50, 100]
    assert len(np.unique(rows[~books])) == 250  # of 500 rows, none twice
    assert len(np.unique(rows[books])) == 250
    assert order.epochs(500) == [250 / 500, 250 / 300]
    assert np.array_equal(rows[:200], DataOrder((500, 300), 5, (1.0, 1.0)).rows(0, 200))


@pytest.mark.parametrize(
    ("weights", "stages", "said"),
    [
        (None, (Stage(5, (1.0, 0.0)),), "need a mix"),
        ((1.0, 1.0), (Stage(5, (1.0, 0.0)), Stage(5, (0.0, 1.0))), "ascending"),
        ((1.0, 1.0), (Stage(0, (1.0, 0.0)),), "above 0"),
        ((1.0, 1.0), (Stage(5, (1.0,)),), "1 for 2 sources"),
    ],
)
def test_stages_that_make_no_sense(weights: tuple, stages: tuple, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DataOrder((9, 9), 0, weights, stages)


def test_repeats_are_limited_and_the_rest_goes_to_other_sources() -> None:
    order = DataOrder((100, 1000, 50), 1, (1, 1, 1), (Stage(300, (0, 1, 1)),))
    assert order.epochs(600) == [1.0, 0.25, 5.0]
    limited = order.within(2, 600)
    assert limited.epochs(600)[2] == 2.0 and sum(limited.weights) == 300
    assert limited.stages[0].weights[2] == 60  # the scarce source is kept for the later stage too
    rows = limited.rows(0, 600)
    assert len(np.unique(rows[rows >= 1100])) == 50 and (rows >= 1100).sum() == 100
    assert order.within(9, 600).epochs(600) == order.epochs(600)


def test_more_than_the_repeats_give_is_refused() -> None:
    with pytest.raises(UsageError, match="1,150 rows"):
        DataOrder((100, 1000, 50), 1, (1, 1, 1)).within(1, 1200)
    with pytest.raises(UsageError, match="2,000 rows"):
        DataOrder((600, 400)).within(2, 2001)
    assert DataOrder((600, 400)).within(2, 2000) == DataOrder((600, 400))


def test_random_limits_hold() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        sizes = tuple(rng.integers(1, 300, 4).tolist())
        mixes = [tuple(rng.dirichlet(np.ones(4))) for _ in range(3)]
        count = int(rng.integers(200, 700))
        stages = tuple(Stage(s, m) for s, m in zip((60, 130), mixes[1:], strict=True))
        order, repeats = DataOrder(sizes, 3, mixes[0], stages), float(rng.uniform(1, 4))
        room = sum(int(repeats * size) for size in sizes)
        if room < count:
            with pytest.raises(UsageError):
                order.within(repeats, count)
            continue
        read = np.array(order.within(repeats, count).epochs(count)) * sizes
        assert (read <= repeats * np.array(sizes) + 2).all() and round(read.sum()) == count


@pytest.mark.parametrize("seed", range(30))
def test_the_samples_that_read_a_row_are_those_of_the_order(seed: int) -> None:
    draw = np.random.default_rng(seed)
    large = seed % 5 == 0  # several periods of the interleave
    sizes = tuple(draw.integers(1, 60_000 if large else 400, int(draw.integers(1, 5))).tolist())
    weights, stages = None, ()
    if seed % 3:
        weights = tuple(float(w) for w in draw.random(len(sizes)) + 0.01)
    if seed % 3 == 2:
        starts = sorted({int(n) for n in draw.integers(1, 200_000 if large else 3_000, 3)})
        stages = tuple(Stage(n, tuple(draw.random(len(sizes)).tolist())) for n in starts)
    order = DataOrder(sizes, seed, weights, stages)
    count = int(draw.integers(1, 300_000 if large else 4_000))
    read = order.rows(0, count)
    wanted = draw.choice(sum(sizes), min(7, sum(sizes)), replace=False)
    which, samples = order.samples(wanted, count)
    expected = np.flatnonzero(np.isin(read, wanted))
    assert np.array_equal(samples, expected)
    assert np.array_equal(wanted[which], read[expected])
