"""GRPO's refilled groups, soft punishment, reward models and teachers, in small runs."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from in_process import sabia
from safetensors.numpy import load_file

pytest.importorskip("torch")

from sabia.core import stop
from sabia.core.generate.requests import Completion
from sabia.core.judge.verdict import Grade
from sabia.core.model.storage import hub
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo.prompt_schedule import Prompt, PromptSchedule
from sabia.core.recipes.grpo.sample_batch import Group, is_informative, trained_rewards
from sabia.core.spec import from_config, new_config
from sabia.core.spec.families import with_classifier
from sabia.core.spec.model import classifier_config
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

WORDS = ("--prompts", "4", "--group", "4", "--max-new-tokens", "5", "--lr", "1e-3", "-q")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a teacher, a reward model of the same tokenizer, and prompts of two sources."""
    made = tmp_path_factory.mktemp("m")
    train_bpe(["user assistant 37+58=095"] * 4, 300).save(made / "t")
    config = new_config(hidden=32, layers=1, heads=2, vocab=300, context=64)
    for number, name in enumerate(("policy", "teacher", "reward")):
        spec = from_config(config)
        if name == "reward":
            spec = with_classifier(spec, classifier_config(config, ("reward",), "regression", 0))
        scale = 2 if name == "policy" else 1  # a sure policy, which learns to be unsure
        params = {k: np.array(scale * v) for k, v in hub.init_params(spec, number).items()}
        hub.save_model(made / name, spec, params, tokenizer_from=made / "t")
    rows = [{"id": str(n), "messages": [{"role": "user", "content": f"{n}+{n}="}],
             "answer": "[0-4]", "source": ["one", "two"][n % 2]} for n in range(12)]  # fmt: skip
    (made / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def run(folder: Path, out: Path, *words: object) -> list[dict]:
    model = ("--model", folder / "policy", *WORDS, "-o", out)
    done = sabia("grpo", folder / "prompts.jsonl", *model, *words)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_groups_without_an_advantage_give_way(folder: Path, tmp_path: Path) -> None:
    """Every place of such a group is drawn again, by numbers that depend on seed and draw alone."""
    words = ("--reward", "regex", "--steps", "2", "--refill", "2")
    rows = run(folder, tmp_path / "one", *words)
    names: dict[tuple[int, int], dict[str, list[float]]] = {}
    for path in sorted((tmp_path / "one" / "samples").glob("step-*.parquet")):
        draw = int(path.stem.split("-")[3]) if path.stem.count("-") == 3 else 0
        for row in pq.read_table(path).to_pylist():
            groups = names.setdefault((row["policy_version"], draw), {})
            groups.setdefault(row["request_id"], []).append(row["reward"])
    assert len(names) > 2
    for step in (0, 1):
        for draw in (0, 1):
            dead = [
                name for name, rewards in names.get((step, draw), {}).items()
                if len(set(rewards)) == 1
            ]  # fmt: skip
            again = names.get((step, draw + 1), {})
            places = sorted(name.split("-")[1].split("+")[0] for name in dead)
            assert sorted(name.split("-")[1].split("+")[0] for name in again) == places
            assert all(f"+{draw + 1}-" in name for name in again)
        groups = [r for (s, _), by in names.items() if s == step for r in by.values()]
        assert rows[step]["samples"] == 4 * len(groups)
        assert rows[step]["pass_at_k"] == np.mean([max(r) == 1 for r in groups])
        live = np.mean([len(set(r)) > 1 for r in groups])
        assert rows[step]["live_groups"] == pytest.approx(live)
        assert set(rows[step]["reward_by_source"]) <= {"one", "two"}
    run(folder, tmp_path / "two", *words)
    one, two = (load_file(tmp_path / n / "final" / "model.safetensors") for n in ("one", "two"))
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_draws_are_different_orders() -> None:
    prompts = [Prompt(str(n), (), (0,), None, None) for n in range(50)]
    schedule = PromptSchedule(prompts, 10, 3)
    draws = [[p.id for p in schedule.of_step(2, draw)] for draw in (0, 0, 1, 2)]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) == 3


def test_long_samples_lose_reward() -> None:
    samples = [Completion("", 0, [0] * n, "", [0.0] * n, [0.0] * n, "stop") for n in (5, 8, 9, 10)]
    group = Group(Prompt("", (), (0,), None, None), samples, [Grade(1.0)] * 4)
    plain = GrpoOptions(model="m", max_new_tokens=10)
    assert not is_informative(group, plain)
    options = GrpoOptions(model="m", max_new_tokens=10, overlong_buffer=4)
    assert trained_rewards(group, options).tolist() == [1.0, 0.5, 0.25, 0.0]
    assert is_informative(group, options)


