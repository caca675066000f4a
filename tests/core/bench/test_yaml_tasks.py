"""YAML tasks: files, includes, data, prompts, filters and scores, on files made here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sabia.core.bench.answers import Answer
from sabia.core.bench.harness.filters import pipelines
from sabia.core.bench.harness.scores import score_answers, score_pairs
from sabia.core.bench.items import Item, by_context
from sabia.core.bench.task_files import items_of, load_tasks
from sabia.core.errors import BadData, UsageError

ROWS = [
    {"q": f"{n} mais {n}?", "options": [str(n), str(2 * n), "não"], "gold": 1, "text": f"{2 * n}"}
    for n in range(1, 9)
]
CHOICES = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Pergunta: {{q}}\\nResposta:"
doc_to_choice: options
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TEXTS = """
task: told
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
doc_to_text: "{{q}}"
doc_to_target: text
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def file(text: str, name: str = "task.yaml") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return file


def items(path: Path, **given: Any) -> list[Item]:
    (task,) = load_tasks([str(path)], **given)
    return items_of(task)


def test_a_choice_task_pairs_a_context_with_each_choice(write: Write) -> None:
    first = items(write(CHOICES))[0]
    context = "Pergunta: 1 mais 1?\nResposta:"
    assert first.pairs == ((context, " 1"), (context, " 2"), (context, " não"))
    assert first.gold == 1 and first.id == "0" and first.query == context


def test_examples_come_once_the_row_itself_is_left_out_and_the_description_is_first(
    write: Write,
) -> None:
    more = "num_fewshot: 2\nfewshot_split: test\nfewshot_config: {sampler: first_n}\n"
    more += 'description: "Some.\\n\\n"\nfewshot_delimiter: "\\n--\\n"\ntarget_delimiter: "="\n'
    made = items(write(CHOICES + more))
    shot = "Pergunta: {0} mais {0}?\nResposta:={1}\n--\n"
    two, three = shot.format(2, 4), shot.format(3, 6)
    assert made[0].text == f"Some.\n\n{two}{three}Pergunta: 1 mais 1?\nResposta:"
    assert made[5].text.startswith(f"Some.\n\n{shot.format(1, 2)}{two}Pergunta: 6")
    assert made[5].pairs[1][1] == "=12"


def test_drawn_examples_differ_from_row_to_row_and_by_seed(write: Write) -> None:
    (task,) = load_tasks([str(write(CHOICES + "num_fewshot: 3\nfewshot_split: test\n"))])
    texts = [item.text for item in items_of(task)]
    assert texts == [item.text for item in items_of(task)]
    assert len({text.rsplit("Pergunta", 1)[0] for text in texts}) == len(texts)
    assert texts != [item.text for item in items_of(task, seed=1)]
    for row, text in zip(ROWS, texts, strict=True):
        assert text.count(str(row["q"])) == 1


def test_a_prefix_of_the_answer_gets_a_space_where_it_needs_one(write: Write) -> None:
    more = 'num_fewshot: 1\nfewshot_config: {samples: [{q: "x:", text: "y"}]}\n'
    made = items(write(TEXTS + more + 'gen_prefix: "Logo"\n'))
    assert made[0].text == "x: Logo y\n\n1 mais 1? Logo"
    made = items(write(TEXTS + more + 'gen_prefix: "Logo "\n'))
    assert made[0].text == "x: Logo y\n\n1 mais 1? Logo "


def test_contexts_that_differ_share_one_continuation(write: Write) -> None:
    text = CHOICES.replace('"Pergunta: {{q}}\\nResposta:"', "gold").replace(
        "doc_to_target: gold", "doc_to_target: q"
    )
    first = items(write(text))[0]
    assert first.pairs == (("1", " 1 mais 1?"), ("2", " 1 mais 1?"), ("não", " 1 mais 1?"))
    assert first.gold == 1 and len(by_context(first)) == 3


def test_mutual_information_asks_for_choices_without_a_context(write: Write) -> None:
    (task,) = load_tasks([str(write(CHOICES + "  - metric: acc_mutual_info\n"))])
    item = items_of(task)[0]
    assert [context for context, _ in by_context(item)] == ["Pergunta: 1 mais 1?\nResposta:", ""]
    # choice 0 is likeliest, but gains least from the context; per character "não" is the likeliest
    scored = [(x, False) for x in (-1.0, -2.0, -2.1, -0.5, -4.0, -3.0)]
    values = {row.metric: row.value for row in score_pairs(task, "m", item, scored)}
    assert values == {"acc": 0, "acc_norm": 0, "acc_mutual_info": 1}


