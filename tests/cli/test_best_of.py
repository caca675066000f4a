"""`sabia rewrite --recipe best-of`: samples are graded, the best become chat records."""

import json
import random
import re
from fractions import Fraction

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rewrite_cases import Sampler, fault, kills_change_nothing, sabia, written

QUESTION = re.compile(r"What is (\d+)\+(\d+)\?")


def answer(text):
    """Right in about a third of the samples; some have reasoning before the answer."""
    found = QUESTION.search(text)
    draw = random.Random(text)
    right = int(found[1]) + int(found[2])
    given = right if draw.random() < 0.3 else right + draw.randint(1, 9)
    return draw.choice(["", "<think>Perhaps 7.</think>"]) + f"It is {given}."


def prompts(count, seed=0):
    draw = random.Random(seed)
    for number in range(count):
        a, b = draw.randint(1, 999), draw.randint(1, 999)
        yield {
            "id": f"{seed}-{number}",
            "messages": [{"role": "user", "content": f"What is {a}+{b}?"}],
            "answer": str(a + b),
            "meta": json.dumps({"n": number}),
        }


def expected(record, seeds):
    """The samples of a record: (text without reasoning, whether right)."""
    samples = []
    for seed in seeds:
        text = answer(f"m {seed}\n{record['messages'][0]['content']}")
        text = text.removeprefix("<think>Perhaps 7.</think>")
        samples.append((text, text == f"It is {record['answer']}."))
    return samples


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('base = "best-of"\n[samples]\ncount = 4\nreward = "number"\n')
    return path


def asked(stub, tmp_path, recipe, *more):
    return ("--recipe", recipe, "--engine", "endpoint", "--url", stub.url, "--model", "m",
            "--cache", tmp_path / "cache", *more)  # fmt: skip


def test_the_first_right_sample_is_kept_and_no_call_is_paid_twice(tmp_path, recipe):
    records = list(prompts(100))
    given = written(tmp_path / "in.parquet", records)
    with Sampler(answer=answer, fault=fault, retry_after_s=0.1) as stub:
        out = tmp_path / "out.parquet"
        done = sabia("rewrite", given, "-o", out, *asked(stub, tmp_path, recipe))
        assert sum(stub.delivered.values()) == 400 and stub.early == 0
        sabia("rewrite", given, "-o", out, "--force", *asked(stub, tmp_path, recipe))
        assert sum(stub.delivered.values()) == 400
    made = {row["id"]: row for row in pq.read_table(out).to_pylist()}
    rejected = pq.read_table(tmp_path / "out.rejects.parquet").to_pylist()
    lost = {json.loads(row["record"])["id"] for row in rejected}
    assert not lost & made.keys() and lost | made.keys() == {one["id"] for one in records}
    for record in records:
        samples = expected(record, range(4))
        scores = [float(right) for _, right in samples]
        if record["id"] in lost:
            assert not any(scores)
            continue
        row = made[record["id"]]
        assert row["best_of_scores"] == scores and row["best_of_score"] == 1.0
        assert row["best_of_sample"] == scores.index(1.0)
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert row["messages"][1]["content"] == samples[scores.index(1.0)][0]
        assert row["messages"][1]["reasoning_content"] in (None, "Perhaps 7.")
        assert row["best_of_id"] == row["id"] and row["meta"] == record["meta"]
        assert (row["rewrite_recipe"], row["rewrite_model"]) == ("own", "stub-1")
    assert {row["reason"] for row in rejected} == {
        "best-of: no sample of 4 has a score of 1 or more (the best has 0)"
    }
    assert b"samples: 400 calls" in done.stderr


