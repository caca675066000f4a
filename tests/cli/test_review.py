"""`sabia rewrite --review` and `--reviewed`: what people decide about new texts."""

import json
import re

import pyarrow.parquet as pq
import pytest
from rewrite_cases import Sampler, written

from sabia.core.errors import BadData
from sabia.core.text.rewrite.review import Reviews

MOVED = "The answer is {0}. First take {1}. Then add {2}."
DOCUMENTS = [
    {"id": f"d{n}", "text": MOVED.format(2 * n, n, n) if n % 2 else f"Nothing to move in {n}."}
    for n in range(12)
]


@pytest.fixture(name="run")
def checked_calls(sabia):
    """A call that ends with a code; what it says on stderr."""

    def run(*words, expected=0):
        done = sabia(*words)
        assert done.returncode == expected, done.stderr.decode()
        return done.stderr.decode()

    return run


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill(path, **decided):
    """Write (verdict, edit, reviewer) into the lines of records."""
    entries = lines(path)
    for entry in entries:
        filled = decided.get(entry["id"], ("", "", ""))
        entry |= dict(zip(("verdict", "edit", "reviewer"), filled, strict=True))
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_verdicts_on_documents_are_applied(run, tmp_path):
    given, out, review = (tmp_path / name for name in ("in.parquet", "out", "review.jsonl"))
    written(given, DOCUMENTS)
    run("rewrite", given, "-o", out, "--review", review)
    entries = lines(review)
    assert [one["id"] for one in entries] == [f"d{n}" for n in range(1, 12, 2)]
    assert entries[0] == {
        "verdict": "", "edit": "", "reviewer": "", "id": "d1",
        "text": "First take 1. Then add 1. The answer is 2.",
        "original": "The answer is 2. First take 1. Then add 1.", "rewrite_verdict": "rewritten",
    }  # fmt: skip
    fill(review, d1=("accept", "", "Ana"), d3=("EDIT", "Better.", "Rui "), d5=("reject", "", "Ana"))
    before = lines(review)
    run("rewrite", given, "-o", out, "--review", review)  # what people wrote is kept
    after = lines(review)
    assert [one | {"verdict": one["verdict"].lower()} for one in before] == [
        one | {"reviewer": one["reviewer"] + " " * (one["id"] == "d3")} for one in after
    ]
    run("rewrite", given, "-o", tmp_path / "final", "--reviewed", review)
    made = {row["id"]: row for row in pq.read_table(tmp_path / "final").to_pylist()}
    assert len(made) == 11 and "d5" not in made
    assert (made["d1"]["review_verdict"], made["d1"]["reviewer"]) == ("accept", "Ana")
    assert made["d1"]["text"] == entries[0]["text"]
    assert [made["d3"][name] for name in ("text", "review_verdict", "reviewer")] == [
        "Better.", "edit", "Rui",
    ]  # fmt: skip
    assert (made["d7"]["review_verdict"], made["d7"]["reviewer"]) == (None, None)
    (lost,) = pq.read_table(tmp_path / "final.rejects").to_pylist()
    assert lost["reason"] == "review: rejected by Ana" and json.loads(lost["record"])["id"] == "d5"
    # other verdicts are another result
    fill(review, d1=("reject", "", "Ana"))
    run("rewrite", given, "-o", tmp_path / "final", "--reviewed", review)
    assert len(pq.read_table(tmp_path / "final")) == 11


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 7: is not JSON"),
        ("[1]", "line 7: has no id or no text"),
        ('{"id": "d1"}', "line 7: has no id or no text"),
        ('{"id": "x", "text": "t", "verdict": "yes"}', "line 7: verdict 'yes' (expected accept"),
        ('{"id": "x", "text": "t", "verdict": "accept"}', "line 7: verdict accept without a rev"),
        ('{"id": "x", "text": "t", "reviewer": "Ana"}', "line 7: verdict ''"),
        ('{"id": "x", "text": "t", "verdict": "edit", "reviewer": "A"}', "edit without an edit"),
        ('{"id": "x", "text": "t", "verdict": "accept", "edit": "b", "reviewer": "A"}',
         "accept with an edit"),
        ('{"id": "x", "text": "t", "verdict": 1}', "line 7: verdict, edit, reviewer are not all"),
        ('{"id": "d1", "text": "a", "verdict": "reject", "reviewer": "B"}',
         "line 7: has another verdict than line 6"),
    ],
)  # fmt: skip
def test_bad_lines_are_named(tmp_path, line, message):
    review = tmp_path / "r.jsonl"
    good = {"id": "d1", "text": "a", "verdict": "accept", "edit": "", "reviewer": "Ana"}
    review.write_text("\n" * 5 + json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(BadData, match=re.escape(f"--reviewed: {review}: line 7")) as failure:
        Reviews("--reviewed", str(review))
    assert message in str(failure.value)


def test_all_bad_lines_are_counted(run, tmp_path):
    given, review = written(tmp_path / "in.parquet", DOCUMENTS), tmp_path / "r.jsonl"
    review.write_text("{\n" * 9)
    said = run("rewrite", given, "-o", tmp_path / "o", "--reviewed", review, expected=65)
    assert "line 5: is not JSON" in said and said.strip().endswith("; and 4 more")
    assert not (tmp_path / "o").exists()


def test_a_verdict_is_never_lost_or_applied_to_another_text(run, tmp_path):
    given, review = written(tmp_path / "in.parquet", DOCUMENTS), tmp_path / "r.jsonl"
    run("rewrite", given, "-o", tmp_path / "out", "--review", review)
    fill(review, d1=("accept", "", "Ana"), d3=("reject", "", "Ana"))
    kept = review.read_text()
    other = written(tmp_path / "other.parquet", DOCUMENTS[2:])
    done = run("rewrite", other, "-o", tmp_path / "p", "--review", review, expected=2)
    assert "line 1 has a verdict on a text that" in done and review.read_text() == kept
    done = run("rewrite", other, "-o", tmp_path / "q", "--reviewed", review)
    assert "1 of the 2 verdicts" in done
    review.write_text(kept.replace("First take 3", "First take 33"))
    done = run("rewrite", given, "-o", tmp_path / "r", "--reviewed", review, expected=65)
    assert "line 2: the text of record d3 is another one now" in done
    for words, message in [
        (("-o", tmp_path / "s", "--review", review, "--shard", "0/2"), "--review: with --shard"),
        (("--reviewed", tmp_path / "none"), "--reviewed: "),
    ]:
        assert message in run("rewrite", given, *words, expected=2)


def test_edits_of_answers_carry_who_made_them(run, tmp_path):
    recipe = tmp_path / "own.toml"
    recipe.write_text('base = "best-of"\n[samples]\ncount = 2\nreward = "number"\nmin-score = 0\n')
    records = [
        {"id": f"p{n}", "messages": [{"role": "user", "content": f"Is it {n}?"}], "answer": str(n)}
        for n in range(6)
    ]
    given, review = written(tmp_path / "in.parquet", records), tmp_path / "r.jsonl"

    def answer(text):
        return f"<think>Hm.</think>It is {re.findall(r'[0-9]+', text)[-1]}."

    with Sampler(answer=answer) as stub:
        words = ("--recipe", recipe, "--engine", "endpoint", "--url", stub.url, "--model", "m",
                 "--cache", tmp_path / "cache", "-o", tmp_path / "o.parquet")  # fmt: skip
        run("rewrite", given, *words, "--review", review)
        first = lines(review)[0]
        assert first["conversation"] == [{"role": "user", "content": "Is it 0?"}]
        assert (first["text"], first["best_of_score"]) == ("It is 0.", 1.0)
        fill(review, p0=("edit", "It is zero.", "Ana"), p1=("reject", "", "Rui"))
        run("rewrite", given, *words, "--reviewed", review)
        assert sum(stub.delivered.values()) == 12  # nothing is paid twice
    made = {row["id"]: row for row in pq.read_table(tmp_path / "o.parquet").to_pylist()}
    assert made.keys() == {"p0", "p2", "p3", "p4", "p5"}
    turn = made["p0"]["messages"][-1]
    assert (turn["content"], turn["reasoning_content"]) == ("It is zero.", "Hm.")
    assert (made["p0"]["review_verdict"], made["p0"]["reviewer"]) == ("edit", "Ana")
    assert made["p2"]["messages"][-1]["content"] == "It is 2." and made["p2"]["reviewer"] is None
