"""When to save: golden values of Young's formula, and what overrides it."""

import pytest

from sabia.core.errors import UsageError
from sabia.core.save_interval import best_interval_s
from sabia.core.train.checkpoint.saver import (
    FIRST_SAVE_S,
    Interval,
    default_mtbf_s,
    parse_interval,
)

HOUR = 3600.0


@pytest.mark.parametrize(
    ("blocking", "upload", "mtbf", "wanted"),
    [
        (30.0, 0.0, 8 * HOUR, 1314.5),  # 21.9 minutes
        (30.0, 156.0, 8 * HOUR, 1314.5),  # 25.6 TB from 64 hosts at 2.56 GB/s each
        (30.0, 1800.0, 8 * HOUR, 1800.0),  # never before the upload is through
        (0.0, 10.0, 8 * HOUR, 10.0),
    ],
)
def test_best_interval(blocking: float, upload: float, mtbf: float, wanted: float) -> None:
    assert best_interval_s(blocking, upload, mtbf) == pytest.approx(wanted, abs=0.1)


def test_formula_is_the_best_there_is() -> None:
    """Time lost a second, blocking / T + T / (2 MTBF), is least at T."""
    blocking, mtbf = 30.0, 8 * HOUR
    best = best_interval_s(blocking, 0.0, mtbf)

    def lost(interval: float) -> float:
        return blocking / interval + interval / (2 * mtbf)

    assert all(lost(best) <= lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


def test_expected_failures_by_size() -> None:
    assert default_mtbf_s(16384) == pytest.approx(54 * 24 * HOUR / 419)
    assert default_mtbf_s(1024) / HOUR == pytest.approx(49.5, abs=0.1)
    assert default_mtbf_s(1) == 7 * 24 * HOUR


def test_by_steps_and_by_time() -> None:
    assert [s for s in range(1, 10) if Interval(steps=3).due(s, 1e9)] == [3, 6, 9]
    assert not Interval(seconds=600).due(3, 599.0)
    assert Interval(seconds=600).due(3, 600.0, 1.0, 1e9)
    assert not Interval().due(3, 1e9)


def test_auto_measures_first() -> None:
    auto = parse_interval("auto", 8 * HOUR)
    assert not auto.due(1, FIRST_SAVE_S - 1)
    assert auto.due(1, FIRST_SAVE_S)
    assert auto.wanted_s(30.0) == pytest.approx(1314.5, abs=0.1)
    assert not auto.due(5, 1300.0, 30.0)
    assert auto.due(5, 1315.0, 30.0)
    assert not auto.due(5, 1315.0, 30.0, 1300.0)  # an upload under way for 1,300 s


def test_auto_without_mtbf_goes_by_devices() -> None:
    many, few = (parse_interval("auto", devices=n).wanted_s(30.0) for n in (16384, 8))
    assert many == pytest.approx((2 * 30 * default_mtbf_s(16384)) ** 0.5)
    assert few > 7 * many


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("500", Interval(steps=500)), ("10m", Interval(seconds=600.0)), ("0", Interval())],
)
def test_parse(text: str, wanted: Interval) -> None:
    assert parse_interval(text) == wanted


def test_parse_refuses() -> None:
    with pytest.raises(UsageError, match="--save-every"):
        parse_interval("often")
