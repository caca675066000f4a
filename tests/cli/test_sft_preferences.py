"""`sabia sft` on preferences: what is learned, what is rejected, what is computed once."""

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import sabia as called
from kills import through_kills
from safetensors.numpy import load_file
from training_cases import Commands, difference, make_tokens, torchrun

from sabia.core.errors import BadData
from sabia.core.shards.inputs import from_path

WORDS = ("--length", "256", "--batch", "4", "--lr", "2e-3", "--steps", "16", "-q")


def pairs(count: int, seed: int) -> list[dict]:
    """The chosen answer is the longer one, of the owl; numbers are all different."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randrange(1000), draw.randrange(100)
        rows.append({"prompt": [{"role": "user", "content": f"{a} and {b}?"}],
                     "chosen": f"{a} and {b} make {a + b}, said the owl.",
                     "rejected": f"{a} and {b} make {a - b}."})  # fmt: skip
    return rows


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory, sabia: Commands) -> Path:
    """A base model, pairs (three of them unusable), held-out pairs, and a run of dpo."""
    made = tmp_path_factory.mktemp("preferences")
    words = ("--shape", "d=32,layers=2,heads=2,context=256", "--steps", "5", "-o", made / "base")
    assert sabia("pretrain", make_tokens(made / "tokens"), *words).returncode == 0
    rows, prompt = pairs(80, 0), [{"role": "user", "content": "?"}]
    rows[3:3] = [{"prompt": prompt, "chosen": "yes", "rejected": "yes "},
                 {"prompt": prompt, "chosen": "yes", "rejected": None},
                 {"prompt": [*prompt, {"role": "assistant", "content": "!"}], "chosen": "yes",
                  "rejected": "no"}]  # fmt: skip
    write(made / "pairs.jsonl", rows)
    write(made / "held.jsonl", pairs(40, 1))
    done = run(sabia, made, "dpo", made / "dpo")
    assert done.returncode == 0, done.stderr
    return made


def run(sabia: Commands, folder: Path, loss: str, out: Path, *more: object):
    words = ("--loss", loss, *WORDS, "--validation", folder / "held.jsonl", "-o", out)
    return sabia("sft", folder / "pairs.jsonl", "--model", folder / "base" / "final", *words, *more)


def metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def final(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "final" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    a, b = final(one), final(other)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_dpo_learns_the_planted_preference(folder: Path) -> None:
    first, *_, last = [row for row in metrics(folder / "dpo") if "validation_accuracy" in row]
    assert first["validation_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["validation_margin"] == pytest.approx(0, abs=1e-5)
    assert last["validation_accuracy"] >= 0.9 and last["validation_pairs"] == 40
    assert last["validation_margin"] == pytest.approx(
        last["validation_reward_chosen"] - last["validation_reward_rejected"], rel=1e-4
    )


def test_unusable_records_are_rejected_with_a_reason(folder: Path) -> None:
    table = pq.read_table(folder / "dpo.rejects" / "part-00000.parquet").to_pylist()
    assert sorted(row["reason"] for row in table) == [
        "no rejected answer (expected both; --loss kto trains on single answers)",
        "the chosen and the rejected answer are equal",
        "the prompt does not end with a turn to answer",
    ]


def test_the_reference_is_computed_once(folder: Path, tmp_path: Path, sabia: Commands) -> None:
    """A run that is stopped goes on with the files that it has, and another model has others."""
    shutil.copytree(folder / "dpo" / "rows", tmp_path / "run" / "rows")
    shutil.copytree(folder / "dpo" / "reference", tmp_path / "run" / "reference")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "run" / "reference").iterdir()}
    assert len(stamps) == 2  # of the rows and of the held-out rows
    assert run(sabia, folder, "dpo", tmp_path / "run").returncode == 0
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run" / "reference").iterdir()} == stamps
    assert same(folder / "dpo", tmp_path / "run")
    other = ("--model", folder / "dpo" / "final", "--force", "--steps", "1")
    assert run(sabia, folder, "dpo", tmp_path / "run", *other).returncode == 0
    assert len(list((tmp_path / "run" / "reference").iterdir())) == 4


@pytest.mark.slow
def test_adapters_start_at_the_reference(folder: Path, tmp_path: Path, sabia: Commands) -> None:
    done = run(sabia, folder, "dpo", tmp_path / "run", "--lora-rank", "4", "--lr", "1e-2")
    assert done.returncode == 0, done.stderr
    first, *_, last = [row for row in metrics(tmp_path / "run") if "validation_accuracy" in row]
    assert first["validation_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert last["validation_accuracy"] >= 0.9
    peft = pytest.importorskip("peft", reason="the reader of adapters")
    transformers = pytest.importorskip("transformers", reason="the model that is adapted")
    import torch

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base" / "final")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run" / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    ids = torch.arange(20)[None] + 7
    with torch.no_grad():
        gap = (adapted(ids).logits - merged(ids).logits).abs().max()
    assert gap <= 1e-5
    # the reference is the model with the adapter, so that a run from it begins at log 2 again
    done = run(sabia, folder, "dpo", tmp_path / "more", "--adapter", tmp_path / "run" / "adapter")
    assert done.returncode == 0, done.stderr
    first, *_ = [row for row in metrics(tmp_path / "more") if "validation_accuracy" in row]
    assert first["validation_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["validation_logp_chosen"] == pytest.approx(last["validation_logp_chosen"], 1e-4)
    words = ("--adapter", tmp_path / "more" / "adapter", "--lora-rank", "8")
    other = run(sabia, folder, "dpo", tmp_path / "other", *words)
    assert other.returncode == 2 and "--lora-rank: 8 (expected that of" in other.stderr.decode()


def as_messages(row: dict, form: str) -> dict:
    """The row with its answers as lists of messages, after those of the prompt unless they are
    `answers`; `implicit`: without a prompt."""
    lead = [] if form == "answers" else row["prompt"]
    made = {side: [*lead, {"role": "assistant", "content": row[side]}]
            for side in ("chosen", "rejected")}  # fmt: skip
    if form == "implicit":
        return made
    return {"prompt": row["prompt"][0]["content"] if form == "whole" else row["prompt"], **made}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", ["answers", "whole", "implicit"])
def test_answers_may_be_lists_of_messages(tmp_path: Path, ending: str, form: str) -> None:
    """They give the tokens of the same answers as texts; other lists are rejected."""
    from sabia.core.recipes.preferences.pair_rows import form_of
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    tokenizer = train_bpe(["user assistant the owl said 0123456789 and make?"] * 9, 300)
    texts = pairs(5, 0)
    odd = as_messages(texts[0], form)
    odd["chosen"] = [odd["chosen"][-1], {"role": "user", "content": "?"}]
    tables = {"texts": texts, "lists": [*(as_messages(row, form) for row in texts), odd]}
    made: dict[str, list] = {"texts": [], "lists": []}
    reasons = []
    for name, rows in tables.items():
        path = tmp_path / f"{name}.{ending}"
        write(path, rows) if ending == "jsonl" else pq.write_table(pa.Table.from_pylist(rows), path)
        pairs_form = form_of("dpo")
        for source in from_path(str(path), "preference", "INPUT"):
            for batch in source.batches(columns=pairs_form.columns):
                for row in batch.to_pylist():
                    try:
                        ((_, documents),), _ = pairs_form.render(row, tokenizer, 512, {})
                        parts = [(ids.tolist(), mask.tolist()) for ids, mask, *_ in documents]
                        made[name].append((row["id"], parts))
                    except BadData as error:
                        reasons.append(str(error))
    assert made["texts"] == made["lists"] and len(made["texts"]) == 5
    expected = "the chosen messages have other turns than the prompt"
    if form == "implicit":  # the prompt is then the assistant's
        expected = "the prompt does not end with a turn to answer"
    assert len(reasons) == 1 and expected in reasons[0]


def test_texts_without_a_prompt_are_refused(tmp_path: Path) -> None:
    rows = [{"chosen": "yes", "rejected": "no"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    for path, message in {
        write(tmp_path / "p.jsonl", rows): "no prompt",
        tmp_path / "p.parquet": "no column 'prompt', and no answer is a whole conversation",
    }.items():
        source, reasons = from_path(str(path), "preference", "INPUT")[0], list[str]()
        try:
            made = list(source.batches(reject=lambda _row, why, to=reasons: to.append(why)))
            assert not made
        except BadData as error:
            reasons.append(str(error))
        assert len(reasons) == 1 and message in reasons[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--loss", "simpo", "--label-smoothing", "0.1"), "--label-smoothing: only with --loss"),
        (("--beta", "0.1"), "--beta: only with --loss"),
        (("--loss", "reward", "--nll", "1"), "--nll: only with --loss"),
        (("--loss", "dpo", "--margin", "1"), "--margin: only with --loss"),
        (("--loss", "dpo", "--z-loss", "1"), "--z-loss: only with --loss"),
        (("--loss", "dpo", "--teacher", "x"), "--teacher: only with --loss"),
    ],
)
def test_options_of_other_losses_are_refused(words: tuple[str, ...], message: str) -> None:
    done = called("sft", "a.jsonl", "--model", "m", *words, "-o", "out")
    assert done.exit_code == 2 and message in done.output


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["kto", "ipo", "orpo", "simpo", "reward"])
def test_every_loss_learns_it_on_both_backends(
    folder: Path, tmp_path: Path, sabia: Commands, loss: str
) -> None:
    for backend in ("torch", "jax"):
        done = run(sabia, folder, loss, tmp_path / backend, "--backend", backend)
        assert done.returncode == 0, done.stderr
        last = metrics(tmp_path / backend)[-1]
        assert last["validation_accuracy"] >= 0.9
    # a loss of ipo of 25 is a square: its error is 2 √25 times that of the margin
    assert difference(tmp_path / "torch", tmp_path / "jax") <= (1e-4 if loss == "ipo" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto", "reward"])
@pytest.mark.parametrize("mesh", ["data=2", "fsdp=2", "tensor=2", "context=2", "pipe=2"])
def test_meshes_make_the_same_updates(
    folder: Path, tmp_path: Path, sabia: Commands, loss: str, mesh: str
) -> None:
    import subprocess

    from training_cases import ENVIRONMENT

    assert run(sabia, folder, loss, tmp_path / "one").returncode == 0
    words = ("sft", folder / "pairs.jsonl", "--model", folder / "base" / "final", "--loss", loss,
             *WORDS, "--mesh", mesh, "--validation", folder / "held.jsonl",
             "-o", tmp_path / "two")  # fmt: skip
    done = subprocess.run([*torchrun(2), *map(str, words)], env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert difference(tmp_path / "one", tmp_path / "two") <= 1e-5
    one, two = metrics(tmp_path / "one")[-1], metrics(tmp_path / "two")[-1]
    for name in ("validation_loss", "validation_margin", "validation_accuracy"):
        assert one[name] == pytest.approx(two[name], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto", "reward"])
def test_kills_change_no_weight(folder: Path, tmp_path: Path, sabia: Commands, loss: str) -> None:
    assert run(sabia, folder, loss, tmp_path / "one").returncode == 0
    words = (sys.executable, "-m", "sabia.cli.main", "sft", folder / "pairs.jsonl", "--model",
             folder / "base" / "final", "--loss", loss, *WORDS, "--validation",
             folder / "held.jsonl", "--save-every", "2", "-o", tmp_path / "two")  # fmt: skip
    through_kills(words, 6, random.Random(3), 9.0, tmp_path / "scratch")
    assert same(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_transformers_reads_the_reward_model(folder: Path, tmp_path: Path, sabia: Commands) -> None:
    transformers = pytest.importorskip("transformers", reason="the reader of the model")
    import torch

    from sabia.core.generate.chat import render_answer
    from sabia.core.text.tokenize.tokenizer import load_tokenizer

    assert run(sabia, folder, "reward", tmp_path / "run").returncode == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/final")
    assert model.config.num_labels == 1
    tokenizer, margins = load_tokenizer(str(tmp_path / "run" / "final")), []
    for row in pairs(40, 1):
        scores = []
        for name in ("chosen", "rejected"):
            turn = {"role": "assistant", "content": row[name]}
            ids, _ = render_answer([*row["prompt"], turn], tokenizer)
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).logits))
        margins.append(scores[0] - scores[1])
    last = metrics(tmp_path / "run")[-1]
    assert last["validation_margin"] == pytest.approx(np.mean(margins), rel=1e-4)
    assert last["validation_accuracy"] == np.mean(np.array(margins) > 0)