def test_log_likelihoods_of_texts_with_greedy_flags(write: Write) -> None:
    text = TEXTS + "output_type: loglikelihood\n"
    (task,) = load_tasks([str(write(text))])
    item = items_of(task)[0]
    assert item.pairs == (("1 mais 1?", "2"),)
    rows = score_pairs(task, "m", item, [(-3.5, True)])
    values = {row.metric: row.value for row in rows}
    assert values == {"acc": 1, "loglikelihood_nats": -3.5, "targets": 1}


FILTERS = """
generation_kwargs: {until: ["\\n"], max_gen_toks: 9, do_sample: true, temperature: 0.5}
repeats: 3
filter_list:
  - name: first
    filter:
      - {function: regex, regex_pattern: "(\\\\d+)|(um)", group_select: -1}
      - {function: take_first}
  - name: vote
    filter:
      - {function: regex, regex_pattern: "\\\\d+", fallback: "?"}
      - {function: majority_vote}
      - {function: take_first}
metric_list:
  - {metric: exact_match, ignore_punctuation: true, ignore_case: true}
"""


def test_filters_score_the_same_answers_each_in_its_way(write: Write) -> None:
    (task,) = load_tasks([str(write(TEXTS + FILTERS))])
    assert (task.samples, task.temperature, task.max_new_tokens) == (3, 0.5, 9)
    assert task.stop == ("\n",) and task.metric == "exact_match,first"
    item = items_of(task)[3]
    texts = ["é 5 ou um", "8", "são 8!"]
    rows = score_answers(task, "m", [(item, Answer(item.id, n, t)) for n, t in enumerate(texts)])
    assert {row.metric: row.value for row in rows} == {
        "exact_match,first": 0.0,
        "exact_match,vote": 1.0,
    }
    assert rows[0].detail["filtered"] == {"first": "um", "vote": "8"}
    assert rows[0].detail["responses"] == texts


def test_greedy_repeats_are_generated_once(write: Write) -> None:
    text = TEXTS + FILTERS.replace("do_sample: true, temperature: 0.5", "do_sample: false")
    (task,) = load_tasks([str(write(text))])
    assert task.samples == 1
    item = items_of(task)[1]
    (row, _) = score_answers(task, "m", [(item, Answer(item.id, 0, "quatro: 4"))])
    assert row.value == 1.0


@pytest.mark.parametrize(
    ("ignored", "answer", "gold", "equal"),
    [
        ("", "Dois", "dois", 0), ("ignore_case: true", "Dois", "dois", 1),
        ("ignore_punctuation: true", "a, b!", "a b", 1), ("ignore_numbers: true", "x12", "x", 1),
        ('regexes_to_ignore: [",", "(?s).*#### "]', "1,024", "x\n#### 1024", 1),
        ('regexes_to_ignore: ["\\\\.$"]', "7.", "7", 1), ("", "7.", "7", 0),
    ],
)  # fmt: skip
def test_exact_match_ignores_what_it_is_told_to(
    write: Write, ignored: str, answer: str, gold: str, equal: int
) -> None:
    entry = f"metric_list: [{{metric: exact_match, {ignored}}}]\n" if ignored else ""
    (task,) = load_tasks([str(write(TEXTS + entry))])
    item = Item("0", gold=gold)
    (row,) = score_answers(task, "m", [(item, Answer("0", 0, answer))])
    assert row.value == equal


def test_of_several_right_answers_any_counts(write: Write) -> None:
    (task,) = load_tasks([str(write(TEXTS))])
    values = [
        score_answers(task, "m", [(Item("0", gold=gold), Answer("0", 0, "b"))])[0].value
        for gold in (["a", "b"], ["a", "c"])
    ]
    assert values == [1, 0]


@pytest.mark.parametrize(
    ("answer", "found"),
    [("a resposta é #### 2", "2"), ("creio que DOIS IRMÃOS.", "(B)"), ("assim: C", "(C)"),
     ("nada", "[invalid]"), ("é dois", "(A)")],
)  # fmt: skip
def test_the_letter_of_a_choice_is_found_in_turn(write: Write, answer: str, found: str) -> None:
    step = "{function: multi_choice_regex, ignore_case: true, ignore_punctuation: true}"
    text = TEXTS + f"filter_list: [{{name: f, filter: [{step}, {{function: take_first}}]}}]\n"
    (task,) = load_tasks([str(write(text))])
    choose = pipelines(task.yaml)["f"]
    assert choose([answer], {"choices": ["Dois", "Dois irmãos", "Três"]}) == found


