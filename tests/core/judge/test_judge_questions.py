"""Judges behind a server: items with conditions, lookups in a table, an auditor."""

import contextlib
import importlib.util
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core.errors import Failed, UsageError
from sabia.core.generate import client
from sabia.core.generate.budget import Budget
from sabia.core.judge import lookup
from sabia.core.judge.judge_file import load_judges
from sabia.core.judge.lookup import LookupTable
from sabia.core.judge.opened_judges import judges_identity, open_panel
from sabia.core.judge.panel import Panel
from sabia.core.judge.rewards import Case, Grader
from sabia.core.judge.rubric import Rubric, parse_rubric
from sabia.core.judge.verdict import Grade
from sabia.core.options.grpo import GrpoOptions

STUB = Path(__file__).parents[2] / "openai_stub.py"
_spec = importlib.util.spec_from_file_location("openai_stub", STUB)
assert _spec is not None and _spec.loader is not None
openai_stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openai_stub)

Answer = Callable[[str], Any]


def asked(text: str) -> str:
    """The item of a request."""
    return re.findall(r'- item "(\w+)"', text)[-1]


def says(text: str, met: bool) -> str:
    return json.dumps({"verdicts": [{"item": asked(text), "evidence": "", "met": met}]})


@contextlib.contextmanager
def panel(
    tmp_path: Path, answers: dict[str, Answer], more: str = "", **given: Any
) -> Iterator[Any]:
    """A panel of judges by name, and their stubs; `more` ends the last judge's table."""
    with contextlib.ExitStack() as stack:
        stubs, text = {}, ""
        for name, answer in answers.items():
            stubs[name] = stack.enter_context(openai_stub.Stub(answer))
            text += f'[{name}]\nurl = "{stubs[name].url}"\nmodel = "{name}-m"\n'
        (tmp_path / "judges.toml").write_text(text + more)
        options = GrpoOptions(
            model="m", reward="rubric", judge=str(tmp_path / "judges.toml"),
            judge_cache=str(tmp_path / "calls"), **given,
        )  # fmt: skip
        opened = stack.enter_context(open_panel(options, Budget()))
        assert opened is not None
        yield opened, stubs, options


def graded(panel: Panel, rubric: Rubric, texts: list[str]) -> list[Grade]:
    cases = [Case([{"role": "user", "content": "q"}], text, rubric=rubric) for text in texts]
    return Grader({"rubric": 1.0}, panel).grade(cases)


CHAIN = parse_rubric(
    [
        {"id": "deep", "text": "is deep", "depends_on": "cites"},
        {"id": "cites", "text": "cites", "depends_on": "short"},
        {"id": "short", "kind": "contains", "reference": "short"},
    ]
)


def test_items_are_asked_once_their_conditions_are_met(tmp_path: Path) -> None:
    def answer(text: str) -> str:
        if "silent" in text:
            return "I cannot say"
        return says(text, asked(text) in text.partition("<response-")[2].partition("</")[0])

    texts = ["short cites deep", "short cites", "short deep", "cites deep", "short silent"]
    with panel(tmp_path, {"one": answer}) as (opened, stubs, _):
        grades = graded(opened, CHAIN, texts)
        questions = [
            asked(json.loads(body)["messages"][1]["content"]) for body in stubs["one"].attempts
        ]
    assert [grade.score for grade in grades] == [1.0, 2 / 3, 1 / 3, 0.0, None]
    verdicts = [[str(verdict) for _, verdict, _ in grade.verdicts] for grade in grades]
    assert verdicts == [
        ["met", "met", "met"], ["unmet", "met", "met"], ["unmet", "unmet", "met"],
        ["unmet", "unmet", "unmet"], ["unknown", "unknown", "met"],
    ]  # fmt: skip
    # the fourth is asked about nothing, the third and fifth only whether they cite
    assert sorted(questions) == ["cites"] * 4 + ["deep"] * 2


