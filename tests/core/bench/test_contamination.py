"""Scores of items that a corpus holds, apart; figures that tell texts that a model has read."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from in_process import stage

from sabia.core.bench.contamination import figures
from sabia.core.bench.contamination.memorization import other_canaries
from sabia.core.bench.loglikelihood import Scorer
from sabia.core.errors import UsageError

SYLLABLES = ["ma", "ga", "re", "so", "cin", "dois", "três", "qua", "dog", "cat", "mi", "não"]
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES[:3]]
MANY = [f"{word}{other}" for word in WORDS for other in WORDS]


def sentence(draw: random.Random, count: int, words: list[str] = WORDS) -> str:
    return " ".join(draw.choice(words) for _ in range(count)) + "."


def test_figures_are_those_of_the_papers(tiny_model: Path) -> None:
    """Beside transformers, one text at a time, in whole log-softmaxes."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is the judge")
    from sabia.core.model.storage import hub

    draw = np.random.default_rng(0)
    spec, params = hub.load_model(tiny_model)
    texts = [draw.integers(16, spec.vocab_size, n).tolist() for n in (2, 9, 30, 31, 90)]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for backend in ("torch", "jax"):
        some = texts if backend == "torch" else texts[:2]  # of one shape: nothing is compiled twice
        made = figures.text_figures(Scorer(spec, params, backend, batch_tokens=70), some, 0.2)
        for ids, one in zip(some, made, strict=True):
            with torch.no_grad():
                logs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
            own = logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            mean = (logs.exp() * logs).sum(1)
            deviation = ((logs.exp() * (logs - mean[:, None]) ** 2).sum(1)) ** 0.5
            count = max(1, round(0.2 * len(own)))
            assert one.tokens == len(ids) - 1
            assert one.nats == pytest.approx(float(own.sum()), abs=1e-4)
            assert one.min_k == pytest.approx(float(own.sort()[0][:count].mean()), abs=1e-4)
            standardised = ((own - mean) / deviation).sort()[0][:count].mean()
            assert one.min_k_plus == pytest.approx(float(standardised), abs=1e-3)


def test_exposure_and_auc_by_hand() -> None:
    assert figures.exposure_bits(-1.0, [-2.0] * 255) == 8
    assert figures.exposure_bits(-9.0, [-2.0] * 255) == 0
    assert figures.auc([3, 2], [1, 2, 0]) == pytest.approx((3 + 2.5) / 6)
    others = other_canaries("canary GUID 26b5c67b-86a4")
    assert len(set(others)) == 255
    assert all(o.startswith("canary GUID ") and len(o) == 25 and o != others[0] for o in others[1:])
    with pytest.raises(UsageError, match="no hexadecimal code"):
        other_canaries("no code in here")


def write_task(folder: Path, rows: list[dict], more: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "exam.toml").write_text(
        'name = "exam"\nkind = "multiple_choice"\ndata = "rows.jsonl"\nprompt = "{{q}}"\n'
        f'choices = "options"\nanswer = "gold"\n{more}'
    )
    return folder / "exam.toml"


CHANGES = {
    "verbatim": lambda draw, q, options: " ".join([q, *options]),
    "other case": lambda draw, q, options: " ".join([q, *options]).upper(),
    "options reordered": lambda draw, q, options: " ".join([q, *options[1:], options[0]]),
    "light paraphrase": lambda draw, q, options: " ".join(
        w if draw.random() > 0.08 else draw.choice(MANY) for w in " ".join([q, *options]).split()
    ),
}


