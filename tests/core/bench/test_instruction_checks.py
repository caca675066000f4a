"""Instruction checks: verdicts by hand for each id, strict and loose shares, tasks with them."""

import json
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.bench.checks.capitu_checks import CAPITU_CHECKS
from sabia.core.bench.checks.instruction_checks import (
    CHECKS,
    check_scores,
    checks_text,
    follows,
    variants,
)
from sabia.core.bench.result_summary import summarise
from sabia.core.bench.score_rows import Score, from_batch
from sabia.core.bench.task import task_from
from sabia.core.errors import BadData, UsageError

BLANKS = "\t" * 200_000 + "x"
FEW, MANY = {"relation": "less than"}, {"relation": "at least"}
# name, arguments, texts that pass, texts that do not
CASES = [
    ("keywords:existence", {"keywords": ["rio", "Mar"]}, ["O mar e o RIO"], ["o rio"]),
    ("keywords:frequency", MANY | {"keyword": "rio", "frequency": 2}, ["rio, Rios"], ["rio"]),
    ("keywords:forbidden_words", {"forbidden_words": ["mar", "c"]}, ["amar"], ["O Mar.", "a c"]),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 2, "let_relation": "less than"},
     ["a b"], ["Aa"]),
    ("language:response_language", {"language": "pt"},
     ["As pessoas andam ao longo do rio com os seus cães."],
     ["People walk along the river with their dogs all day."]),
    ("length_constraints:number_sentences", MANY | {"num_sentences": 2},
     ["Vim. Vi.", "O Dr. Assis veio. Foi."], ["O Dr. Assis veio."]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ["um *** dois", "***um***dois***"], ["um\n\ndois", "um *** *** dois"]),
    ("length_constraints:number_words", FEW | {"num_words": 3}, ["um dois"], ["um dois três"]),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Dois"},
     ["um\n\n'dois, e", "um\n\n\n\ndois"][:1], ["um\n\ndoisx", "um", "um\n\ndois\n\ntrês"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2},
     ["[a] [[b]"], ["[a]", "[a\n] [b]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["x\np. s. y"], ["PS y"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2},
     ["* a\n  - b"], ["* a", "** a\n** b"]),
    ("detectable_format:constrained_response", {}, ["So: My answer is no."], ["my answer is no."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1},
     ["um *dois* três"], ["um ** dois", "* a\n* b"]),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     ["Section 1 a\nSection2 b"], ["Section 1", "SECTION 1 SECTION 2"]),
    ("detectable_format:json_format", {}, ['```json\n{"a": 1}\n```', "[1]"], ["{", "[" * 99_999]),
    ("detectable_format:title", {}, ["x <<a>> y"], ["<<>>", "<< >>", "<<a\n>>"]),
    ("combination:two_responses", {}, ["um******dois"], ["um******um", "um", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Diga oi."}, ["diga OI. Oi"], ["Oi"]),
    ("startend:end_checker", {"end_phrase": "Fim."}, ['"É o fim."\n'], ["Fim"]),
    ("startend:quotation", {}, ['"oi"'], ['"', 'oi"']),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     ["UM DOIS três"], ["UM Dois"]),
    ("change_case:english_capital", {},
     ["PEOPLE WALK ALONG THE RIVER WITH THEIR DOGS ALL DAY."],
     ["AS PESSOAS ANDAM AO LONGO DO RIO COM OS SEUS CÃES.", "People walk along the river."]),
    ("change_case:english_lowercase", {},
     ["people walk along the river with their dogs all day."],
     ["as pessoas andam ao longo do rio com os seus cães.", "People walk along the river."]),
    ("punctuation:no_comma", {}, ["um e dois"], ["um, dois"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "right", "wrong"), CASES, ids=[c[0] for c in CASES])
def test_each_id(name: str, given: dict, right: list[str], wrong: list[str]) -> None:
    assert [follows(name, given, text) for text in right] == [True] * len(right)
    assert [follows(name, given, text) for text in wrong] == [False] * len(wrong)
    assert not follows(name, given, " \n")


def test_the_cases_are_all_25() -> None:
    own = set(CHECKS) - set(CAPITU_CHECKS)
    assert {case[0] for case in CASES} == own and len(own) == 25


def test_loose_texts_lack_the_first_line_the_last_and_asterisks() -> None:
    assert set(variants("*a*\nb\nc")) == {"*a*\nb\nc", "b\nc", "*a*\nb", "b", "a\nb\nc", "a\nb"}


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("keywords:frequency", {"keyword": "a"}, "no argument"),
        ("keywords:existence", {"keywords": "a"}, "a list of texts"),
        ("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "exactly"}, "at least"),
        ("length_constraints:number_words", MANY | {"num_words": "3"}, "arguments"),
        ("unknown:id", {}, "no check 'unknown:id'"),
    ],
)
def test_bad_checks_are_named(name: str, given: dict, said: str) -> None:
    with pytest.raises(BadData, match=said):
        follows(name, given, "a b")