def test_judges_follow_their_own_verdicts_and_decide_together(tmp_path: Path) -> None:
    """a: met, met, unmet → met; b: asked of the first two only, met and unmet → a tie."""
    rubric = parse_rubric([{"id": "a", "text": "a"}, {"id": "b", "text": "b", "depends_on": "a"}])
    plan = {"one": {"a": True, "b": True}, "two": {"a": True, "b": False},
            "tri": {"a": False, "b": True}}  # fmt: skip
    answers = {n: lambda text, own=own: says(text, own[asked(text)]) for n, own in plan.items()}
    with panel(tmp_path, answers) as (opened, stubs, _):
        (grade,) = graded(opened, rubric, ["x"])
        assert [stub.requests for stub in stubs.values()] == [2, 2, 1]
    assert [str(verdict) for _, verdict, _ in grade.verdicts] == ["met", "unknown"]
    with panel(tmp_path, answers, judge_combine="mean") as (opened, _, _):
        (grade,) = graded(opened, rubric, ["x"])
    assert grade.score == pytest.approx((1 + 0.5 + 0) / 3)


# -- the auditor


def _auditing(folder: Path, share: float) -> tuple[list[Grade], Any, int]:
    """60 answers, of which 40 are met; the auditor disagrees on 50, 52, 53, 55, 56, 58, 59."""

    def audit(text: str) -> str:
        return says(text, "yes" in text and not re.search(r"\n\w+ 5\d", text))

    folder.mkdir()
    rubric = parse_rubric([{"id": "x", "text": "is good"}])
    answers = {"main": lambda text: says(text, "yes" in text), "second": audit}
    with panel(folder, answers, "audit = true\n", audit_judge=share) as (opened, stubs, _):
        grades = graded(opened, rubric, [f"{'yes' if n % 3 else 'no'} {n}" for n in range(60)])
        return grades, opened, stubs["second"].requests


def test_an_auditor_is_asked_about_a_share_and_decides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, _, asked_ = _auditing(tmp_path / "a", 0.0)
    assert asked_ == 0
    grades, opened, asked_ = _auditing(tmp_path / "b", 1.0)
    assert asked_ == 60 and [g.score for g in grades] == [g.score for g in alone]
    (row,) = opened.agreement.rows()
    assert row["judges"] == ["main", "second"] and row["audit"] and row["verdicts"] == 60
    assert row["agreement"] == pytest.approx(53 / 60)
    expected = (40 * 33 + 20 * 27) / 3600
    assert row["kappa"] == pytest.approx((53 / 60 - expected) / (1 - expected))
    assert "main and second (auditor) agree on 88.3% of 60 verdicts" in capsys.readouterr().err
    some, _, asked_ = _auditing(tmp_path / "c", 0.25)
    assert 5 <= asked_ <= 28
    chosen = [bool(grade.opinions) for grade in some]
    assert sum(chosen) == asked_
    again, _, _ = _auditing(tmp_path / "d", 0.25)
    assert [bool(grade.opinions) for grade in again] == chosen
    more, _, _ = _auditing(tmp_path / "e", 0.6)
    assert all(grade.opinions for grade, before in zip(more, chosen, strict=True) if before)


def test_a_run_goes_on_without_an_auditor_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client.Client.__init__, "__kwdefaults__",
                        client.Client.__init__.__kwdefaults__ | {"backoff_s": 0.001})  # fmt: skip
    rubric = parse_rubric([{"id": "x", "text": "is good"}])
    answers = {"main": lambda text: says(text, True), "second": lambda text: says(text, True)}
    with panel(tmp_path, answers, "audit = true\n", audit_judge=1.0) as (opened, stubs, _):
        stubs["second"].fault = lambda text, attempt: "401"
        assert [g.score for g in graded(opened, rubric, list("abcd"))] == [1.0] * 4
        assert [g.score for g in graded(opened, rubric, list("efgh"))] == [1.0] * 4
        assert stubs["second"].requests <= 4
    assert "auditor second: " in capsys.readouterr().err


