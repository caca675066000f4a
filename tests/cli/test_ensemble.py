"""`sabia rewrite --recipe ensemble`: what several models agree on becomes chat records."""

import json
import random
import re

import pyarrow.parquet as pq
import pytest
from rewrite_cases import Sampler, fault, kills_change_nothing, written
from rewrite_cases import sabia as call

TOPICS = ("tower", "river", "library", "bridge")
MODELS = ("a", "b", "c")


def prompts(count, seed=0):
    return [
        {
            "id": f"{seed}-{n}",
            "messages": [{"role": "user", "content": f"Describe the {TOPICS[n % 4]} {seed}-{n}."}],
            "shelf": n,
            "answer": f"kept {n}",
        }
        for n in range(count)
    ]


def facts(model, record):
    """By sentence the number that a model states; three of ten are wrong, each in its own way."""
    truth, errors = random.Random(f"{record}"), random.Random(f"{record} {model}")
    stated = {}
    for thing in ("floors", "doors", "lamps", "benches", "guides"):
        number = truth.randint(3, 40)
        stated[thing] = number + (errors.choice([-1, 1, 2, 40]) if errors.random() < 0.3 else 0)
    return stated


def answer(text):
    model, _, record = text.partition("\n")
    model, record = model.split()[0], re.search(r"\d+-\d+", record)[0]
    given = list(facts(model, record).items())
    random.Random(text).shuffle(given)
    lines = "\n".join(f"- It has {number} {thing} in all." for thing, number in given)
    return f"<think>It has 99 doors.</think>Here is what is known.\n\n{lines}"


def models_file(path, stub, **more):
    path.write_text("".join(
        f'[{name}]\nurl = "{stub.url}"\nmodel = "{name}"\n' + "".join(
            f"{key} = {value}\n" for key, value in more.items()
        ) for name in MODELS
    ))  # fmt: skip
    return path


def asked(stub, tmp_path, *more):
    models = models_file(tmp_path / "models.toml", stub)
    return ("--recipe", "ensemble", "--engine", "endpoint", "--models", models,
            "--cache", tmp_path / "cache", *more)  # fmt: skip


def check(row, record):
    by_model = {model: facts(model, record["id"]) for model in MODELS}
    text = row["messages"][-1]["content"]
    stated = {thing: int(n) for n, thing in re.findall(r"(\d+) (\w+) in all", text)}
    assert [int(n) for n in re.findall(r"\d+", text)] == list(stated.values())
    supporters = {
        thing: [m for m in MODELS if by_model[m][thing] == number]
        for thing, number in by_model[row["ensemble_model"]].items()
    }
    assert stated == {
        thing: by_model[row["ensemble_model"]][thing]
        for thing, models in supporters.items() if len(models) >= 2
    }  # fmt: skip
    for segment in row["ensemble_segments"]:
        numbers = re.search(r"\d+ (\w+) in all", segment["text"])
        models = supporters[numbers[1]] if numbers else list(MODELS)
        assert segment["models"] == models and segment["kept"] == (len(models) >= 2)
    return len(stated)


def test_no_number_without_a_quorum_is_kept_and_none_is_paid_twice(tmp_path):
    records = prompts(120)
    given = written(tmp_path / "in.parquet", records)
    with Sampler(answer=answer, fault=fault, retry_after_s=0.1) as stub:
        out = tmp_path / "out.parquet"
        done = call("rewrite", given, "-o", out, *asked(stub, tmp_path))
        assert sum(stub.delivered.values()) == 360 and stub.early == 0
        call("rewrite", given, "-o", out, "--force", *asked(stub, tmp_path))
        assert sum(stub.delivered.values()) == 360
    assert all(f"{model}: 120 calls".encode() in done.stderr for model in MODELS)
    made = pq.read_table(out).to_pylist()
    rejected = pq.read_table(tmp_path / "out.rejects.parquet").to_pylist()
    assert len(made) + len(rejected) == 120 and len(made) > 80
    by_id = {one["id"]: one for one in records}
    kept = sum(check(row, by_id[row["id"]]) for row in made)
    assert kept < 5 * len(made)
    for row in made:
        assert row["shelf"] == by_id[row["id"]]["shelf"] and row["answer"].startswith("kept")
        assert (row["rewrite_recipe"], row["rewrite_model"]) == ("ensemble", "stub-1")
    assert {row["reason"].partition(" of the answer")[2] for row in rejected} == {
        " has a quorum (expected 50% or more)"
    }


def test_failed_models_give_no_record_and_short_answers_support_nothing(tmp_path):
    given = written(tmp_path / "in.parquet", prompts(3))

    def own(text):
        return "" if text.startswith("c ") else answer(text)

    def broken(text, _attempt):
        return "400" if "0-1" in text else ""

    with Sampler(answer=own, fault=broken) as stub:
        call("rewrite", given, "-o", tmp_path / "o.parquet", *asked(stub, tmp_path), check=False)
    rows = pq.read_table(tmp_path / "o.rejects.parquet").to_pylist()
    reasons = {json.loads(row["record"])["id"]: row["reason"] for row in rows}
    assert "HTTP 400" in reasons["0-1"] and reasons["0-1"].startswith("ensemble: a: ")
    for row in pq.read_table(tmp_path / "o.parquet").to_pylist():
        assert all("c" not in one["models"] for one in row["ensemble_segments"])


@pytest.mark.slow
def test_kills_at_random_lose_and_double_nothing(tmp_path):
    def words(stub, folder):
        return asked(stub, folder, "--concurrency", 2)

    records = [prompts(30, part) for part in range(3)]
    kills_change_nothing(tmp_path, records, answer, words, 270, 4 * 6)


def test_dry_run_and_usage_errors(sabia, tmp_path):
    given = written(tmp_path / "in.parquet", prompts(5))
    with Sampler(answer=answer) as stub:
        models = models_file(tmp_path / "m.toml", stub, prompt=1.0, completion=2.0)
        more = ("--engine", "endpoint", "--models", models, "--cache", tmp_path / "c")
        more = (*more, "--max-usd", 5)
        plan = sabia("rewrite", given, "--recipe", "ensemble", *more, "--dry-run")
        plan = plan.stdout.decode()
        assert plan.count(": 5 requests (0 more are in the cache)") == 3 and not stub.requests
        # 2,048 tokens at $2 a million, 15 times, and the prompts
        assert re.search(r"calls in all: 15 requests, at most \$0\.06\d*\n", plan), plan
    recipe, file = tmp_path / "own.toml", tmp_path / "n.toml"
    recipe.write_text('base = "ensemble"\n[agreement]\nquorum = 0.3')
    file.write_text('[a]\nmodel = "a"\n[b]\nmodel = "b"\n')
    base = ("--recipe", "ensemble")
    for words, message in [
        ((*base,), "--engine rules: recipe ensemble asks a model"),
        ((*base, *more[:2], "--url", "http://x", "--model", "m"), "--models: is missing"),
        ((*base, *more, "--model", "m"), "--models"),
        ((*base, *more, "--judge-url", "http://x", "--judge-model", "j"), "has no judge"),
        ((*base, *more[:2], "--models", file), "a: url is missing (expected [NAME] tables"),
        ((*base, "--engine", "local", "--models", models), "a: no key"),
        (("--recipe", recipe, *more), "quorum = 0.3 of 3 models is one"),
        (("--recipe", "best-of", *more), "--models: recipe best-of asks one model"),
        (more, "--models: recipe reason-first asks one model"),
    ]:
        done = sabia("rewrite", given, *words)
        assert done.returncode == 2 and message in done.stderr.decode(), (words, done.stderr)
