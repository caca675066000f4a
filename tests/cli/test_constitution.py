"""`sabia rewrite --recipe constitution`: revised answers become preference records."""

import json
import random
import re

import pyarrow.parquet as pq
import pytest
from rewrite_cases import Sampler, fault, kills_change_nothing, sabia, written

WORDS = ("amber", "basil", "cedar")
RECIPE = f"""base = "constitution"
[constitution]
principles = {json.dumps([f"no {word}" for word in WORDS])}
critique = "Critique: {{principle}}"
revise = "Revise: {{principle}}"
"""


def prompts(count, seed=0):
    return [
        {"id": f"{seed}-{n}", "messages": [{"role": "user", "content": f"Question {seed}-{n}"}],
         "shelf": n, "meta": json.dumps({"n": n})}
        for n in range(count)
    ]  # fmt: skip


def first_answer(id_):
    """Some of the words, in any order."""
    draw = random.Random(id_)
    return " ".join([id_, *draw.sample(WORDS, draw.randint(0, 3)), "end"])


def answer(text):
    """The first line is of the stub; the second is the question, the third the last answer."""
    _, question, *turns = text.split("\n")
    if not turns:
        return f"<think>amber?</think>{first_answer(question.removeprefix('Question '))}"
    word = re.search(r"no (\w+)$", turns[-1])[1]
    if turns[-1].startswith("Critique"):
        return f"{word} is there" if word in turns[0] else "nothing is"
    assert len(turns) == 4 and turns[2] in (f"{word} is there", "nothing is")
    return turns[0].replace(f"{word} ", "")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(RECIPE)
    return path


def asked(stub, tmp_path, recipe, *more):
    return ("--recipe", recipe, "--engine", "endpoint", "--url", stub.url, "--model", "m",
            "--cache", tmp_path / "cache", *more)  # fmt: skip


def check(row, record):
    first, used = first_answer(record["id"]), row["constitution_principles"]
    assert len(set(used)) == len(used) == 2 and set(used) < {f"no {word}" for word in WORDS}
    revisions, critiques, last = [], [], first
    for principle in used:
        word = principle.removeprefix("no ")
        critiques.append(f"{word} is there" if word in last else "nothing is")
        revisions.append(last := last.replace(f"{word} ", ""))
    assert (row["rejected"], row["chosen"]) == (first, last) and first != last
    assert (row["constitution_critiques"], row["constitution_revisions"]) == (critiques, revisions)
    assert row["prompt"][0]["content"] == record["messages"][0]["content"]
    assert (row["shelf"], row["meta"]) == (record["shelf"], record["meta"])
    assert (row["rewrite_recipe"], row["rewrite_model"]) == ("own", "stub-1")


def test_pairs_are_first_answers_and_last_revisions_and_no_call_is_paid_twice(tmp_path, recipe):
    records = prompts(80)
    given, out = written(tmp_path / "in.parquet", records), tmp_path / "out.parquet"
    with Sampler(answer=answer, fault=fault, retry_after_s=0.1) as stub:
        done = sabia("rewrite", given, "-o", out, *asked(stub, tmp_path, recipe))
        assert sum(stub.delivered.values()) == 400 and stub.early == 0
        sabia("rewrite", given, "-o", out, "--force", *asked(stub, tmp_path, recipe))
        assert sum(stub.delivered.values()) == 400
    made = {row["id"]: row for row in pq.read_table(out).to_pylist()}
    rejected = pq.read_table(tmp_path / "out.rejects.parquet").to_pylist()
    lost = {json.loads(row["record"])["id"] for row in rejected}
    assert not lost & made.keys() and lost | made.keys() == {one["id"] for one in records}
    assert 40 < len(made) < 75 and b"answers: 400 calls" in done.stderr
    for record in records:
        if record["id"] in made:
            check(made[record["id"]], record)
            assert made[record["id"]]["constitution_scores"] is None
    reasons = {row["reason"] for row in rejected}
    assert reasons == {"constitution: the last revision is the first answer"}
    principles = {tuple(row["constitution_principles"]) for row in made.values()}
    assert len(principles) == 6  # every order of two of three


