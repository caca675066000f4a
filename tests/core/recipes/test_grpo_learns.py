"""What teaches faster than the reward of a whole sample: a teacher that scores its tokens, rewards
of its steps.

The task is to write the successor of each digit of a number (9 → 0). The policy was trained on
answers of which half of the digits are random: it knows the digits, and rarely samples a whole
answer that is right.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from sabia.core.generate.chat import render
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo import policy_run
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.optimizer.config import OptimizerConfig
from sabia.core.train.stepper_factory import make_stepper

DIGITS, CORRUPT, ROWS = 8, 0.55, 64
SEEDS = (0, 1, 2)


def answer_to(number: str) -> str:
    return "".join(str((int(digit) + 1) % 10) for digit in number)


def prefix_pattern(answer: str) -> str:
    """A regular expression that matches what the answer begins with."""
    return "^" + "(?:".join(answer) + ")?" * (len(answer) - 1) + "$"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`student/`, `teacher/`, and prompts whose answers are texts or patterns."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("digits")
    tokenizer = train_bpe(["user assistant"] * 9, 280)
    tokenizer.save(folder / "t")
    config = new_config(hidden=64, layers=2, vocab=tokenizer.vocab_size, heads=4, context=64)
    spec = from_config(config)
    draw = np.random.default_rng(0)

    def prompt(number: str) -> list[int]:
        return tokenizer.encode(render([{"role": "user", "content": number}], tokenizer, True))

    end = sorted(tokenizer.stop_ids)[0]

    def batch(corrupt: float) -> dict[str, np.ndarray]:
        rows = []
        for _ in range(ROWS):
            number = "".join(map(str, draw.integers(0, 10, DIGITS)))
            shown = [d if draw.random() >= corrupt else str(draw.integers(0, 10))
                     for d in answer_to(number)]  # fmt: skip
            begin = prompt(number)
            ids = [*begin, *tokenizer.encode("".join(shown)), end]
            rows.append((ids, len(begin)))
        assert len({len(ids) for ids, _ in rows}) == 1
        ids = np.array([ids for ids, _ in rows], np.int32)
        mask = np.zeros((ROWS, ids.shape[1] - 1), np.float32)
        mask[:, rows[0][1] - 1 :] = 1
        return {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": mask}

    for name, corrupt in (("student", CORRUPT), ("teacher", 0.0)):
        stepper = make_stepper("torch", spec, hub.init_params(spec, 0), next_token_loss,
                               OptimizerConfig("adamw", weight_decay=0.0))  # fmt: skip
        for step in range(400):
            stepper.step(batch(corrupt), 3e-3 * min(1, (step + 1) / 30, (401 - step) / 200))
        params = {k: x.numpy() for k, x in stepper.whole_params().items()}
        hub.save_model(folder / name, spec, params, tokenizer_from=folder / "t")
    numbers = ["".join(map(str, draw.integers(0, 10, DIGITS))) for _ in range(2000)]
    for name, made in (("exact", answer_to), ("steps", lambda n: prefix_pattern(answer_to(n)))):
        rows = [{"id": n, "messages": [{"role": "user", "content": n}], "answer": made(n)}
                for n in numbers]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def solved(place: Path, out: Path, seed: int, data: str = "exact", **changes: Any) -> np.ndarray:
    """The share of right samples of each step of a run."""
    values = {"reward": "exact", "steps": 100, "prompts": 16, "group": 2, "max_new_tokens": 12,
              "warmup": "5", "peak_flops": 1e12, "lr": 5e-4} | changes  # fmt: skip
    options = GrpoOptions(model=str(place / "student"), **values)
    inputs = (str(place / f"{data}.jsonl"),)
    policy_run.run(Job("grpo", inputs=inputs, out=str(out), to="jsonl", seed=seed), options)
    shares = []
    for file in sorted((out / "samples").glob("*.parquet")):
        rows = pq.read_table(file, columns=["prompt_id", "text"]).to_pylist()
        shares.append(np.mean([row["text"] == answer_to(row["prompt_id"]) for row in rows]))
    return np.array(shares)


def reached(shares: np.ndarray, goal: float) -> int:
    """The first step after which the mean of five is at the goal; one more than all for none."""
    means = np.convolve(shares, np.ones(5) / 5, "valid")
    return int(np.argmax(means >= goal)) + 5 if (means >= goal).any() else len(shares) + 1


@pytest.mark.slow
def test_a_teacher_takes_at_most_half_of_the_samples(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In all seeds together."""
    teacher, steps = str(place / "teacher"), list[tuple[int, int]]()
    for seed in SEEDS:
        with_it = solved(place, tmp_path / f"teacher-{seed}", seed, teacher=teacher)
        alone = solved(place, tmp_path / f"alone-{seed}", seed)
        steps.append((reached(with_it, 0.9), reached(alone, 0.9)))
        assert steps[-1][0] <= len(with_it)
        with capsys.disabled():
            print(f"\nseed {seed}: .9 with a teacher in {steps[-1][0]} steps, alone in",
                  steps[-1][1], with_it[::8].round(2), alone[::8].round(2))  # fmt: skip
    total = np.sum(steps, 0)
    assert 2 * total[0] <= total[1]


@pytest.mark.slow
def test_rewards_of_steps_teach_faster(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each digit is a step, with a reward if all digits so far are right."""
    more: dict[str, Any] = {"reward": "regex", "step_delimiter": "[0-9]"}
    for seed in SEEDS:
        by_step = solved(place, tmp_path / f"steps-{seed}", seed, "steps", **more)
        alone = solved(place, tmp_path / f"alone-{seed}", seed)
        steps = reached(by_step, 0.5), reached(alone, 0.5)
        with capsys.disabled():
            print(f"\nseed {seed}: .5 by rewards of steps in {steps[0]} steps, alone in",
                  steps[1], by_step[::8].round(2), alone[::8].round(2))  # fmt: skip
        assert 1.5 * steps[0] <= steps[1]