@pytest.mark.parametrize(
    ("names", "arguments", "said"),
    [
        (None, [], "equal lists"),
        ([], [], "equal lists"),
        (["punctuation:no_comma"], [], "equal lists"),
        ([["a"]], [{}], "no check"),
        (["unknown:id"], [{}], "no check 'unknown:id'"),
        (["punctuation:no_comma"], ["x"], "expected an object"),
        (["contains"], [{"reference": None}], "no argument 'reference'"),
        (["keywords:existence"], [None], "no argument 'keywords'"),
    ],
)
def test_rows_with_bad_checks_are_refused(names: object, arguments: object, said: str) -> None:
    with pytest.raises(BadData, match=said):
        checks_text(names, arguments)


def test_a_long_run_of_blanks_takes_little_time() -> None:
    started = time.process_time()
    assert follows("length_constraints:number_sentences", MANY | {"num_sentences": 1}, BLANKS)
    assert time.process_time() - started < 5  # 50 s with a run of this length as it is


def test_values_by_prompt_and_by_check() -> None:
    checks = [["punctuation:no_comma", {}], ["startend:quotation", {}],
              ["contains", {"reference": "rio"}], ["json", {"reference": ""}]]  # fmt: skip
    values, detail = check_scores(json.dumps(checks), 'Eis:\n"o rio"')
    assert detail == {"failed": ["startend:quotation", "json"]}
    strict = {"exact_match": 0.0, "checks.0": 2.0, "checks.1": 4.0}
    loose = {"exact_match,loose": 1.0, "checks.0,loose": 4.0, "checks.1,loose": 4.0}
    assert values == strict | loose


ROWS = [
    {"key": 1, "prompt": "a", "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
     "kwargs": [{"num_words": None}, {}], "response": '"um e dois"'},
    {"key": 2, "prompt": "b", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}],
     "response": "Sim,\nclaro"},
    {"key": 3, "prompt": "c", "instruction_id_list": ["length_constraints:number_words"],
     "kwargs": [{"num_words": 3, "relation": "at least"}], "response": "um"},
]  # fmt: skip
KEYS = {"name": "form", "kind": "exact_match", "data": "rows.jsonl", "id": "key",
        "prompt": "{{prompt}}", "chat": True, "checks": "instruction_id_list",
        "check_arguments": "kwargs"}  # fmt: skip


def test_a_task_in_the_form_of_ifeval(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in KEYS.items())
    (tmp_path / "task.toml").write_text(text)
    answers = [{"id": row["key"], "response": row["response"]} for row in ROWS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    stage("eval", task=(f"{tmp_path}/task.toml",), answers=(f"m={tmp_path}/a.jsonl",),
          out=f"{tmp_path}/s.parquet")  # fmt: skip
    table = pq.read_table(tmp_path / "s.parquet").to_batches()
    scores = [row for batch in table for row in from_batch(batch, "") if isinstance(row, Score)]
    found = {r.metric: r.interval.value for r in summarise(scores).results}
    assert found == pytest.approx({"exact_match": 1 / 3, "exact_match,loose": 2 / 3,
                                   "checks": 2 / 4, "checks,loose": 3 / 4})  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"answer": "x"}, "answer has no effect with checks"),
        ({"verifier": "number"}, "verifier has no effect with checks"),
        ({"metric": "f1"}, "f1 has no effect with checks"),
        ({"checks": "", "metric": "checks"}, "metric checks needs checks"),
        ({"kind": "rubric"}, "has no effect in a task of kind rubric"),
    ],
)
def test_keys_that_do_nothing_are_refused(more: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        task_from(KEYS | more)