def test_a_judge_keeps_pairs_whose_score_rises_enough(tmp_path, recipe):
    recipe.write_text(f"{RECIPE}min-gain = 0.5\n")
    records = prompts(60)
    given = written(tmp_path / "in.parquet", records)

    def judged(text):
        if not text.startswith("judge"):
            return answer(text)
        graded = re.findall(r"^.*\d+-\d+ .*end", text, re.M)[-1]
        if "0-7 " in graded:
            return "no verdict"
        (number,) = set(re.findall(r"principle-(\d)", text))
        (word,) = (word for word in WORDS if f"no {word}" in text)
        assert WORDS[int(number) - 1] == word
        verdict = {"item": f"principle-{number}", "evidence": "x", "met": word not in graded}
        return json.dumps({"verdicts": [verdict]})

    with Sampler(answer=judged) as stub:
        more = asked(stub, tmp_path, recipe, "--judge-url", stub.url, "--judge-model", "judge",
                     "--judge-cache", tmp_path / "jc")  # fmt: skip
        sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more)
    made = {row["id"]: row for row in pq.read_table(tmp_path / "o.parquet").to_pylist()}
    rejects = pq.read_table(tmp_path / "o.rejects.parquet").to_pylist()
    reasons = {json.loads(row["record"])["id"]: row["reason"] for row in rejects}
    for record in records:
        words = [word for word in WORDS if word in first_answer(record["id"])]
        if record["id"] in made:
            row = made[record["id"]]
            check(row, record)
            first, last = row["constitution_scores"]
            assert first == pytest.approx(1 - len(words) / 3)
            assert last == pytest.approx(first + 2 / 3) and len(words) >= 2
        elif record["id"] == "0-7":
            assert reasons["0-7"] == "constitution: the judge failed"
        elif words and "the last revision is" not in reasons[record["id"]]:
            assert re.fullmatch(
                r"constitution: the score went from [\d.]+ to [\d.]+ \(expected a gain of 0.5 or "
                r"more\)", reasons[record["id"]],
            )  # fmt: skip
    assert len(made) > 5 and len(made) + len(reasons) == 60


def test_what_cannot_be_used_is_rejected_with_the_reason(tmp_path, recipe):
    records = [one for one in prompts(30) if "amber" in first_answer(one["id"])][:5]
    fails = dict(zip(("Question", "Critique", "Revise"), records, strict=False))
    records[3]["tools"] = json.dumps([{"type": "function", "function": {"name": "f"}}])
    records[4]["messages"] = []
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))

    def empty(text):
        last = text.split("\n")[-1]
        failing = any(
            last.startswith(step) and one["messages"][0]["content"] == text.split("\n")[1]
            for step, one in fails.items()
        )
        return "" if failing else answer(text)

    with Sampler(answer=empty) as stub:
        done = sabia("rewrite", tmp_path / "in.jsonl", "-o", tmp_path / "o.parquet",
                     *asked(stub, tmp_path, recipe), check=False)  # fmt: skip
    rows = pq.read_table(tmp_path / "o.rejects.parquet").to_pylist()
    assert [row["reason"] for row in rows if json.loads(row["record"])["id"] == records[3]["id"]]
    reasons = {json.loads(row["record"])["id"]: row["reason"] for row in rows}
    assert reasons == {
        records[0]["id"]: "constitution: the answer: empty",
        records[1]["id"]: "constitution: critique 1: empty",
        records[2]["id"]: "constitution: revision 1: empty",
        records[3]["id"]: "constitution: has tools, which preference records have not",
        records[4]["id"]: "constitution: the conversation does not end with a turn to answer",
    }, done.stderr


def test_dry_run_and_usage_errors(tmp_path, recipe):
    given = written(tmp_path / "in.parquet", prompts(5))
    with Sampler(answer=answer) as stub:
        more = asked(stub, tmp_path, recipe)
        plan = sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more, "--dry-run")
        assert b": 25 requests (0 more are in the cache)" in plan.stdout and not stub.requests
        judge = ("--judge-url", stub.url, "--judge-model", "judge")
        plan = sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more, *judge, "--dry-run")
        assert b": 30 requests" in plan.stdout and b": 25 requests" in plan.stdout
        sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more)
        plan = sabia("rewrite", given, "-o", tmp_path / "p.parquet", *more, "--dry-run")
        assert b": 0 requests (25 more are in the cache)" in plan.stdout
        for words, message in [
            (("--review", tmp_path / "r.jsonl", "-o", tmp_path / "q"), "--review: not for recipe"),
            (("--on-unfaithful", "keep"), "--on-unfaithful: only for documents"),
        ]:
            done = sabia("rewrite", given, *more, *words, check=False)
            assert done.returncode == 2 and message in done.stderr.decode(), words
    for text, message in {
        "rounds = 0": "rounds = 0 (expected 1 or more)",
        "principles = []": "principles = [] (expected one or more, all different)",
        'principles = ["a", "a"]': "(expected one or more, all different)",
        'revise = "Better?"': "revise = 'Better?' (expected a text with {principle})",
        "min-gain = 2": "min-gain = 2 (expected -1 to 1)",
        "prompt = 'x'": "constitution: key: 'prompt'",
    }.items():
        recipe.write_text(f'base = "constitution"\n[constitution]\n{text}')
        done = sabia("rewrite", given, "--recipe", recipe, check=False)
        assert done.returncode == 2 and message in done.stderr.decode(), text


@pytest.mark.slow
def test_kills_at_random_lose_and_double_nothing(tmp_path, recipe):
    def words(stub, folder):
        return asked(stub, folder, recipe, "--concurrency", 4)

    records = [list(prompts(40, part)) for part in range(3)]
    kills_change_nothing(tmp_path, records, answer, words, 600, 4 * 4)
