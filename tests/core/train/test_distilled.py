"""`sft --loss distill`: the loss beside NumPy, the records of `sft teacher`, malformed records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import sabia

pytest.importorskip("torch")

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.distilled_rows import bucketed
from sabia.core.train.losses.next_token import divergence

V, K = 37, 5


def case() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores [n, V], ids [n, K], log-probabilities [n, K]; the model is sure of tokens that the
    teacher does not name, and in one row of those that it names."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 4, (11, V))
    ids = np.stack([rng.permutation(V)[:K] for _ in range(11)])
    teacher = rng.normal(0, 3, (11, V))
    teacher -= np.log(np.exp(teacher).sum(1, keepdims=True))
    scores[0, ids[0, 0]] += 40
    scores[1] -= 60 * np.isin(np.arange(V), ids[1])
    return scores, ids, np.take_along_axis(teacher, ids, 1)


def by_hand(scores: np.ndarray, ids: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, Any]:
    """KL over K tokens and the rest, and its gradient: softmax minus the teacher's mass, which the
    rest shares out in proportion to the model's probabilities."""
    loss, gradient = np.zeros(len(scores)), np.zeros_like(scores)
    for n, (z, i, log_p) in enumerate(zip(scores, ids, given, strict=True)):
        q = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        p, others = np.exp(log_p), np.setdiff1d(np.arange(len(z)), i)
        rest, mass = 1 - p.sum(), q[others].sum()
        loss[n] = (p * np.log(p / q[i])).sum() + rest * np.log(rest / mass)
        gradient[n] = q
        gradient[n, i] -= p
        gradient[n, others] -= rest * q[others] / mass
    return loss, gradient


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_loss_and_its_gradient_are_those_of_the_formula(name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    scores, ids, given = case()
    p, rest, information = bucketed(given)
    arrays = {"teacher_probabilities": p, "teacher_rest": rest, "teacher_information": information}
    ops: Any = load_ops(name)
    batch = ops.to_device({k: v.astype(np.float32) for k, v in arrays.items()}, "float32")
    z = ops.to_device({"z": scores.astype(np.float32)}, "float32")["z"]
    batch["teacher_ids"] = ops.integers(ids, z)
    if name == "torch":
        z.requires_grad_()
        loss = divergence(z, batch, ops)
        loss.sum().backward()
        found, gradient = loss.detach().numpy(), z.grad.numpy()
    else:
        import jax

        found = np.asarray(divergence(z, batch, ops))
        gradient = np.asarray(jax.grad(lambda x: divergence(x, batch, ops).sum())(z))
    wanted, slope = by_hand(scores.astype(np.float32).astype(np.float64), ids, given)
    assert wanted.max() > 30
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("distilled")
    for name, text in (("t", "dois mais três são cinco"), ("o", "um e outro e mais um")):
        train_bpe([text] * 4, 300).save(root / name)
    for name, tokens, layers in (("teacher", "t", 2), ("model", "t", 1), ("other", "o", 1)):
        vocabulary = load_tokenizer(root / tokens).vocab_size
        spec = from_config(new_config(hidden=32, layers=layers, heads=4, vocab=vocabulary))
        params = {k: np.array(4 * v) for k, v in hub.init_params(spec, layers).items()}
        hub.save_model(root / name, spec, params, tokenizer_from=root / tokens)
    with open(root / "chats.jsonl", "w") as file:
        for n in range(12):
            turns = [{"role": "user", "content": f"dois mais {n}?"},
                     {"role": "assistant", "content": "são " + "cinco " * (1 + n % 5)}]  # fmt: skip
            file.write(json.dumps({"id": f"c{n}", "messages": turns}) + "\n")
        file.write(json.dumps({"id": "none", "messages": turns[:1]}) + "\n")
    done = sabia("sft", "teacher", root / "chats.jsonl", "--teacher", root / "teacher", "--top", 7,
                 "-o", root / "scored.parquet")  # fmt: skip
    assert done.exit_code == 0, done.output
    return root


def train(files: Path, out: Path, *more: object) -> Any:
    scored = files / "scored.parquet"
    words = ("--loss", "distill", "--model", files / "model", "--batch", 4, "--steps", 6,
             "--lr", "5e-3", "--length", 256, "--peak-flops", "1e12", "--to", "jsonl")  # fmt: skip
    return sabia("sft", scored, *words, "--validation", scored, "-o", out, *more)


def test_records_have_what_the_engine_gives(files: Path) -> None:
    rows = pq.read_table(files / "scored.parquet").to_pylist()
    assert [row["id"] for row in rows] == [f"c{n}" for n in range(12)]
    spec, params = hub.load_model(files / "teacher")
    engine = Engine(spec, params, load_tokenizer(files / "teacher"))
    for row in rows[:4]:
        assert sum(row["loss_mask"]) == len(row["teacher_ids"]) > 2
        at = row["loss_mask"].index(True)
        (ended,) = engine.generate([Request(row["input_ids"][:at], 1, 0.0, seed=0)])
        assert ended.tokens[0] == row["teacher_ids"][0][0]
        assert ended.raw_logprobs[0] == pytest.approx(row["teacher_logprobs"][0][0], abs=1e-5)
    (path,) = files.glob("scored*rejects*")
    table = pq.read_table(path).to_pylist()
    (reason,) = [row["reason"] for row in table]
    assert reason.startswith("no token of the conversation was written by the assistant")


def test_a_run_learns_and_packing_changes_nothing(files: Path, tmp_path: Path) -> None:
    ends = []
    for name, more in (("packed", ()), ("apart", ("--no-pack",))):
        done = train(files, tmp_path / name, *more)
        assert done.exit_code == 0, done.output
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        kl = [row["validation_kl"] for row in rows if row.get("validation_kl") is not None]
        assert kl[-1] < 0.9 * kl[0]
        ends.append(kl[0])
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


BAD = {
    "a token of the teacher that stands twice": {"teacher_ids": [[3, 3]] * 2},
    "[1] values (expected 2 of": {"teacher_ids": [[3], [4]], "teacher_logprobs": [[-1.0]]},
    "2 log-probabilities of 1 tokens": {"teacher_ids": [[3], [4]]},
    "above 0, not finite, or": {"teacher_logprobs": [[-0.1, -0.2]] * 2},
    "a loss_mask of 2 for 4 tokens": {"loss_mask": [False, True]},
    "or the first one does": {"loss_mask": [True, False, True, False]},
    "token 9999 (expected 0 to": {"teacher_ids": [[9999, 1], [1, 2]]},
    "input_ids is empty": {"input_ids": []},
    "tokens (expected at most --length": {"input_ids": [1] * 300, "loss_mask": None},
}


def test_malformed_records_are_rejected(files: Path, tmp_path: Path) -> None:
    fingerprint = load_tokenizer(files / "model").fingerprint
    good = {"input_ids": [1, 2, 3, 4], "loss_mask": [False, True, False, True],
            "teacher_ids": [[3, 1], [1, 2]], "teacher_logprobs": [[-1.0, -2.0]] * 2,
            "tokenizer": fingerprint}  # fmt: skip
    rows = [{"id": str(n), **good, **bad} for n, bad in enumerate([{}, *BAD.values()])]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    words = ("--loss", "distill", "--model", files / "model", "--length", 256, "--steps", 1,
             "--peak-flops", "1e12")  # fmt: skip
    done = sabia("sft", tmp_path / "rows.parquet", *words, "-o", tmp_path / "run")
    assert done.exit_code == 0, done.output
    made = [pq.read_table(path) for path in (tmp_path / "run.rejects").glob("*.parquet")]
    reasons = pa.concat_tables(made).column("reason").to_pylist()
    assert len(reasons) == len(BAD)
    for message, reason in zip(BAD, reasons, strict=True):
        assert message in reason


def test_another_tokenizer_is_refused(files: Path, tmp_path: Path) -> None:
    done = train(files, tmp_path / "run", "--model", files / "other")
    assert done.exit_code == 2 and "has another tokenizer" in done.output, done.output
    done = train(files, tmp_path / "run", "--teacher", files / "teacher")
    assert done.exit_code == 2 and "--teacher: only with --loss next-token" in done.output