def test_planted_items_are_scored_apart(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    draw = random.Random(3)
    rows = [
        {"id": f"e{n}", "q": sentence(draw, 40, MANY), "gold": n % 4,
         "options": [sentence(draw, 6, MANY) for _ in range(4)]}
        for n in range(100)
    ]  # fmt: skip
    task = write_task(tmp_path / "t", rows)
    planted = {f"e{n}": list(CHANGES)[n % 4] for n in range(60)}
    clean = [{"id": f"c{n}", "text": sentence(draw, 200, MANY)} for n in range(60)]
    held = [
        {"id": f"p{row['id']}", "text": sentence(draw, 60, MANY) + " "
         + CHANGES[planted[row["id"]]](draw, row["q"], row["options"])}
        for row in rows[:60]
    ]  # fmt: skip
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in clean + held))
    answers = [
        {"id": row["id"], "exam": row["id"], "value": float(row["id"] in planted)} for row in rows
    ]
    stage("dedup", inputs=str(documents), out=tmp_path / "marked.parquet", verdict="keep",
          decontaminate=(str(task),))  # fmt: skip
    from sabia.core.bench.contamination.apart import apart, marked_items
    from sabia.core.bench.result_summary import summarise
    from sabia.core.bench.score_rows import Score

    marked = marked_items([str(tmp_path / "marked.parquet")])["exam"]
    for level in CHANGES:
        names = [name for name, change in planted.items() if change == level]
        recall = sum(name in marked for name in names) / len(names)
        print(f"{level}: {recall:.3f}")
        assert recall >= (0.8 if level == "light paraphrase" else 1.0)
    assert marked <= planted.keys(), "an item that was not planted"
    scores = [Score("m", "exam", a["id"], 0, "acc", a["value"]) for a in answers]
    (one,) = apart(scores, summarise(scores), {"exam": marked})
    assert one.inside[0] == len(marked) and one.inside[1].value == 1.0
    assert one.outside[1].value == pytest.approx((60 - len(marked)) / (100 - len(marked)))
    assert one.whole.value == 0.6


@pytest.mark.slow  # a model is trained; the formulas have tests of their own
def test_what_a_model_has_read_is_told_from_what_it_has_not(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="it trains the model")
    from sabia.core.text.tokenize.tokenizer import load_tokenizer

    draw = random.Random(0)
    canary = "canary GUID 26b5c67b-86a4-4fd3"
    rows = []
    for n in range(160):
        words = sentence(draw, 16).split()
        other = [w if draw.random() > 0.3 else draw.choice(WORDS) for w in words]
        rows.append({"id": f"e{n}", "q": " ".join(words), "other": [" ".join(other)],
                     "options": ["cinco", "dois"], "gold": n % 2})  # fmt: skip
    task = write_task(tmp_path / "t", rows, f'paraphrase = "other"\ncanary = "{canary}"\n')
    read = [row["q"] for row in rows[:80]] + [canary] * 4
    read += [sentence(draw, 16) for _ in range(80)]
    tokenizer = load_tokenizer(tiny_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    rate = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(0)
    for _ in range(25):
        for part in torch.randperm(len(read)).split(32):
            ids = [[tokenizer.bos_id or tokenizer.eos_id, *tokenizer.encode_ordinary_batch(
                [read[i]])[0]] for i in part.tolist()]  # fmt: skip
            width = max(map(len, ids))
            batch = torch.tensor([row + [0] * (width - len(row)) for row in ids])
            labels = torch.tensor([row + [-100] * (width - len(row)) for row in ids])
            rate.zero_grad()
            model(batch, labels=labels).loss.backward()
            rate.step()
    trained = tmp_path / "trained"
    model.save_pretrained(trained)
    for path in tiny_model.iterdir():
        if not (trained / path.name).exists():
            (trained / path.name).write_bytes(path.read_bytes())
    marks = [{"id": row["id"], "text": row["q"], "contamination": json.dumps(
        [{"task": "exam", "item": row["id"], "level": "item"}])} for row in rows[:80]]  # fmt: skip
    (tmp_path / "marked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marks))
    stage("eval", task=(str(task),), model=(f"read={trained}", f"not={tiny_model}"), json=True,
          min_k="20%", contaminated=(str(tmp_path / "marked.jsonl"),),
          out=tmp_path / "s.parquet", judge_cache=str(tmp_path / "c"))  # fmt: skip
    made = json.loads(capsys.readouterr().out)["contamination"]
    of = {(one["model"], one["figure"]): one for one in made["figures"]}
    print({key: (one["value"], one["auc"]) for key, one in of.items()})
    for name in ("min_k_nats", "min_k_plus_sd", "paraphrase_gap_bits"):
        assert of["read", name]["auc"] >= 0.8
        assert 0.35 <= of["not", name]["auc"] <= 0.65
    assert of["read", "canary_bits"]["value"] == 8 and of["not", "canary_bits"]["value"] < 6
    assert of["read", "paraphrase_gap_bits"]["ci_low"] > 0
    assert {one["model"] for one in made["apart"]} == {"read", "not"}
    assert math.isclose(made["apart"][0]["corpus_items"], 80)
