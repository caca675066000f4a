"""`sabia eval` where models think aloud, and where items have no answer."""

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import sabia

spec = importlib.util.spec_from_file_location(
    "openai_stub", Path(__file__).parents[1] / "openai_stub.py"
)
openai_stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openai_stub)
Stub = openai_stub.Stub

TASK = """name = "t"
kind = "exact_match"
data = "rows.jsonl"
prompt = "{{q}}"
verifier = "contains"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"id": f"r{i}", "q": f"question {i}", "answer": f"<{i}>"} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.toml").write_text(TASK)
    return tmp_path


def evaluated(folder: Path, *words: object) -> tuple[int, dict, dict, str]:
    """(exit code, results by metric, details by item, stderr) of an evaluation."""
    out = folder / "s.parquet"
    done = sabia("eval", "--task", folder / "t.toml", "-o", out, "--json", *words)
    results = {r["metric"]: r for r in json.loads(done.stdout)["results"]}
    rows = pq.read_table(out).to_pylist()
    details = {row["item_id"]: json.loads(row["detail"]) for row in rows if row["detail"]}
    return done.exit_code, results, details, done.output


def test_what_a_model_only_thinks_is_not_graded(folder: Path) -> None:
    texts = [
        "<think>is it <0>?</think>It is <7>.",
        "so <1> it is</think> Yes: <1>",
        "<think>surely <2>",
        "<think>or <9>?</think><3>",
    ]
    given = [{"id": f"r{i}", "response": text} for i, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    code, results, details, said = evaluated(folder, "--answers", folder / "a.jsonl")
    assert code == 1 and "1 of 4 samples have no score" in said
    result = results["exact_match"]
    assert (result["items"], result["items_without_answer"]) == (3, 1)
    assert result["value_share"] == pytest.approx(2 / 3)
    assert (result["missing_as_wrong_share"], result["missing_as_right_share"]) == (0.5, 0.75)
    assert details["r0"]["response"] == "It is <7>." and "<0>" in details["r0"]["reasoning"]
    assert "inside of the reasoning" in details["r2"]["no_answer"]
    assert evaluated(folder, "--answers", folder / "a.jsonl", "--max-missing", "25%")[0] == 0
    assert evaluated(folder, "--answers", folder / "a.jsonl", "--max-missing", "0.2")[0] == 1


def test_an_answer_that_is_null_and_one_that_is_not_there_are_missing(folder: Path) -> None:
    given = [{"id": "r0", "response": "<0>"}, {"id": "r1", "response": None},
             {"id": "r2", "response": "<2>"}]  # fmt: skip
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    code, results, details, _ = evaluated(folder, "--answers", folder / "a.jsonl")
    assert (code, results["exact_match"]["items_without_answer"]) == (1, 2)
    assert results["exact_match"]["missing_as_wrong_share"] == 0.5
    assert details["r1"]["no_answer"] == "response is null"


@pytest.mark.parametrize(
    ("refused", "reply"),
    [({1}, "400"), ({0, 1, 2}, "400"), ({0, 1, 2, 3}, "400"), ({0, 2}, "403-moderation")],
)
def test_items_that_a_server_refuses_have_no_answer_and_the_others_are_scored(
    folder: Path, refused: set[int], reply: str
) -> None:
    def fault(text: str, _: int) -> str:
        return reply if int(text.split()[-1]) in refused else ""

    def answer(text: str) -> str:
        return f"<{text.split()[-1]}>"

    with Stub(answer, fault) as stub:
        words = ("--model", f"m={stub.url}#m", "--judge-cache", folder / "c", "--concurrency", 1)
        for _ in range(2):  # again with every answer in the cache
            code, results, details, said = evaluated(folder, *words)
            assert code == 1 and f"{len(refused)} of 4 samples have no score" in said
            kind = "exact_match" if len(refused) < 4 else "share"
            assert results[kind]["items_without_answer"] == len(refused)
            assert all(f"HTTP {reply[:3]}" in details[f"r{i}"]["no_answer"] for i in refused)
        assert all(count == 1 for count in stub.delivered.values())
        code, _, _, said = evaluated(folder, *words, "--max-missing", "100%")
        assert code == 0 and "holds these scores already" in said


def test_replies_of_servers_that_think_or_filter(folder: Path) -> None:
    with Stub(lambda text: "<think>hm</think> <0>", finish="content_filter") as stub:
        words = ("--model", f"m={stub.url}#m", "--judge-cache", folder / "c")
        code, results, details, _ = evaluated(folder, *words)
        assert code == 1 and results["share"]["items_without_answer"] == 4
        assert "filter" in details["r0"]["no_answer"]


def test_a_template_that_opens_the_reasoning_is_known_by_the_replies_that_close_it(
    folder: Path,
) -> None:
    def answer(text: str) -> str:
        number = text.split()[-1]
        return f"it may be <{number}>" + ("</think> no" if number == "3" else "")

    with Stub(answer, finish="length") as stub:
        words = ("--model", f"m={stub.url}#m", "--judge-cache", folder / "c")
        code, results, details, _ = evaluated(folder, *words)
        assert code == 1 and results["exact_match"]["items_without_answer"] == 3
        assert results["exact_match"]["value_share"] == 0 and details["r3"]["response"] == "no"


YES = "Reply with the word yes."
CLOSES = "They want yes.</think>yes"
PLAIN, PARSED = "yes", {"content": "yes", "reasoning_content": "They want yes."}


@pytest.mark.parametrize(
    ("probe", "probe_finish", "finish", "closes", "missing"),
    [
        (CLOSES, "stop", "length", False, {"r0", "r1", "r2", "r3"}),  # the template opens it
        (PLAIN, "stop", "length", False, set()),
        (PARSED, "stop", "length", False, {"r0", "r1", "r2", "r3"}),  # the server takes it out
        ("<think>yes?</think>yes", "stop", "length", False, set()),  # the model opens it
        ("yes yes yes", "length", "length", False, set()),  # nothing tells
        (CLOSES, "stop", "stop", True, {"r0", "r1", "r2"}),  # as cut at a stop text
        (PLAIN, "stop", "stop", True, set()),  # a stray mark
        (PLAIN, "stop", "length", True, set()),
        (PARSED, "stop", "stop", False, set()),
        ("yes yes yes", "length", "length", True, {"r0", "r1", "r2"}),
    ],
)
def test_replies_that_may_end_in_reasoning_opened_by_the_prompt(
    folder: Path, probe: object, probe_finish: str, finish: str, closes: bool, missing: set[str]
) -> None:
    def answer(text: str) -> object:
        number = text.split()[-1]
        closed = closes and number == "3"
        return probe if text == YES else f"so <{number}>" + f"</think> <{number}>" * closed

    with Stub(answer, finish=lambda text: probe_finish if text == YES else finish) as stub:
        words = ("--model", f"m={stub.url}#m", "--judge-cache", folder / "c")
        code, results, details, _ = evaluated(folder, *words)
        assert {name for name, detail in details.items() if "no_answer" in detail} == missing
        assert code == (1 if missing else 0)
        if len(missing) < 4:
            assert results["exact_match"]["value_share"] == 1.0
        asked = sum(count for content, count in stub.delivered.items() if YES in content)
        assert asked == (finish == "length" or closes)  # once, and not where replies tell
        evaluated(folder, *words, "--force")
        assert all(count == 1 for count in stub.delivered.values())


def test_replies_cut_after_their_reasoning_are_answers(folder: Path) -> None:
    def answer(text: str) -> dict:
        return {"content": f"so <{text.split()[-1]}>", "reasoning_content": "Which one?"}

    with Stub(answer, finish="length") as stub:
        words = ("--model", f"m={stub.url}#m", "--judge-cache", folder / "c")
        code, results, details, _ = evaluated(folder, *words)
        assert code == 0 and results["exact_match"]["value_share"] == 1.0
        assert details["r0"]["reasoning"] == "Which one?"
        assert not any(YES in content for content in stub.delivered)
