"""The options of the spike guard: which steps are compared, when a run fails; pipeline parts."""

from types import SimpleNamespace

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.options.sft import SftOptions
from sabia.core.recipes.training_config import guard_config, identity
from sabia.core.train.guards import NO_LIMITS, SpikeGuard

GIVEN = {"spike_window": 5, "spike_min_steps": 3, "row_sigmas": 4.0, "max_rewinds": 2,
         "max_skipped": 0.25}  # fmt: skip


def test_options_are_the_configuration() -> None:
    config = guard_config(SftOptions(model="m", **GIVEN))
    assert (config.window, config.min_steps, config.row_sigmas) == (5, 3, 4.0)
    assert (config.rewinds, config.max_skipped_share) == (2, 0.25)
    plain = guard_config(SftOptions(model="m"))
    assert (plain.window, plain.min_steps, plain.row_sigmas) == (64, 32, 8.0)
    assert (plain.rewinds, plain.max_skipped_share) == (8, 0.1)


def test_they_are_part_of_a_run_where_they_are_not_the_defaults() -> None:
    assert GIVEN.items() <= identity(SftOptions(model="m", **GIVEN)).items()
    assert not GIVEN.keys() & identity(SftOptions(model="m", max_rewinds=8)).keys()


def test_limits_are_of_the_steps_in_the_window() -> None:
    guard = SpikeGuard(guard_config(SftOptions(model="m", spike_sigmas=6.0, **GIVEN)))
    losses = np.random.default_rng(0).uniform(1, 3, 9)
    for count, loss in enumerate(losses):
        if count < 3:
            assert guard.limits() == NO_LIMITS
        else:
            last = losses[max(0, count - 5) : count]
            spread = 1.4826 * np.median(np.abs(last - np.median(last)))
            expected = np.median(last) + 6 * max(spread, 0.02 * np.median(last))
            assert guard.limits()[0] == pytest.approx(expected, rel=1e-12)
        guard.accept(loss, 1.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"spike_window": 8}, "--spike-window: 8 .expected at least --spike-min-steps, 32"),
        ({"on_spike": "off", "spike_window": 99}, "--spike-window: only with --on-spike rewind or"),
        ({"on_spike": "stop", "max_rewinds": 3}, "--max-rewinds: only with --on-spike rewind"),
        ({"on_spike": "stop", "max_skipped": 0.3}, "--max-skipped: only with --on-spike rewind"),
        ({"on_spike": "off", "row_sigmas": 3.0}, "--row-sigmas: only with --on-spike rewind"),
        ({"stage_micro_batches": 2, "micro_batch": 4}, "--stage-micro-batches: not together with"),
    ],
)
def test_options_that_do_not_apply(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SftOptions(model="m", **given)


@pytest.mark.parametrize(("count", "expected"), [(1, 2), (4, 8), (3, 6), (16, 24)])
def test_micro_batches_of_pipeline_stages(count: int, expected: int) -> None:
    torch = pytest.importorskip("torch")
    from sabia.core.parallel.mesh import Mesh
    from sabia.core.train.stepper_torch import TorchStepper

    rows = np.arange(24 * 4).reshape(24, 4)
    stepper = SimpleNamespace(
        mesh=Mesh(pipe=2), micro_batch=0, setup=SimpleNamespace(stage_micro_batches=count),
        _pipeline=object(), _whole_rows="a pipeline", device=torch.device("cpu"),
        _own_tokens=lambda name, array, _: array,
    )  # fmt: skip
    parts = TorchStepper._micro_batches(stepper, {"input_ids": rows})
    assert len(parts) == expected
    assert np.array_equal(np.concatenate([part["input_ids"] for part in parts]), rows)
