"""Graphs of decoding steps, with a graph that computes again in place of CUDA's: rows and slots
that are rounded up change no token, and new parameters are used."""

from typing import Any

import numpy as np
import pytest
import torch

from sabia.core.generate.runner import runner_torch
from sabia.core.generate.runner.graphs_torch import WARM_UP, StepGraphs, _Graph, rounded_up

from ..model.test_decoding_backends import VOCABULARY
from .test_speculation import engine_of, repetitive


class Replayed:
    """A graph on a CPU: it computes with what its inputs hold."""

    def __init__(self, run: Any, reads: int, *arrays: torch.Tensor) -> None:
        self.run, self.reads, self.arrays = run, reads, arrays

    def replay(self) -> None:
        ids, positions, logits = self.arrays
        logits.copy_(self.run(ids, positions, self.reads))


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The sizes of graphs, which runners on a CPU make too."""
    sizes = list[tuple[int, int]]()

    class OnCpu(StepGraphs):
        def _captured(self, rows: int, reads: int) -> _Graph:
            sizes.append((rows, reads))
            ids, positions = (torch.zeros((rows, 1), dtype=torch.int64) for _ in range(2))
            logits = torch.empty(rows, VOCABULARY)
            graph: Any = Replayed(self._run, reads, ids, positions, logits)
            return _Graph(graph, ids, positions, logits)

    made = runner_torch.TorchRunner.__init__

    def create(self: Any, model: Any, capacity: int, context: int, *more: Any) -> None:
        made(self, model, capacity, context, *more)
        slots = min(context, self._cache.slots)
        self._graphs = OnCpu(self._one_each, self._device, capacity, slots)

    monkeypatch.setattr(runner_torch.TorchRunner, "__init__", create)
    return sizes


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3.5", "gpt-oss"])
def test_rounding_up_changes_no_token(name: str, captured: list[tuple[int, int]]) -> None:
    engine = engine_of(name, "torch", slots=9)
    asked = repetitive(7)
    found = engine.generate(asked)
    assert captured and len(set(captured)) == len(captured)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_torch.StepGraphs, "step", None, raising=False)
        patch.setattr(runner_torch.TorchRunner, "step", plain_step)
        expected = engine.generate(asked)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert np.abs(np.subtract(one.raw_logprobs, other.raw_logprobs)).max() <= 1e-5


def plain_step(self: Any, ids: Any, positions: Any, counts: Any = None, ahead: bool = False) -> Any:
    return self._logits(self._step(ids, positions, counts, ahead).flatten(0, 1))


def test_new_parameters_are_used(captured: list[tuple[int, int]]) -> None:
    engine, other = engine_of("llama", "torch"), engine_of("llama", "torch", noise=0.5)
    runner = engine.runner(4, 64, engine.session(1, 16, 1).pages)
    given = np.ones((3, 1), np.int64), np.zeros((3, 1), np.int64)
    with torch.inference_mode():
        for _ in range(WARM_UP + 2):
            first = runner.step(*given)[:3]
        engine.params = other.params
        second = runner.step(*given)[:3]
        expected = other.runner(4, 64, other.session(1, 16, 1).pages).step(*given)[:3]
    assert captured == [(3, 64)]
    assert not torch.allclose(first, second) and torch.equal(second, expected)


def test_rounded_up() -> None:
    for count in range(1, 3000):
        found = rounded_up(count)
        assert count <= found <= max(count * 1.25, 1) and rounded_up(found) == found
    assert len({rounded_up(count) for count in range(1, 4097)}) <= 8 + 4 * 10
    assert rounded_up(3, 256) == 256


@pytest.mark.usefixtures("captured")
def test_what_cannot_be_captured_runs_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    engine, asked = engine_of("llama", "torch", slots=3), repetitive(4)
    expected = [one.tokens for one in engine.generate(asked)]
    capsys.readouterr()
    monkeypatch.setattr(StepGraphs.__subclasses__()[-1], "_captured", refuse)
    assert [one.tokens for one in engine.generate(asked)] == expected
    text = capsys.readouterr().err
    assert text.count("without CUDA graphs") == 1 and "when stream is capturing" in text
