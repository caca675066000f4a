"""Schedules at golden values, and against optax's cosine."""

import pytest

from sabia.core.errors import UsageError
from sabia.core.options.training import Schedule
from sabia.core.train.optimizer.config import TAILS, ScheduleConfig, decay_start, learning_rate


def schedule(peak: float, steps: int, **settings) -> ScheduleConfig:
    usual = {"warmup": 0, "kind": "wsd", "decay": 0, "tail": "linear", "final": 0.0}
    return ScheduleConfig(peak, steps, **(usual | settings))


WSD = schedule(peak=1.0, steps=1000, warmup=100, decay=200)


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.01), (50, 0.51), (99, 1.0), (100, 1.0), (500, 1.0), (800, 1.0), (900, 0.5),
     (999, 0.005), (1000, 0.0), (1001, 0.0)],
)  # fmt: skip
def test_wsd_golden_values(step: int, rate: float) -> None:
    assert learning_rate(step, WSD) == pytest.approx(rate, abs=1e-12)


def test_no_update_is_wasted() -> None:
    rates = [learning_rate(step, WSD) for step in range(1000)]
    assert min(rates) > 0


def test_square_root_tail() -> None:
    config = schedule(1.0, 1000, warmup=100, decay=200, tail="1-sqrt")
    assert learning_rate(800, config) == 1.0
    assert learning_rate(850, config) == pytest.approx(0.5)
    assert learning_rate(1000, config) == 0.0


@pytest.mark.parametrize(
    ("tail", "quarter", "half", "three_quarters", "last"),
    [
        ("linear", 0.75, 0.5, 0.25, 0.005),
        ("exponential", 0.681792830507429, 0.414213562373095, 0.189207115002721, 0.00347174),
        ("cosine", 0.853553390593274, 0.5, 0.146446609406726, 0.0000616838),
        ("1-sqrt", 0.5, 0.292893218813453, 0.133974596215561, 0.00250313),
    ],
)
def test_tails_golden_values(tail, quarter, half, three_quarters, last) -> None:
    config = schedule(1.0, 1000, warmup=100, decay=200, tail=tail)
    found = [learning_rate(step, config) for step in (800, 850, 900, 950, 999, 1000, 2000)]
    assert found == pytest.approx([1.0, quarter, half, three_quarters, last, 0.0, 0.0], abs=1e-8)
    floor = schedule(1.0, 1000, warmup=100, decay=200, tail=tail, final=0.1)
    assert learning_rate(900, floor) == pytest.approx(0.1 + 0.9 * half)


def test_where_the_decay_starts() -> None:
    assert decay_start(WSD) == 800
    assert learning_rate(800, WSD) == 1.0 > learning_rate(801, WSD)
    assert decay_start(schedule(1.0, 500, warmup=50, kind="cosine")) == 50
    assert decay_start(schedule(1.0, 500, warmup=50, kind="constant", decay=100)) == 500
    assert decay_start(schedule(1.0, 500, warmup=50)) == 500


def test_final_share_and_peak() -> None:
    config = schedule(4e-4, 1000, decay=200, final=0.1)
    assert learning_rate(0, config) == pytest.approx(4e-4)
    assert learning_rate(900, config) == pytest.approx(4e-4 * 0.55)
    assert learning_rate(1000, config) == pytest.approx(4e-5)


def test_cosine_is_optax_cosine_after_warmup() -> None:
    optax = pytest.importorskip("optax", reason="optax is the reference")
    config = schedule(2.0, 500, warmup=50, kind="cosine", final=0.1)
    reference = optax.cosine_decay_schedule(2.0, 450, alpha=0.1)
    for step in (50, 51, 200, 499, 500):
        assert learning_rate(step, config) == pytest.approx(float(reference(step - 50)), rel=1e-6)
    assert learning_rate(275, config) == pytest.approx(2 * (0.1 + 0.9 * 0.5))


def test_constant() -> None:
    config = schedule(1.0, 10, warmup=2, kind="constant")
    assert [learning_rate(step, config) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_phases_longer_than_the_run_are_refused() -> None:
    assert schedule(1.0, 100, warmup=90, decay=20, kind="constant")
    with pytest.raises(UsageError, match="--warmup: 90 steps"):
        schedule(1.0, 100, warmup=90, decay=20)


def test_the_options_have_all_tails() -> None:
    assert Schedule.table["decay_shape"].choices == tuple(TAILS)
