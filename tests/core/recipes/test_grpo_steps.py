"""Rewards of the steps of samples: where steps end, what their tokens gain, what a stop keeps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core import stop
from sabia.core.errors import Interrupted, UsageError
from sabia.core.generate.requests import Completion
from sabia.core.judge.verdict import Grade
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo import policy_run, sampler
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.sample_batch import Group, arrays_of, training_samples
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.recipes.grpo.step_rewards import (
    graded_steps,
    step_ends,
    token_advantages,
    token_ends,
)
from sabia.core.recipes.grpo.value_estimates import estimated
from sabia.core.shards.job import Job
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.telemetry import metrics_path, read_rows


@pytest.mark.parametrize(("text", "delimiter", "wanted"), [
    ("a\n\nb\n\nc", r"\n\n", ["a\n\n", "b\n\n", "c"]),
    ("a\n\n\n\nb", r"\n\n", ["a\n\n", "\n\nb"]),  # white space is no step
    ("\n\na\n\n", r"\n\n", ["\n\na\n\n"]),
    ("one. two! three", r"[.!]", ["one.", " two!", " three"]),
    ("a\nb \n ", r"\n", ["a\n", "b \n "]),
    ("", r"\n", [""]),
])  # fmt: skip
def test_where_steps_end(text: str, delimiter: str, wanted: list[str]) -> None:
    ends = step_ends(text, delimiter)
    assert [text[a:b] for a, b in zip([0, *ends], ends, strict=False)] == wanted
    assert ends[-1] == len(text)


def test_steps_end_in_tokens() -> None:
    """Also where characters have several tokens."""
    tokenizer = train_bpe(["one two\n\nthree four"] * 4, 300)
    text = "one ção\n\n日本 two\n\nthree"
    tokens = tokenizer.encode(text)
    sample = Completion("p", 0, [*tokens, 0], text, [], [], "stop")  # a stop token at the end
    ends = token_ends(sample, r"\n\n", tokenizer)
    pieces = [tokenizer.decode(tokens[: end + 1]) for end in ends[:-1]]
    assert pieces == ["one ção\n\n", "one ção\n\n日本 two\n\n"]
    assert ends[-1] == len(tokens) and len(ends) == 3


def sample(number: int, length: int) -> Completion:
    return Completion("p", number, [4] * length, "", [-1.0] * length, [], "stop")


@pytest.mark.parametrize("std", [False, True])
def test_advantages_are_those_of_the_paper(std: bool) -> None:
    """A_t = Σ over steps that end at t or later of (r - mean) (/ std) over the group's steps."""
    samples = [sample(0, 6), sample(1, 3), sample(2, 4), sample(3, 2)]
    steps = [[(1, 0.2), (3, 1.0), (5, 0.0)], [(2, 0.7)], [(0, 0.1), (3, 0.4)], []]
    grades = [Grade(1.0 if s else None, steps=tuple(s)) for s in steps]
    rewards = np.array([r for s in steps for _, r in s])
    scale = rewards.std(ddof=1) + 1e-4 if std else 1.0
    for made, one, own in zip(token_advantages(samples, grades, std), samples, steps, strict=True):
        wanted = [sum((r - rewards.mean()) / scale for end, r in own if end >= t)
                  for t in range(len(one.tokens))]  # fmt: skip
        np.testing.assert_allclose(made, wanted, atol=1e-12)
    options = GrpoOptions(model="m", step_delimiter=r"\n", advantage="std" if std else "mean")
    prompt = Prompt("p", (), (1, 2, 3), "", None)
    trained = training_samples([Group(prompt, samples, grades)], options)
    batch = arrays_of([*trained.values()], options, 1)
    assert batch["advantage"].shape == batch["targets"].shape == (3, 1, 6)  # one has no reward
    np.testing.assert_allclose(
        batch["advantage"][0, 0], token_advantages(samples, grades, std)[0], rtol=1e-6
    )
    equal = [Grade(0.5, steps=((1, 0.5),))] * 4
    assert not training_samples([Group(prompt, samples, equal)], options)


def test_a_step_without_a_reward_leaves_the_sample_without_one() -> None:
    grades = [Grade(1.0), Grade(None), Grade(0.5)]
    assert graded_steps(grades, [1, 2, 3]) == Grade(None)
    assert graded_steps([grades[0], grades[2]], [1, 3]).steps == ((1, 1.0), (3, 0.5))


def test_the_journal_keeps_steps(tmp_path: Path) -> None:
    grade = Grade(0.5, steps=((1, 0.25), (4, 0.5)))
    given = (sample(0, 5), grade), (sample(1, 5), Grade(None))
    Journal(tmp_path).finish(0, 0, ["p", "p"], given, [{}, {}])
    read = Journal(tmp_path).graded(0)
    assert read["p", 0][1].steps == grade.steps and read["p", 1][1].steps == ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from digit_policy import write_policy

    place = tmp_path_factory.mktemp("steps")
    write_policy(place, 3)
    return place


