"""The measurement of rewriting: its problems, its statistics, and the script on small sizes."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from marked_environment import marked_environment
from scipy import stats

from sabia.core.text.rewrite import reason_first

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def module_of(name: str):
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digits(question: str) -> str:
    return re.search(r"\d(\+\d)+", question)[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("problems")
    words = ["--seed", "7", "--pages", "300", "--few", "10", "--many", "50", "--held-out", "40"]
    script = str(EXAMPLES / "rewrite_claim_data.py")
    subprocess.run([sys.executable, script, str(folder), *words], check=True)
    return folder


def test_answers_and_steps_are_right_and_no_problem_comes_twice(written: Path) -> None:
    pages = [row["text"] for row in lines(written / "pages.jsonl")]
    chats = [[m["content"] for m in row["messages"]] for row in lines(written / "many.jsonl")]
    items = [(row["question"], row["answer"]) for row in lines(written / "held-out.jsonl")]
    stated = items + [(text, re.search(r"The answer is (\d)\.", text)[1]) for text in pages]
    stated += [(question, re.search(r"The answer is (\d)\.$", said)[1]) for question, said in chats]
    assert len(stated) == 390 and len({digits(question) for question, _ in stated}) == 390
    for question, answer in stated:
        assert int(answer) == sum(map(int, digits(question).split("+"))) % 10
    for text in [*pages, *(said for _, said in chats)]:
        steps = re.findall(r"(\d)\+(\d)=(\d+), keep (\d)", text)
        assert len(steps) == 4
        assert all(int(a) + int(b) == int(c) and int(c) % 10 == int(d) for a, b, c, d in steps)
    assert lines(written / "few.jsonl") == lines(written / "many.jsonl")[:10]


def test_the_rules_put_every_answer_after_its_steps_and_only_move_sentences(written: Path) -> None:
    for row in lines(written / "pages.jsonl"):
        new = reason_first.rewrite(row["text"])
        assert new.before == (0.0,) and new.after == (1.0,)
        assert re.search(r"keep (\d)\. The answer is \1\.$", new.text)
        assert sorted(new.text.split()) == sorted(row["text"].split())


def rows(rng, effects: list[float], items: int = 50) -> list[dict]:
    return [
        {"seed": f"seed-{seed}", "pages": pages, "point": "few", "item": str(item),
         "answer": float(rng.random() < 0.4 + effect * (pages == "rewritten"))}
        for seed, effect in enumerate(effects) for pages in ("pages", "rewritten")
        for item in range(items)
    ]  # fmt: skip


def test_the_interval_is_students_between_seeds() -> None:
    made = rows(np.random.default_rng(0), [0.5, 0.1, 0.3, -0.2])
    one = module_of("rewrite_claim_report").effect(made, "few", "answer")
    by_seed = np.array(one["by_seed"])
    expected = stats.t.interval(0.95, 3, by_seed.mean(), stats.sem(by_seed))
    assert (one["low"], one["high"]) == pytest.approx(expected, rel=0.005)
    assert one["difference"] == pytest.approx(one["rewritten"] - one["pages"])
    assert not one["seen"] and one["detectable"] > one["high"] - one["difference"]


def test_equal_seeds_do_not_make_an_effect_certain() -> None:
    report, made = module_of("rewrite_claim_report"), rows(np.random.default_rng(0), [0.0])
    twice = made + [row | {"seed": "seed-1"} for row in made]
    one = report.effect(twice, "few", "answer")
    assert one["high"] - one["low"] > 0.1
    same = report.effect([row | {"answer": 1.0} for row in twice], "few", "answer")
    assert not same["seen"] and same["detectable"] == 6 / 100


@pytest.mark.slow
def test_the_whole_measurement_on_small_sizes(tmp_path: Path) -> None:
    words = ["bash", str(EXAMPLES / "rewrite_claim.sh"), "--fast", str(tmp_path / "claim")]
    environment = marked_environment(tmp_path)
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answers = pq.read_table(tmp_path / "claim" / "rows.parquet").to_pylist()
    assert len(answers) == 2 * 2 * 3 * 40  # seeds, pages, points, items
    effects = json.loads((tmp_path / "claim" / "effects.json").read_text())
    assert len(effects["effects"]) == 6 and 0 < effects["cpu_minutes"] < 5
    for arm in ("pages", "rewritten"):
        metrics = tmp_path / "claim" / "seed-1" / arm / "none" / "metrics.jsonl"
        assert lines(metrics)[-1]["step"] == 30  # as many tokens in both
    assert "after many demonstrations" in done.stdout and "next:" in done.stdout
