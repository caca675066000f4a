"""What `pretrain --compare` scores, and what it says about cost."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.bench.seed_noise import OPEN, Look, Rule
from sabia.core.errors import BadData, UsageError
from sabia.core.recipes.comparison import candidates, compare, verdicts
from sabia.core.recipes.comparison.measures import Measure, held_out, of_tasks
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.token_rows import read_token_rows

ROWS = [
    {"id": f"{n}", "q": f"{n} mais {n}?", "options": [f"{n}", f"{2 * n}"], "gold": 1,
     "text": f"são {2 * n}", "of": "par" if n % 2 else "ímpar"}
    for n in range(1, 9)
]  # fmt: skip
HEAD = 'data = "rows.jsonl"\n'
ASKED = f'{HEAD}prompt = "{{{{q}}}}"\n'
TASKS = {
    "choices.toml": f'name = "choices"\nkind = "multiple_choice"\n{ASKED}choices = "options"\n'
    'answer = "gold"\ncluster = "of"\n',
    "exact.toml": f'name = "exact"\nkind = "exact_match"\n{ASKED}answer = "text"\n',
    "chat.toml": f'name = "chat"\nkind = "exact_match"\n{ASKED}answer = "text"\nchat = true\n',
    "rubric.toml": f'name = "rubric"\nkind = "rubric"\n{ASKED}rubric = "options"\n',
    "told.yaml": "task: told\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}"
    "\ntest_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\n"
    "doc_to_choice: options\ndoc_to_target: gold\nmetric_list:\n  - metric: acc\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tasks")
    train_bpe(["quantos são dois mais três? 0123456789"] * 4, 300).save(root / "tokenizer")
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in TASKS.items():
        (root / name).write_text(text)
    return root


def measure(folder: Path, name: str, context: int = 64) -> Measure:
    (made,) = of_tasks([str(folder / name)], [], str(folder / "tokenizer"), context, 0)
    return made


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("choices.toml", [f" {2 * n}" for n in range(1, 9)]),
        ("exact.toml", [f" são {2 * n}" for n in range(1, 9)]),
        ("told.yaml", [f" {2 * n}" for n in range(1, 9)]),
    ],
)
def test_right_answers_are_scored_after_their_prompts(
    folder: Path, name: str, answers: list[str]
) -> None:
    made, tokenizer = measure(folder, name), load_tokenizer(folder / "tokenizer")
    assert made.sizes.tolist() == [len(text.encode()) for text in answers]
    for row, source, answer in zip(made.rows, ROWS, answers, strict=True):
        text = tokenizer.decode(list(row.ids))
        assert text.endswith(source["q"] + answer)
        assert tokenizer.decode(list(row.ids[-row.scored :])) == answer
    groups = 2 if name == "choices.toml" else 8
    assert len(np.unique(made.clusters)) == groups


@pytest.mark.parametrize("name", ["chat.toml", "rubric.toml"])
def test_a_task_without_an_answer_in_text_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no answer in text"):
        measure(folder, name)


def test_long_prompts_are_cut_with_a_warning(folder: Path, capsys: Any) -> None:
    measure(folder, "exact.toml", context=8)
    assert "8 of 8 prompts cut on the left to 8 tokens" in capsys.readouterr().err


def token_rows(mask: list[bool] | None = None, length: int = 6) -> Any:
    """Two rows: documents of 2, 3 and 1 tokens, and one of `length`."""
    columns = {"input_ids": [[1, 2, 3, 4, 5, 6, 0], [*range(1, length + 1)]],
               "document_lengths": [[2, 3, 1], [length]]}  # fmt: skip
    kinds = {name: pa.list_(pa.int32()) for name in columns}
    arrays = {name: pa.array(column, kinds[name]) for name, column in columns.items()}
    if mask is not None:
        arrays["loss_mask"] = pa.array([mask, [True] * length], pa.list_(pa.bool_()))
    return read_token_rows([pa.RecordBatch.from_pydict(arrays)])


def test_documents_of_held_out_rows_are_items() -> None:
    made = held_out(token_rows(), 16)
    # the document of one token predicts nothing
    assert [row.ids for row in made.rows] == [(1, 2), (3, 4, 5), (1, 2, 3, 4, 5, 6)]
    assert made.sizes.tolist() == [row.scored for row in made.rows] == [1, 2, 5]
    scored: list[Any] = []
    scorer: Any = SimpleNamespace(
        score=lambda rows: scored.extend(rows) or [np.array([-float(len(r[0].ids))]) for r in rows]
    )
    assert made.losses(scorer).tolist() == [2, 3, 6]
    assert made.score(np.array([2.0, 3, 6])) == pytest.approx(11 / 8)


def test_parts_of_a_document_in_two_rows_are_one_cluster(folder: Path) -> None:
    end = load_tokenizer(folder / "tokenizer").eos_id
    # whole; begun, and its last token alone; begun, and going on over a row; whole
    documents = [[5, end], [6, 7], [end], [5, 6], [7, 8, 9], [10, end], [11, end]]
    columns = {"input_ids": documents, "document_lengths": [[len(ids)] for ids in documents]}
    kinds = pa.schema([(name, pa.list_(pa.int32())) for name in columns])
    rows = read_token_rows([pa.RecordBatch.from_pydict(columns, kinds)])
    made = held_out(rows, 16, str(folder / "tokenizer"))
    assert [len(row.ids) for row in made.rows] == [2, 2, 2, 3, 2, 2]
    assert made.clusters.tolist() == [0, 1, 2, 2, 2, 3]
    assert held_out(rows, 16).clusters.tolist() == [*range(6)]  # without a tokenizer
    unmarked = held_out(token_rows(), 16, str(folder / "tokenizer"))
    assert unmarked.clusters.tolist() == [0, 1, 2]


def test_documents_that_cannot_be_scored_are_refused() -> None:
    with pytest.raises(BadData, match="only some tokens have a loss"):
        held_out(token_rows([True, True, True, False, True, True, False]), 16)
    with pytest.raises(BadData, match="a document of 20 tokens"):
        held_out(token_rows(length=20), 16)


def test_names_are_short_and_differ() -> None:
    assert candidates.names_of(["a/web/", "b/edu.parquet"]) == ["web", "edu"]
    assert candidates.names_of(["a/tokens", "b/tokens/", "c"]) == ["tokens-1", "tokens-2", "c"]


def report(monkeypatch: pytest.MonkeyPatch, price: float, device: str) -> verdicts.Report:
    monkeypatch.setattr(verdicts, "device_name", lambda _backend: device)
    monkeypatch.setattr(verdicts.Report, "seconds", 1800.0)
    monkeypatch.setattr(verdicts.Report, "first", "a")
    job: Any = SimpleNamespace(backend="torch")
    options: Any = SimpleNamespace(price=price, delta=0.01, confidence=0.95)
    runs: Any = None
    return verdicts.Report(job, options, runs, 100, [])


def test_cost_is_that_of_the_runs_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report(monkeypatch, 2.5, "cpu").cost(3) == (3.0, 7.5)
    assert report(monkeypatch, 0.0, "cpu").cost(3) == (3.0, None)
    known = report(monkeypatch, 0.0, "NVIDIA H100 80GB HBM3")
    assert known.price and known.cost(3) == (3.0, pytest.approx(3 * known.price))
    items: Any = SimpleNamespace(name="held-out loss")
    look = Look(3, 0.01, -0.02, 0.04, 0.01, 0.01, 0.001, OPEN, 4, 2.5)
    said = known.sentence(verdicts.Comparison("b", items, [look]))
    assert "8 more runs with 2.5 × the held-out items, 4h, $" in said
    look = Look(3, 0.01, -0.02, 0.04, 0.01, 0.01, 0.001, OPEN, None)
    said = known.sentence(verdicts.Comparison("b", items, [look]))
    assert said.endswith("more than 1,000 runs of each are needed")


def test_all_comparisons_share_the_error_and_decided_ones_train_no_more() -> None:
    """Of four candidates two are told from the first at once; all looks are at 0.05 / 6."""
    rng, trained = np.random.default_rng(0), {}
    items = Measure("m", "nats", 1.0, (), np.zeros(0), np.ones(30), np.arange(30))
    gaps = {"a": 0.0, "b": 0.5, "c": 0.001, "d": -0.5}

    def losses(candidate: Any, seed: int) -> list[np.ndarray]:
        score = gaps[candidate.name] + 0.003 * np.random.default_rng(seed).normal()
        made = [np.exp(score + rng.normal(0, 0.01, 30)) for _ in range(2)]
        trained.setdefault(candidate.name, {})[seed] = made
        return made

    runs: Any = SimpleNamespace(
        candidates=[SimpleNamespace(name=name) for name in gaps],
        measures=[items, items],
        losses=losses,
        job=SimpleNamespace(seed=7),
    )
    options: Any = SimpleNamespace(confidence=0.95, delta=1e-4, max_runs=4)
    made = compare.compared(runs, options)
    verdicts_of = [one.last.verdict for one in made]
    assert verdicts_of[:2] + verdicts_of[4:] == ["worse", "worse", "better", "better"]
    assert list(trained["b"]) == list(trained["d"]) == [7, 8]
    assert list(trained["a"]) == list(trained["c"]) == list(range(7, 7 + made[2].last.pairs))
    assert made[2].last.pairs > 2
    ways = [np.array([trained[name][seed][1] for seed in (7, 8)]) for name in "ab"]
    assert made[1].last == Rule(0.05 / 6, 1e-4, 4).look(*ways, np.arange(30))
    assert made[1].last != Rule(0.05, 1e-4, 4).look(*ways, np.arange(30))