def test_several_answers_of_a_record_differ(tmp_path, recipe):
    recipe.write_text(recipe.read_text().replace("count = 4", "count = 12\nkeep = 3\nmin-score=0"))
    given = written(tmp_path / "in.parquet", prompts(20))
    with Sampler(answer=answer) as stub:
        sabia("rewrite", given, "-o", tmp_path / "o.parquet", *asked(stub, tmp_path, recipe))
    made = pq.read_table(tmp_path / "o.parquet").to_pylist()
    assert len({row["id"] for row in made}) == len(made) == 60
    for record in prompts(20):
        rows = [row for row in made if row["best_of_id"] == record["id"]]
        scores = [row["best_of_score"] for row in rows]
        assert scores == sorted(scores, reverse=True)
        assert len({row["messages"][-1]["content"] for row in rows}) == 3


@pytest.mark.slow
def test_kills_at_random_lose_and_double_nothing(tmp_path, recipe):
    def words(stub, folder):
        return asked(stub, folder, recipe, "--concurrency", 4)

    records = [list(prompts(40, part)) for part in range(3)]
    kills_change_nothing(tmp_path, records, answer, words, 480, 4 * 4)


def test_shards_pipes_and_one_file_have_the_same_rows(tmp_path, recipe):
    (tmp_path / "in").mkdir()
    for part in range(2):
        written(tmp_path / "in" / f"p{part}.parquet", prompts(30, part))
    with Sampler(answer=answer) as stub:
        more = asked(stub, tmp_path, recipe)
        sabia("rewrite", tmp_path / "in", "-o", tmp_path / "one.parquet", *more)
        for shard in ("0/2", "1/2"):
            sabia("rewrite", tmp_path / "in", "-o", tmp_path / "d", "--shard", shard, *more)
        piped = sabia("rewrite", "--to", "arrow", "--rejects", tmp_path / "r.parquet", *more,
                      input=(tmp_path / "in" / "p0.parquet").read_bytes()).stdout  # fmt: skip
        assert sum(stub.delivered.values()) == 240
    parts = [pq.read_table(tmp_path / "d" / f"part-0000{n}.parquet") for n in range(2)]
    assert pa.concat_tables(parts).equals(pq.read_table(tmp_path / "one.parquet"))
    assert pa.ipc.open_stream(piped).read_all().to_pylist() == parts[0].to_pylist()


def test_judges_of_a_file_grade_by_the_rubric(tmp_path, recipe):
    recipe.write_text(
        'base = "best-of"\n[samples]\ncount = 3\nreward = "rubric"\nmin-score = 0.5\n'
    )
    rubric = json.dumps({"id": "r", "items": [
        {"id": "even", "text": "The number is even.", "weight": 2},
        {"id": "big", "text": "The number is above 900.", "weight": 1},
    ]})  # fmt: skip
    given = written(
        tmp_path / "in.parquet",
        [{k: v for k, v in one.items() if k != "answer"} | {"rubric": rubric}
         for one in prompts(60)],
    )  # fmt: skip

    def judged(text):
        if not text.startswith("judge"):
            return answer(text)
        number = int(re.findall(r"It is (\d+)\.", text)[-1])
        item = "even" if "The number is even" in text else "big"
        met = number % 2 == 0 if item == "even" else number > 900
        return json.dumps({"verdicts": [{"item": item, "evidence": "x", "met": met}]})

    with Sampler(answer=judged, fault=fault, retry_after_s=0.1) as stub:
        judges = tmp_path / "judges.toml"
        judges.write_text("".join(
            f'[j{n}]\nurl = "{stub.url}"\nmodel = "judge-{n}"\n' for n in range(3)
        ))  # fmt: skip
        more = asked(stub, tmp_path, recipe, "--judge", judges, "--judge-cache", tmp_path / "jc")
        sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more)
        paid = sum(stub.delivered.values())
        sabia("rewrite", given, "-o", tmp_path / "o.parquet", "--force", *more)
        assert sum(stub.delivered.values()) == paid
    made = pq.read_table(tmp_path / "o.parquet").to_pylist()
    rejects = pq.read_table(tmp_path / "o.rejects.parquet").num_rows
    assert len(made) + rejects == 60 and len(made) > 20
    for row in made:
        number = int(re.findall(r"\d+", row["messages"][-1]["content"])[-1])
        score = Fraction(2 * (number % 2 == 0) + (number > 900), 3)
        assert row["best_of_score"] == pytest.approx(float(score)) and score >= Fraction(1, 2)
        assert row["best_of_score"] == max(row["best_of_scores"])
        verdicts = {one["id"]: one["verdict"] for one in row["best_of_items"]}
        assert verdicts["even"] == "met"


