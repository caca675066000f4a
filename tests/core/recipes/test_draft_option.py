"""--draft of grpo, eval and rewrite: the results are those without it, where they must be.

Proposals by n-grams change no token, and a draft model changes no greedy one.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from in_process import sabia

from sabia.core.generate.draft import ngram
from sabia.core.model.storage import hub
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

TASK = """name = "t"
data = "items.jsonl"
kind = "exact_match"
verifier = "contains"
chat = true
prompt = "{{q}}"
answer = "gold"
max_new_tokens = 12
"""
BACKENDS = ["torch", pytest.param("jax", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one near to it and one of another tokenizer; a task, documents and prompts."""
    root = tmp_path_factory.mktemp("draft")
    tokenizer = train_bpe(["user assistant which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)
    tokenizer.save(root / "t")
    train_bpe(["um dois três quatro cinco seis sete"] * 9, 300).save(root / "other-t")
    config = new_config(hidden=32, layers=2, vocab=300, heads=2, context=1024)
    spec, draw = from_config(config), np.random.default_rng(0)
    params = {name: 3 * value for name, value in hub.init_params(spec, 0).items()}
    near = {name: (value * (1 + 0.1 * draw.standard_normal(value.shape))).astype(np.float32)
            for name, value in params.items()}  # fmt: skip
    for name, values, words in (("model", params, "t"), ("near", near, "t"),
                                ("other", near, "other-t")):  # fmt: skip
        hub.save_model(root / name, spec, values, tokenizer_from=root / words)
    write(root / "items.jsonl", [{"id": str(n), "q": f"{n}? " * 4, "gold": "0"} for n in range(4)])
    (root / "t.toml").write_text(TASK)
    (root / "say.toml").write_text('prompt = "say say say"\n')
    write(root / "in.jsonl", [{"id": str(n), "text": f"{n} {n} " * 4} for n in range(3)])
    write(root / "prompts.jsonl", [
        {"id": f"p{n}", "messages": [{"role": "user", "content": f"{n}? " * 3}], "answer": "[0-4]"}
        for n in range(6)
    ])  # fmt: skip
    return root


@pytest.fixture(autouse=True)
def one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proposals after one equal token, so that random texts have some."""
    monkeypatch.setattr(ngram, "NGRAM", 1)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def drafts(folder: Path) -> dict[str, tuple[object, ...]]:
    return {"none": (), "ngram": ("--draft", "ngram"),
            "near": ("--draft", folder / "near", "--draft-tokens", 3)}  # fmt: skip


def has_proposed(output: str, least: int) -> None:
    """The summary says how many proposed tokens were kept: not all, and at least so many."""
    found = re.search(r"([\d,]+) of ([\d,]+) proposed tokens were kept", output)
    assert found, output
    kept, proposed = (int(text.replace(",", "")) for text in found.groups())
    assert least <= kept < proposed


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_and_rewrite_give_the_same_greedy_answers(
    folder: Path, backend: str, tmp_path: Path
) -> None:
    answers, texts = {}, {}
    for name, words in drafts(folder).items():
        place = (*words, "--backend", backend)
        out = tmp_path / f"{name}.jsonl"
        done = sabia("eval", "--task", folder / "t.toml", "--model", folder / "model", "-o", out,
                     "--judge-cache", tmp_path / f"{name}.kept", *place)  # fmt: skip
        assert done.exit_code == 0, done.output
        answers[name] = [json.loads(row["detail"])["response"] for row in read(out)]
        if words:
            has_proposed(done.output, int(name == "near"))
        out = tmp_path / f"{name}-rewritten.jsonl"
        done = sabia("rewrite", folder / "in.jsonl", "--recipe", folder / "say.toml", "-o", out,
                     "--engine", "local", "--model", folder / "model",
                     "--cache", tmp_path / f"{name}.calls", *place)  # fmt: skip
        assert done.exit_code == 0, done.output
        if words:
            has_proposed(done.output, int(name == "near"))
        calls = [path.read_bytes() for path in (tmp_path / f"{name}.calls").rglob("*")
                 if path.is_file()]  # fmt: skip
        texts[name] = sorted(set(re.findall(rb'"text": ?"(.*?)", ?"finish', b"".join(calls))))
    assert answers["none"] == answers["ngram"] == answers["near"] and any(answers["none"])
    assert texts["none"] == texts["ngram"] == texts["near"] and texts["none"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_grpo_trains_on_the_same_samples_with_ngrams(
    folder: Path, backend: str, tmp_path: Path
) -> None:
    rows, samples = {}, {}
    for name, words in drafts(folder).items():
        out = tmp_path / name
        done = sabia("grpo", folder / "prompts.jsonl", "--model", folder / "model", "-o", out,
                     "--reward", "regex", "--steps", 2, "--prompts", 2, "--group", 4,
                     "--max-new-tokens", 9, "--lr", "1e-3", "--backend", backend,
                     "--to", "jsonl", *words)  # fmt: skip
        assert done.exit_code == 0, done.output
        rows[name] = read(out / "metrics.jsonl")
        paths = sorted((out / "samples").glob("step-*.parquet"))
        samples[name] = [row for path in paths for row in pq.read_table(path).to_pylist()]
        shares = [row.get("accepted_proposals") for row in rows[name]]
        given = [share for share in shares if share is not None]
        assert 0 < sum(given) < len(given) if words else not given
        for row in rows[name]:  # what trains are the log-probabilities of the policy
            assert row.get("logprob_gap_max", 0) <= 1e-4
    assert [row["tokens"] for row in samples["ngram"]] == [row["tokens"] for row in samples["none"]]
    assert [row["reward"] for row in rows["ngram"]] == [row["reward"] for row in rows["none"]]
    assert len(samples["near"]) == len(samples["none"]) == 16


def test_drafts_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    calls: dict[str, tuple[object, ...]] = {
        "eval": ("--task", folder / "t.toml", "--judge-cache", tmp_path / "c"),
        "rewrite": (folder / "in.jsonl", "--engine", "local", "--cache", tmp_path / "c"),
        "grpo": (folder / "prompts.jsonl", "--reward", "regex", "--steps", 1, "--max-new-tokens",
                 4),
    }  # fmt: skip
    for command, words in calls.items():
        out = tmp_path / ("out" if command == "grpo" else f"{command}.jsonl")
        call = (command, *words, "--model", folder / "model", "-o", out)
        for draft, hint in ((folder / "other", "another tokenizer than the model's"),
                            ("nowhere", "--draft: nowhere")):  # fmt: skip
            done = sabia(*call, "--draft", draft)
            assert done.exit_code == 2 and hint in done.output, done.output
        done = sabia(*call, "--draft-tokens", 3)
        assert done.exit_code == 2 and "only with --draft" in done.output