def test_an_auditor_does_not_belong_to_the_identity(tmp_path: Path) -> None:
    answers = {"main": lambda text: says(text, True), "second": lambda text: says(text, True)}
    with panel(tmp_path, answers, "audit = true\n") as (_, _, options):
        assert judges_identity(options) == [("main", "main-m", 1.0)]
    with (
        pytest.raises(UsageError, match=r"--audit-judge: .* audit = true"),
        panel(tmp_path, answers, audit_judge=0.5),
    ):
        pass
    text = '[a]\nurl = "http://x/v1"\nmodel = "m"\naudit = true\n'
    for file, reason in (
        (text, "a judge without audit"),
        (text + text.replace("[a]", "[b]").replace('"m"', '"n"'), "auditors a, b"),
        (text.replace("true", "1"), "audit 1 is not true or false"),
        (text + "weight = 2", "an auditor has no weight"),
    ):
        (tmp_path / "j.toml").write_text(file)
        with pytest.raises(UsageError, match=reason):
            load_judges(tmp_path / "j.toml")


# -- lookups

LAWS = [
    ("art. 5", "all are equal before the law"),
    ("art. 6", "education and health are social rights"),
    ("art. 7", "workers have rights to rest and to health"),
    ("Art.  5", "a second text of the same key"),
    ("art. 9", "the right to strike"),
]


def laws(tmp_path: Path, rows: list[tuple[Any, Any]] | None = None) -> Path:
    keys, texts = zip(*(LAWS if rows is None else rows), strict=True)
    table = pa.table({"article": keys, "words": texts})
    pq.write_table(table, tmp_path / "laws.parquet")
    return tmp_path / "laws.parquet"


LOOKUP = 'lookup = "laws.parquet"\nlookup-key = "article"\nlookup-text = "words"\n'


def test_a_query_is_a_key_or_words(tmp_path: Path) -> None:
    table = LookupTable(str(laws(tmp_path)), "article", "words")
    assert [text for _, text in table.search(" ART. 5 ")] == [LAWS[0][1], LAWS[3][1]]
    found = table.search("rights to health")
    assert [key for key, _ in found] == ["art. 7", "art. 6", "art. 9"]
    assert table.search("none here") == [] == table.search("…")


def test_the_order_is_that_of_bm25_in_plain_python(tmp_path: Path) -> None:
    rng = random.Random(3)
    words = [f"w{n}" for n in range(40)]
    rows = [(f"k{n}", " ".join(rng.choices(words, k=rng.randrange(30)))) for n in range(1500)]
    table = LookupTable(str(laws(tmp_path, rows)), "article", "words")
    texts = [[key, *text.split()] for key, text in rows]
    mean = sum(map(len, texts)) / len(texts)
    holding = Counter(word for text in texts for word in set(text))
    for _ in range(20):
        query = rng.choices([*words, "unseen"], k=rng.randrange(1, 5))

        def score(text: list[str], query: list[str] = query) -> float:
            total = 0.0
            for word in set(query):
                n, f = holding[word], text.count(word)
                rarity = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
                total += rarity * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * len(text) / mean))
            return total

        best = sorted((round(score(text), 9) for text in texts), reverse=True)[: lookup.ROWS]
        found = [texts[int(key[1:])] for key, _ in table.search(" ".join(query))]
        assert [round(score(text), 9) for text in found] == [value for value in best if value]


def calls(*queries: Any, name: str = "lookup") -> dict[str, Any]:
    """A message that calls the tool."""
    made = [
        {"id": f"c{n}", "type": "function",
         "function": {"name": name, "arguments": q if isinstance(q, str) and q[:1] == "!" else
                      json.dumps({"query": q})}}
        for n, q in enumerate(queries)
    ]  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": made}