def test_what_cannot_be_used_is_rejected_with_the_reason(tmp_path, recipe):
    good, no_answer, ended, tools = list(prompts(4))
    del no_answer["answer"]
    ended["messages"] = [*ended["messages"], {"role": "assistant", "content": "7"}]
    tools["tools"] = json.dumps([{"type": "function", "function": {"name": "f"}}])
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(one) + "\n" for one in (good, no_answer, ended, tools)))

    def called(text):
        if tools["messages"][0]["content"] not in text:
            return f"It is {good['answer']}."
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    with Sampler(answer=called) as stub:
        more = asked(stub, tmp_path, recipe)
        sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more)
    assert [row["id"] for row in pq.read_table(tmp_path / "o.parquet").to_pylist()] == [good["id"]]
    rows = pq.read_table(tmp_path / "o.rejects.parquet").to_pylist()
    reasons = {json.loads(row["record"])["id"]: row["reason"] for row in rows}
    assert reasons == {
        no_answer["id"]: "best-of: no answer (reward number needs one)",
        ended["id"]: "best-of: the conversation does not end with a turn to answer",
        tools["id"]: "best-of: no sample of 4 has a score: calls a tool",
    }


def test_dry_run_and_usage_errors(tmp_path, recipe):
    given = written(tmp_path / "in.parquet", prompts(5))
    with Sampler(answer=answer) as stub:
        more = asked(stub, tmp_path, recipe)
        plan = sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more, "--dry-run")
        assert b": 20 requests (0 more are in the cache)" in plan.stdout and not stub.requests
        assert b"calls in all" not in plan.stdout
        cases = [
            (("--temperature", 0), "--temperature: 0 gives 4 equal samples"),
            (("--on-unfaithful", "keep"), "--on-unfaithful: only for documents"),
            (("--judge-url", stub.url, "--judge-model", "j"), "recipe own asks no judge"),
            (("--text-column", "x"), "--text-column: only for documents"),
            (("--recipe", "reason-first", "--judge-url", stub.url, "--judge-model", "j"),
             "--judge: recipe reason-first has no judge"),
        ]  # fmt: skip
        for words, message in cases:
            done = sabia("rewrite", given, *more, *words, check=False)
            assert done.returncode == 2 and message in done.stderr.decode(), words
    done = sabia("rewrite", given, "--recipe", "best-of", check=False)
    assert done.returncode == 2 and b"expected --engine endpoint or local" in done.stderr
    for text, message in {
        "[samples]\ncuont = 3": "samples: key: 'cuont'",
        "[samples]\ncount = 0": "count = 0 (expected 1 or more)",
        "[samples]\nreward = 'nice'": "reward: 'nice' (expected each once of",
        "[samples]\nmin-score = 2": "min-score = 2 (expected 0 to 1)",
        "prompt = 'x'": "key: 'prompt' (expected base or samples)",
    }.items():
        recipe.write_text(f'base = "best-of"\n{text}')
        done = sabia("rewrite", given, "--recipe", recipe, check=False)
        assert done.returncode == 2 and message in done.stderr.decode(), text
    recipe.write_text('base = "best-off"')
    done = sabia("rewrite", given, "--recipe", recipe, check=False)
    assert b"did you mean best-of?" in done.stderr