def test_includes_are_replaced_key_by_key(write: Write, tmp_path: Path) -> None:
    write(CHOICES, "_base")
    write('include: _base\ndescription: "D: "\ntask: middle\n', "middle.yml")
    path = write("include: middle.yml\ntask: last\ntag: [a, b]\n", "last.yaml")
    (task,) = load_tasks([str(path)])
    assert task.name == "last" and items_of(task)[0].text.startswith("D: Pergunta: 1")
    group = write("group: both\ntask: [last, middle]\n", "all.yaml")
    names = [task.name for task in load_tasks([str(tmp_path)])]
    assert names == ["last", "middle"]
    assert [task.name for task in load_tasks([str(group)])] == ["last", "middle"]
    write("include: other.yaml\ntask: x\n", "loop.yaml")
    write("include: loop.yaml\n", "other.yaml")
    with pytest.raises(UsageError, match="includes itself"):
        load_tasks([str(tmp_path / "loop.yaml")])


def test_data_is_given_by_path_or_read_from_a_cache(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = CHOICES.replace("dataset_path: json", "dataset_path: some/set\ndataset_name: main")
    path = write(text.replace("dataset_kwargs: {data_files: {test: rows.jsonl}}\n", ""))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with pytest.raises(UsageError, match=r"some/set is not in the local cache.*--data sums=PATH"):
        items(path)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    folder = tmp_path / "home/hub/datasets--some--set/snapshots/abc/main"
    folder.mkdir(parents=True)
    (folder / "test-00000-of-00001.jsonl").write_text("\n".join(lines[:3]))
    (folder / "latest.jsonl").write_text("{}")
    assert len(items(path)) == 3
    assert len(items(path, data=[f"sums={tmp_path / 'rows.jsonl'}"])) == 8
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "test.jsonl").write_text("\n".join(lines[:2]))
    assert len(items(path, data=[f"some/set={tmp_path / 'two'}"])) == 2
    with pytest.raises(UsageError, match="summs is neither"):
        items(path, data=["summs=x"])


def test_code_runs_only_if_it_is_trusted(write: Write, tmp_path: Path) -> None:
    write("def shout(row):\n    return row['q'].upper()\n", "code.py")
    path = write(CHOICES.replace('"Pergunta: {{q}}\\nResposta:"', "!function code.shout"))
    with pytest.raises(UsageError, match=r"code.shout is Python code.*--trust-task-code"):
        items(path)
    assert items(path, trust=True)[0].text == "1 MAIS 1?"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CHOICES + "doc_to_txt: q\n", "no key 'doc_to_txt'.*did you mean doc_to_text"),
        (CHOICES + "doc_to_image: q\n", "doc_to_image is not supported"),
        (CHOICES + "process_results: code\n", "process_results is not supported"),
        (CHOICES.replace("rows.jsonl}", "rows.jsonl}, field: x"), "dataset_kwargs: field"),
        (CHOICES + "  - metric: f2\n", "metric f2 is not one of"),
        (CHOICES + "  - {metric: acc_bytes, aggregation: median}\n", "aggregation median"),
        (CHOICES + "  - {metric: acc_bytes, higher_is_better: false}\n", "higher_is_better"),
        (CHOICES + "fewshot_config: {sampler: balanced}\n", "sampler 'balanced'"),
        (CHOICES + "fewshot_config: {fewshot_indices: [1]}\n", "fewshot_indices is not supported"),
        (TEXTS + "generation_kwargs: {num_beams: 4}\n", "num_beams is not supported"),
        (TEXTS + "filter_list: [{name: x, filter: [{function: zap}]}]\n", "function 'zap'"),
        (TEXTS + "filter_list: [{name: x, filter: [{function: regex, pattern: x}]}]\n", "pattern"),
        (TEXTS + "filter_list: [{filter: []}]\n", "expected name and filter"),
        (TEXTS + "num_fewshot: many\n", "num_fewshot = 'many'"),
        (TEXTS + "output_type: logits\n", "output_type 'logits'"),
        (TEXTS.replace("test_split: test\n", ""), "no test_split"),
        (TEXTS.replace("doc_to_target: text\n", ""), "no doc_to_target"),
        ("task: [a\n", "not YAML"),
        ("- a\n", "expected the keys of a task"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(write: Write, text: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        load_tasks([str(write(text))])


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (("{{q}}", "{{question}}"), "row 0: template .*question.* is undefined"),
        (("doc_to_choice: options", "doc_to_choice: q"), "expected a list of texts"),
        (("doc_to_choice: options", 'doc_to_choice: "{{q}}"'), "which is not a list"),
        (("test_split: test", "test_split: test\nnum_fewshot: 9"), "8 rows for 9"),
    ],
)
def test_rows_that_a_template_does_not_fit_are_named(
    write: Write, changed: tuple[str, str], error: str
) -> None:
    with pytest.raises(BadData, match=error):
        items(write(CHOICES.replace(*changed)))