def test_a_judge_looks_things_up_and_every_lookup_is_kept(tmp_path: Path) -> None:
    laws(tmp_path)

    def answer(text: str) -> Any:
        if "equal before" in text:
            return says(text, True)
        return calls("strike", "art. 5") if "right to strike" not in text else says(text, False)

    rubric = parse_rubric([{"id": "x", "text": "is right"}])
    with panel(tmp_path, {"one": answer}, LOOKUP) as (opened, stubs, options):
        (grade,) = graded(opened, rubric, ["art. 5 says so"])
        first, second = stubs["one"].bodies
        assert first["tools"][0]["function"]["name"] == "lookup" and "tool_choice" not in first
        assert [m["role"] for m in second["messages"]] == [
            "system",
            "user",
            "assistant",
            "tool",
            "tool",
        ]
        assert [m["tool_call_id"] for m in second["messages"][3:]] == ["c0", "c1"]
        assert json.loads(second["messages"][4]["content"]) == [
            {"key": "art. 5", "text": LAWS[0][1]}, {"key": "Art.  5", "text": LAWS[3][1]}
        ]  # fmt: skip
        (again,) = graded(opened, rubric, ["art. 5 says so"])
        assert stubs["one"].requests == 2  # both calls are in the cache
        (name, model, weight, digest) = judges_identity(options)[0]
    assert grade.score == 1.0 == again.score
    assert grade.opinions == again.opinions
    assert grade.opinions[0].lookups == [
        {"items": ["x"], "query": "strike", "keys": ["art. 9"]},
        {"items": ["x"], "query": "art. 5", "keys": ["art. 5", "Art.  5"]},
    ]
    assert (name, model, weight) == ("one", "one-m", 1.0)
    assert digest != LookupTable(str(laws(tmp_path, LAWS[:2])), "article", "words").fingerprint


def test_lookups_are_bounded_and_faulty_calls_are_answered(tmp_path: Path) -> None:
    laws(tmp_path, [("long", "word " * 5000)])
    turns = iter([calls("word"), calls("!{", "word", name="lookup"), calls("x", name="other"),
                  calls("a", "b", "c")])  # fmt: skip

    def answer(text: str) -> Any:
        return next(turns, None) or calls("more")

    rubric = parse_rubric([{"id": "x", "text": "is right"}])
    with panel(tmp_path, {"one": answer}, LOOKUP) as (opened, stubs, _):
        (grade,) = graded(opened, rubric, ["fine"])
        bodies = stubs["one"].bodies
    assert grade.score is None  # it went on calling
    made = grade.opinions[0].lookups
    assert [one["query"] for one in made] == ["word", None, "word", None] and len(
        made
    ) == lookup.CALLS
    assert len(bodies) == 4 + 1 and bodies[-1]["tool_choice"] == "none"
    contents = [m["content"] for m in bodies[-1]["messages"] if m["role"] == "tool"]
    assert len(json.loads(contents[0])[0]["text"]) == lookup.CHARACTERS
    assert "expected lookup" in contents[1] and "expected lookup" in contents[3]


@pytest.mark.parametrize("status", ["400", "500"])
def test_a_server_without_tools_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    monkeypatch.setattr(client.Client.__init__, "__kwdefaults__",
                        client.Client.__init__.__kwdefaults__ | {"backoff_s": 0.001})  # fmt: skip
    laws(tmp_path)
    rubric = parse_rubric([{"id": "x", "text": "is right"}])
    with panel(tmp_path, {"one": lambda text: says(text, True)}, LOOKUP) as (opened, stubs, _):
        stubs["one"].fault = lambda text, attempt: f"{status}-tools are not supported"
        with pytest.raises(Failed, match=r"lookup` needs a server with tool calls") as caught:
            graded(opened, rubric, [str(n) for n in range(12)])
    assert str(caught.value).count("needs a server") == 1


def test_a_judge_that_never_looks_anything_up_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    laws(tmp_path)
    rubric = parse_rubric([{"id": "x", "text": "is right"}])
    for texts in (list("ab"), [str(n) for n in range(20)]):
        with panel(tmp_path, {"one": lambda text: says(text, True)}, LOOKUP) as (opened, _, _):
            assert all(grade.score == 1.0 for grade in graded(opened, rubric, texts))
        shown = capsys.readouterr().err
        assert f"one: 0 lookups in {len(texts)} questions" in shown
        assert ("judge one has not looked anything up" in shown) is (len(texts) == 20)


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    answers = {"one": lambda text: says(text, True)}
    for more, reason in (
        ('lookup = "none.parquet"\n', "none.parquet"),
        ('lookup-key = "a"\n', "lookup-key without lookup"),
        (LOOKUP.replace("words", "text"), "no column 'text' among article, words"),
    ):
        laws(tmp_path)
        with pytest.raises(UsageError, match=reason), panel(tmp_path, answers, more):
            pass
