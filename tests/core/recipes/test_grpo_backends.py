"""`grpo --backend jax`: the run of torch, also after a stop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from digit_policy import write_policy

from sabia.core import stop
from sabia.core.errors import Interrupted
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Completion, Request
from sabia.core.judge.verdict import Grade
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo import policy_run
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.sample_batch import Group, arrays_of, of_few_shapes, training_samples
from sabia.core.shards.job import Job
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.train.telemetry import metrics_path, read_rows

pytest.importorskip("jax")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("backends")
    write_policy(place, 3)
    return place


def run(folder: Path, out: Path, backend: str = "jax", **changes: Any) -> list[dict[str, Any]]:
    values = {"reward": "regex", "steps": 4, "prompts": 3, "group": 5, "max_new_tokens": 3,
              "warmup": "1", "peak_flops": 1e12, "lr": 2e-3} | changes  # fmt: skip
    options = GrpoOptions(model=str(folder / "model"), **values)
    inputs = (str(folder / "prompts.jsonl"),)
    policy_run.run(Job("grpo", inputs=inputs, out=str(out), to="jsonl", backend=backend), options)
    return read_rows(metrics_path(out))


def greedy(folder: Path, out: Path) -> list[list[int]]:
    spec, params = hub.load_model(out / "final")
    tokenizer = load_tokenizer(folder / "model")
    requests = [Request(tokenizer.encode(text), 8, 0.0) for text in ("which", "0 1 2", "user")]
    return [one.tokens for one in Engine(spec, params, tokenizer).generate(requests)]


CASES: list[dict[str, Any]] = [
    {},
    {"updates": 2, "beta": 0.1, "micro_tokens": 100, "remat": "matmuls"},  # a row for each sample
    {"updates": 3},
    {"lora_rank": 2},
    {"precision": "bf16"},
    {"advantage": "gae", "updates": 2, "lora_rank": 2},
    {"aggregation": "seq-mean", "correction": "sequence-cap", "temperature": 0.7},
]


def test_few_shapes_weigh_the_same() -> None:
    prompt, samples = Prompt("p", (), (1, 2, 3), "", None), []
    for n in range(3):
        samples.append(Completion("p", n, [4] * (n + 1), "", [-1.0] * (n + 1), [], "stop"))
    group = Group(prompt, samples, [Grade(float(n == 1), ()) for n in range(3)])
    options = GrpoOptions(model="m")
    batch = arrays_of([*training_samples([group], options).values()], options, 1)
    filled = of_few_shapes(batch, 32, 3, 5)
    assert filled["input_ids"].shape == (9, 20)
    assert filled["targets"].shape == filled["sampler"].shape == (9, 1, 16)
    assert filled["advantage"].shape == filled["share"].shape == (9, 1, 1)
    assert (filled["targets"] >= 0).sum() == filled["loss_mask"].sum() == 6
    assert filled["share"].sum() == batch["share"].sum() == 6
    assert of_few_shapes(batch, 8, 3, 5)["targets"].shape == (9, 1, 8)  # of at most 8 tokens
    long = {name: np.repeat(array, 6, 0) for name, array in batch.items()}  # 18 rows: 24, not 32
    assert of_few_shapes(long, 32, 1, 1)["input_ids"].shape == (24, 16)


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES)
def test_jax_makes_the_run_of_torch(folder: Path, tmp_path: Path, changes: dict) -> None:
    rows = run(folder, tmp_path / "jax", **changes)
    expected = run(folder, tmp_path / "torch", "torch", **changes)
    narrow = changes.get("precision") == "bf16"
    assert rows[0]["reward"] == expected[0]["reward"]
    if narrow:  # draws differ where probabilities have 8 bits
        assert all(row["logprob_gap"] < 0.05 for row in rows)
        return
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        assert row["reward"] == other["reward"]
        assert row["sampled_tokens"] == other["sampled_tokens"]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert row["logprob_gap_max"] <= 1e-4
    assert greedy(folder, tmp_path / "jax") == greedy(folder, tmp_path / "torch")


@pytest.mark.slow
def test_a_stopped_run_on_jax_ends_with_the_same_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(folder, tmp_path / "whole")
    with monkeypatch.context() as patch:
        calls = iter(range(1000))  # once in a step
        patch.setattr(stop, "requested", lambda: next(calls) == 1)
        with pytest.raises(Interrupted):
            run(folder, tmp_path / "stopped")
    run(folder, tmp_path / "stopped")
    whole, stopped = (hub.load_model(tmp_path / n / "final")[1] for n in ("whole", "stopped"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], stopped[name])
