"""`sabia quantize --task --gate`: recovery by capability, the gate, the page, what is refused."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import stage

from sabia.core.errors import GateClosed, UsageError

pytest.importorskip("torch")
FACTS, LOTTERIES, EACH = 160, 8, 10  # keys with one value; capabilities, and keys of each, with two


def keys(start: int, count: int) -> list[str]:
    return [chr(0x4E00 + start + number) for number in range(count)]


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows a digit for each key, or that it is one of two, and tasks that ask it."""
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    root = tmp_path_factory.mktemp("m")
    count = FACTS + LOTTERIES * EACH
    draw = np.random.default_rng(0)
    values = draw.integers(0, 10, count)
    second = np.where(np.arange(count) < FACTS, values, (values + 1) % 10)
    texts = [*keys(0, count), *map(str, range(10))]
    tokenizer = train_bpe(texts * 4, 256 + 16 + 3 * count)
    tokenizer.save(root / "t")
    tokens = np.array(tokenizer.encode_ordinary_batch(texts))  # one of each text
    asked, digits = tokens[:count, 0], tokens[count:, 0]
    shape = {"hidden": 64, "layers": 1, "heads": 4, "ffn": 128, "context": 64}
    spec = from_config(new_config(**shape, vocab=tokenizer.vocab_size, tied=False))
    params = hub.init_params(spec, 0)
    for name in ("attn.o", "mlp.down"):  # what the layer adds is small
        params[f"layers.0.{name}"] *= 0.01
    meanings = np.eye(10, 64, dtype=np.float32)
    params["embed"][asked] = meanings[values] + meanings[second]
    params["head"][:] = 0
    params["head"][digits] = 4 * meanings
    hub.save_model(root / "m", spec, params, tokenizer_from=root / "t")
    (root / "tasks").mkdir()
    for number in range(LOTTERIES + 1):
        first, size = (0, FACTS) if not number else (FACTS + (number - 1) * EACH, EACH)
        items = [{"id": i, "key": key, "answer": str(values[first + i])}
                 for i, key in enumerate(keys(first, size))]  # fmt: skip
        (root / "tasks" / f"c{number}.jsonl").write_text("\n".join(map(json.dumps, items)))
        (root / "tasks" / f"c{number}.toml").write_text(
            f'name = "t{number}"\ncapability = "c{number}"\nkind = "exact_match"\n'
            f'data = "c{number}.jsonl"\nprompt = "{{{{ key }}}}"\nmax_new_tokens = 1\n'
            f"temperature = {1.0 if number else 0.0}\n"
        )
    (root / "gate.toml").write_text(
        'baseline = "original"\n[[rule]]\ncapability = "*"\nmax_drop = 0.05\n'
    )
    return root


def make(root: Path, out: Path, **settings: object) -> None:
    given = {"recipe": "w8", "task": [str(root / "tasks")], "task_seeds": 1, "json": True}
    stage("quantize", out=out, to="jsonl", model=root / "m", **given | settings)


def evaluation(out: Path) -> dict:
    return json.loads((out / "quantization.json").read_text())["evaluation"]


def test_a_capability_broken_on_purpose_closes_the_gate_while_the_mean_stays(
    knowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sabia.core.model.storage.safetensors_file import read_tensors, write_tensors
    from sabia.core.text.tokenize.tokenizer import load_tokenizer

    monkeypatch.setattr(sys, "stdin", None)
    out, gate = tmp_path / "q", str(knowing / "gate.toml")
    make(knowing, out, gate=gate)
    report = json.loads(capsys.readouterr().out)["evaluation"]
    assert report == evaluation(out) and report["closed"] == []
    whole = {one["name"]: one for one in report["recovery"]}
    assert whole["c0"]["before"] > 0.95 and whole["c0"]["noise"] == 0
    assert abs(whole["all tasks"]["kept"] - 1) <= whole["all tasks"]["noise"]
    # the embeddings of 24 keys of the first capability are lost
    tensors = {name: np.array(x) for name, x in read_tensors(out / "model.safetensors").items()}
    lost = load_tokenizer(out).encode_ordinary_batch(keys(0, 24))
    tensors["model.embed_tokens.weight"][np.array(lost)[:, 0]] = 0
    write_tensors(out / "model.safetensors", tensors)
    with pytest.raises(GateClosed, match=r"c0 \(red\)$"):
        make(knowing, out, gate=gate)
    report = evaluation(out)
    by_name = {one["name"]: one for one in report["recovery"]}
    mean = by_name["all tasks"]
    assert report["recovery"][0]["name"] in ("c0", "t0") and by_name["c0"]["kept"] < 0.95
    assert abs(mean["after"] - mean["before"]) < mean["noise"] * mean["before"]
    checks = {one["name"]: one for one in report["gate"]}
    assert [name for name, one in checks.items() if one["verdict"] == "red"] == ["c0"]
    assert set(checks["c0"]["regressed_items"]) <= set(map(str, range(24)))
    page = (out / "evaluation.html").read_text()
    for words in ("Recovery, worst first", "Size, speed, divergence", "capability c0", "Gate"):
        assert words in page
    assert "| capability c0 |" in (out / "README.md").read_text()
    assert "already made" in capsys.readouterr().err


def test_rows_scores_and_seeds(
    knowing: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(sys, "stdin", None)
    out, tasks = tmp_path / "q", knowing / "tasks"
    two = {"task": [str(tasks / "c0.toml"), str(tasks / "c1.toml")], "task_seeds": 2, "seed": 5}
    make(knowing, out, **two, limit=6, json=False)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = {row["module"]: row for row in rows if row["score_before"] is not None}
    assert set(kept) == {"t0", "t1", "c0", "c1", "all tasks"}
    scores = pq.read_table(out / "scores.parquet").to_pylist()
    cells: dict[tuple[str, str], list[dict]] = {}
    for row in scores:
        cells.setdefault((row["model"], row["task"]), []).append(row)
    again = "original, other seeds"
    assert {name for name, _ in cells} == {"original", again, "quantized"}
    for (model, task), own in cells.items():
        assert {row["sample"] for row in own} == ({0} if task == "t0" else {0, 1})
        mean = np.mean([row["value"] for row in own])
        if model != again:
            side = "score_before" if model == "original" else "score_after"
            assert kept[task][side] == pytest.approx(mean)
        else:
            noise = abs(mean - kept[task]["score_before"])
            assert kept[task]["score_noise"] == pytest.approx(noise)
    one, other = ([row["value"] for row in cells[name, "t1"]] for name in ("original", again))
    assert one != other  # other seeds draw other answers


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate": "capabilities", "task": []}, "--gate: only with --task"),
        ({"format": "gguf"}, "--task: --format gguf is not evaluated here"),
        ({"gate": "none.toml"}, "--gate: none.toml: No such file"),
        ({"task": ["nothing"]}, "--task: nothing is no file"),
        ({"task": ["oab_bench"], "data": ["oab_bench=x"]}, "oab_bench needs a judge"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_the_work(
    knowing: Path, tmp_path: Path, settings: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match=message):
        make(knowing, tmp_path / "q", **settings)
    assert not (tmp_path / "q").exists()
    (tmp_path / "gate.toml").write_text('baseline = "a"\n[[rule]]\ntask = "*"\nmax_drop = 0.1\n')
    with pytest.raises(UsageError, match=r"baseline = 'a'.*expected 'original'"):
        make(knowing, tmp_path / "q", gate=str(tmp_path / "gate.toml"))