def run(folder: Path, out: Path, backend: str = "torch", **changes: Any) -> list[dict[str, Any]]:
    values = {"reward": "regex", "steps": 3, "prompts": 3, "group": 5, "max_new_tokens": 6,
              "warmup": "1", "peak_flops": 1e12, "lr": 2e-3,
              "step_delimiter": "[a-f ]"} | changes  # fmt: skip
    options = GrpoOptions(model=str(folder / "model"), **values)
    inputs = (str(folder / "prompts.jsonl"),)
    policy_run.run(Job("grpo", inputs=inputs, out=str(out), to="jsonl", backend=backend), options)
    return read_rows(metrics_path(out))


def graded(out: Path) -> list[tuple[Completion, Grade]]:
    return [one for step in range(3) for one in Journal(out / "samples").graded(step).values()]


def test_a_run_grades_the_text_up_to_each_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digit or letter makes a reward: once there is one, all later steps have it; a stopped run
    reads the rewards back, asks for no more of them, and ends with the same weights."""
    import re

    rows = run(folder, tmp_path / "whole")
    tokenizer, several = load_tokenizer(folder / "model"), 0
    for one, grade in graded(tmp_path / "whole"):
        ends = step_ends(one.text, "[a-f ]")
        wanted = [float(bool(re.search("[0-9a-m]", one.text[:end]))) for end in ends]
        assert [reward for _, reward in grade.steps] == wanted and grade.score == wanted[-1]
        assert [end for end, _ in grade.steps] == token_ends(one, "[a-f ]", tokenizer)
        several += len(ends) > 1
    assert several >= 5 and rows[-1]["logprob_gap_max"] <= 1e-4
    with monkeypatch.context() as patch:
        calls = iter(range(1000))  # once in a step
        patch.setattr(stop, "requested", lambda: next(calls) == 1)
        with pytest.raises(Interrupted):
            run(folder, tmp_path / "stopped")
    cases, of = list[object](), sampler.step_cases

    def counted(case: Any, delimiter: str) -> Any:
        cases.append(case)
        return of(case, delimiter)

    with monkeypatch.context() as patch:
        patch.setattr(sampler, "step_cases", counted)
        run(folder, tmp_path / "stopped")
    assert len(cases) == 15  # those of the last step alone
    whole, stopped = (hub.load_model(tmp_path / n / "final")[1] for n in ("whole", "stopped"))
    assert all(np.array_equal(whole[name], stopped[name]) for name in whole)
    plain = run(folder, tmp_path / "plain", step_delimiter="")
    assert plain[0]["reward"] == rows[0]["reward"] and plain[0]["loss"] != rows[0]["loss"]


def test_a_value_head_gets_each_reward_where_its_step_ends(folder: Path, tmp_path: Path) -> None:
    """A_t = d_t + g l A_(t+1), token by token, of rewards at the ends of steps."""
    samples = [sample(0, 6), sample(1, 3)]
    steps = [((1, 0.2), (3, 1.0), (5, 0.5)), ((2, 0.7),)]
    grades = [Grade(s[-1][1], steps=s) for s in steps]
    options = GrpoOptions(model="m", step_delimiter=r"\n", advantage="gae", discount=0.9,
                          gae_lambda=0.8)  # fmt: skip
    group = Group(Prompt("p", (), (1, 2, 3), "", None), samples, grades)
    batch = arrays_of([*training_samples([group], options).values()], options, 1)
    values = np.random.default_rng(0).random((2, 1, 6), np.float32)
    made = estimated(batch, values, options)
    for row, (one, own) in enumerate(zip(samples, steps, strict=True)):
        count, after, later = len(one.tokens), 0.0, 0.0
        for t in reversed(range(count)):
            value = float(values[row, 0, t])
            difference = dict(own).get(t, 0.0) + 0.9 * later - value
            after, later = difference + 0.9 * 0.8 * after, value
            assert made["advantage"][row, 0, t] == pytest.approx(after, abs=1e-6)
        assert not made["advantage"][row, 0, count:].any()
    rows = run(folder, tmp_path / "run", advantage="gae")
    plain = run(folder, tmp_path / "plain", advantage="gae", step_delimiter="")
    assert rows[0]["reward"] == plain[0]["reward"] and rows[0]["loss"] != plain[0]["loss"]
    assert all(row["logprob_gap_max"] <= 1e-4 and np.isfinite(row["value_loss"]) for row in rows)


@pytest.mark.slow
def test_jax_makes_the_run_of_torch(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    rows = run(folder, tmp_path / "jax", "jax")
    for row, other in zip(rows, run(folder, tmp_path / "torch"), strict=True):
        assert row["reward"] == other["reward"]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_what_is_refused() -> None:
    for values, message in (
        ({"step_delimiter": "x*"}, "--step-delimiter: 'x.*' matches nothing at all"),
        ({"overlong_buffer": 3}, "--overlong-buffer: not together with --step-delimiter"),
        ({"reward": "none", "teacher": "t"}, "--reward none: not together"),
    ):
        with pytest.raises(UsageError, match=message):
            GrpoOptions(**{"model": "m", "step_delimiter": "x"} | values).check()
    assert json.dumps(GrpoOptions(model="m").step_delimiter) == '""'