def test_a_reward_model_grades(folder: Path, tmp_path: Path) -> None:
    """Each reward is the model's score of the conversation with the sample."""
    words = ("--reward", "model", "--reward-model", folder / "reward", "--steps", "1")
    run(folder, tmp_path / "run", *words)
    from sabia.core.generate.chat import render_answer
    from sabia.core.recipes.classifier.sequence_classifier import ClassifierModel

    (path,) = (tmp_path / "run" / "samples").glob("step-*.parquet")
    tokenizer, model = load_tokenizer(str(folder / "t")), ClassifierModel(str(folder / "reward"))
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    rows = pq.read_table(path).to_pylist()
    for row in rows[::5]:
        turn = {"role": "assistant", "content": row["text"]}
        ids, _ = render_answer([*prompts[int(row["prompt_id"])]["messages"], turn], tokenizer)
        (score,) = model.vectors([np.array(ids, np.int32)], 1)[:, 0]
        assert row["reward"] == pytest.approx(score, abs=1e-5)
    assert len({row["reward"] for row in rows}) > 4


@pytest.mark.slow
def test_a_policy_comes_near_its_teacher(folder: Path, tmp_path: Path) -> None:
    words = ("--reward", "none", "--teacher", folder / "teacher", "--steps", "40",
             "--prompts", "8", "--lr", "3e-3")  # fmt: skip
    rows = run(folder, tmp_path / "run", *words)
    apart = [row["teacher_kl"] for row in rows]
    assert np.mean(apart[-5:]) < 0.85 * np.mean(apart[:5])


def test_teachers_with_other_tokens_are_refused(folder: Path, tmp_path: Path) -> None:
    train_bpe(["another text"] * 4, 290).save(tmp_path / "t")
    spec = from_config(new_config(hidden=32, layers=1, heads=2, vocab=300, context=64))
    params = hub.init_params(spec, 0)
    hub.save_model(tmp_path / "m", spec, params, tokenizer_from=tmp_path / "t")
    for words, message in (
        (("--teacher", tmp_path / "m"), "has another tokenizer"),
        (("--reward", "none"), "none without --teacher"),
        (("--reward", "model"), "--reward-model: is missing"),
        (("--reward", "model", "--reward-model", folder / "policy"), "has no single score"),
        (("--surrogate", "sapo", "--updates", "2", "--clip-low", "0.1"), "--clip-low: only with"),
        (("--correction-cap", "3"), "--correction-cap: only with"),
    ):
        done = sabia("grpo", folder / "prompts.jsonl", "--model", folder / "policy", *WORDS,
                     *words, "-o", tmp_path / "out")  # fmt: skip
        assert done.exit_code == 2 and message in done.output, done.output


def test_dull_prompts_are_drawn_less_often() -> None:
    prompts = [Prompt(str(n), (), (1,), "", None) for n in range(20)]
    plain = PromptSchedule(prompts, 4, 3)
    schedule = PromptSchedule(prompts, 4, 3, keep=0.25)
    assert all(plain.of_step(n) == schedule.of_step(n) for n in range(9))  # none is dull yet
    schedule.dull.update(range(10))
    drawn = [int(one.id) for step in range(150) for one in schedule.of_step(step)]
    assert np.mean(np.array(drawn) < 10) == pytest.approx(0.25 / 1.25, abs=0.06)
    assert schedule.of_step(5) == schedule.of_step(5)
    schedule.dull.update(range(20))
    assert len(schedule.of_step(5)) == 4


def test_a_curriculum_is_repeated_after_a_stop(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    never = [{**record, "id": f"x{n}", "answer": "NEVER"} for n, record in enumerate(records)]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in (*records, *never))
    )
    (tmp_path / "policy").symlink_to(folder / "policy")
    words = ("--reward", "regex", "--curriculum", "0%", "--steps", 12, "--group", 8)
    run(tmp_path, tmp_path / "whole", *words)
    samples = pq.read_table(tmp_path / "whole" / "samples").to_pylist()
    shares = [
        np.mean(
            [row["prompt_id"][0] == "x" for row in samples if row["policy_version"] // 6 == half]
        )
        for half in (0, 1)
    ]
    assert shares[0] > 0.3 and shares[1] < 0.1
    calls = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(stop, "requested", lambda: next(calls) == 5)
        model = ("--model", folder / "policy", *WORDS, "-o", tmp_path / "stopped")
        done = sabia("grpo", tmp_path / "prompts.jsonl", *model, *words)
        assert done.exit_code == 75, done.output
    run(tmp_path, tmp_path / "stopped", *words)
    name = "final/model.safetensors"
    assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
