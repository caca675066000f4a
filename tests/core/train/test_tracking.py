"""Services get the rows in order; a slow or failing one costs the run nothing."""

import threading
import time
from pathlib import Path

import pytest
from waiting import HANG_S

from sabia.core.errors import MissingBackend, UsageError
from sabia.core.train import tracking
from sabia.core.train.profiling import Profile, parse_steps
from sabia.core.train.tracking import Tracker, flattened, parse_services


class Sink:
    """Remembers what it gets; fails or waits where it is told to."""

    def __init__(self, fails: bool = False, gate: threading.Event | None = None) -> None:
        self.rows: list[tuple[int, dict]] = []
        self.fails, self.gate, self.closed = fails, gate, False

    def write(self, step: int, figures: dict) -> None:
        if self.gate:
            self.gate.wait(HANG_S)
        if self.fails:
            raise OSError("429 too many requests")
        self.rows.append((step, dict(figures)))

    def close(self) -> None:
        self.closed = True


def test_rows_arrive_flat_and_in_order() -> None:
    sink = Sink()
    tracker = Tracker([lambda: sink])
    for step in (1, 2, 3):
        tracker.write({"step": step, "loss": 2.0, "loss_by_source": {"web": 1.5}, "note": "x"})
    tracker.close()
    assert [step for step, _ in sink.rows] == [1, 2, 3] and sink.closed
    assert sink.rows[0][1] == {"loss": 2.0, "loss_by_source/web": 1.5}
    assert flattened({"a": {"b": {"c": 1}}, "flag": True}) == {"a/b/c": 1.0}


def test_a_slow_service_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "WAITING_ROWS", 5)
    gate = threading.Event()
    sink = Sink(gate=gate)
    tracker = Tracker([lambda: sink])
    for step in range(50):
        tracker.write({"step": step, "loss": 1.0})
    assert not sink.rows  # all are written while the service still takes the first
    gate.set()
    tracker.close()
    assert len(sink.rows) + tracker.not_sent == 50 and tracker.not_sent >= 40
    assert f"{tracker.not_sent} rows were not sent" in capsys.readouterr().err


def test_a_failing_service_is_told_of_once(capsys: pytest.CaptureFixture) -> None:
    sink = Sink(fails=True)
    tracker = Tracker([lambda: sink])
    for step in range(10):
        tracker.write({"step": step, "loss": 1.0})
        time.sleep(0.01)
    tracker.close()
    assert capsys.readouterr().err.count("429") == 1 and sink.closed


def test_names() -> None:
    assert parse_services("") == ()
    with pytest.raises(UsageError, match="mlflow"):
        parse_services("mlflow")
    missing = [name for name in tracking.SERVICES if tracking.find_spec(name) is None]
    for name in missing:
        with pytest.raises(MissingBackend, match="pip install"):
            parse_services(name)


@pytest.mark.parametrize("text", ["5", "5:", "0:3", "7:3", "a:b"])
def test_profile_steps_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="100:105"):
        parse_steps(text)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_trace_is_written(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    profile = Profile(parse_steps("2:3"), backend, tmp_path, 0)
    for step in (1, 2, 3, 4):
        profile.before(step)
        if backend == "torch":
            import torch

            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        else:
            import jax.numpy as jnp

            jnp.ones((8, 8)).sum().block_until_ready()
        profile.after(step)
        assert (tmp_path / "profile").exists() == (step > 1)
    found = [path for path in (tmp_path / "profile").rglob("*") if path.is_file()]
    assert found and all(path.stat().st_size for path in found)
    if backend == "torch":
        assert "aten::mm" in (tmp_path / "profile" / "operations-0000.txt").read_text()