def test_other_columns_are_carried_through(tmp_path, recipe):
    """Those of all shards; nothing of an earlier run replaces what this one made."""
    (tmp_path / "in").mkdir()
    first, second = list(prompts(40, 0)), list(prompts(40, 1))
    for n, record in enumerate(first):
        record |= {"source": f"s{n}", "tags": [str(n), "x"], "best_of_score": 77.0}
    for n, record in enumerate(second):
        record |= {"weight": n / 4}
    written(tmp_path / "in" / "p0.parquet", first)
    (tmp_path / "in" / "p1.jsonl").write_text("".join(json.dumps(one) + "\n" for one in second))
    with Sampler(answer=answer) as stub:
        sabia("rewrite", tmp_path / "in", "-o", tmp_path / "o", *asked(stub, tmp_path, recipe))
    given = {one["id"]: one for one in (*first, *second)}
    for part in range(2):
        table = pq.read_table(tmp_path / "o" / f"part-0000{part}.parquet")
        assert set(table.column_names) >= {"source", "tags", "weight"} and table.num_rows > 20
        for row in table.to_pylist():
            for name in ("source", "tags", "weight", "answer"):
                assert row[name] == given[row["id"]].get(name)
            assert row["best_of_score"] == 1.0
    kept = pq.read_table(tmp_path / "o" / "part-00000.parquet").num_rows
    rejected = [json.loads(r["record"]) for r in pq.read_table(tmp_path / "o.rejects").to_pylist()]
    assert kept + sum("tags" in r and r["source"] is not None for r in rejected) == 40


def test_the_dry_run_counts_the_calls_of_the_judges(tmp_path, recipe):
    recipe.write_text('base = "best-of"\n[samples]\ncount = 3\nreward = "rubric"\n'
                      'min-score = 0\nmax-tokens = 100\n')  # fmt: skip
    rubric = json.dumps({"id": "r", "items": [
        {"id": "even", "text": "Even.", "weight": 2}, {"id": "big", "text": "Big.", "weight": 1},
        {"id": "is", "text": "", "kind": "regex", "reference": "It", "weight": 1},
    ]})  # fmt: skip
    given = written(tmp_path / "in.parquet", [one | {"rubric": rubric} for one in prompts(7)])

    def reply(text):
        if not text.startswith("judge"):
            return f"It is {hash(text) % 10**9}."
        item = "even" if "Even." in text else "big"
        return json.dumps({"verdicts": [{"item": item, "evidence": "x", "met": True}]})

    with Sampler(answer=reply) as stub:
        judges = tmp_path / "judges.toml"
        judges.write_text("".join(
            f'[j{n}]\nurl = "{stub.url}"\nmodel = "judge-{n}"\nprompt = 0\ncompletion = {n}\n'
            for n in (1, 2)
        ))  # fmt: skip
        prices = tmp_path / "prices.toml"
        prices.write_text("[m]\nprompt = 0\ncompletion = 1000\n")
        more = asked(stub, tmp_path, recipe, "--judge", judges, "--judge-cache", tmp_path / "jc",
                     "--prices", prices, "--judge-votes", 2, "--judge-tokens", 1000)  # fmt: skip

        def plan():
            out = sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more, "--dry-run").stdout
            lines = [one for one in out.decode().splitlines() if one.startswith("call")]
            return lines, [int(re.search(r"([\d,]+) requests", one)[1]) for one in lines]

        lines, counts = plan()
        # 7 records, 3 samples; 2 items with 2 votes each by 2 judges
        assert counts == [21, 84, 84, 189] and not stub.requests
        assert lines[0].startswith("call m at ") and lines[1].startswith("call judge-1 at ")
        # 21 × 100 tokens at $1,000 a million, 84 × 1,000 at $1 and at $2
        assert [one.rpartition("$")[2] for one in lines] == ["2.10", "0.08", "0.17", "2.35"]
        sabia("rewrite", given, "-o", tmp_path / "o.parquet", *more)
        assert stub.requests == 189
        assert plan()[1] == [0, 0, 0, 0]
