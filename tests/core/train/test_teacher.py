"""Distillation: the divergence of a teacher beside NumPy, in runs, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import sabia

pytest.importorskip("torch")

from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import Distillation, next_token_loss
from sabia.core.train.stepper_factory import make_stepper
from sabia.core.train.teacher import Teacher

VOCABULARY = 61


def model(layers: int, seed: int) -> tuple[Any, dict[str, np.ndarray]]:
    spec = from_config(new_config(hidden=32, layers=layers, heads=4, vocab=VOCABULARY))
    return spec, {k: np.array(4 * v) for k, v in hub.init_params(spec, seed).items()}


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, VOCABULARY, (4, 13)).astype(np.int32)
    segments = np.repeat([[1] * 7 + [2] * 5], 4, 0).astype(np.int32)
    positions = np.repeat([[*range(7), *range(5)]], 4, 0).astype(np.int32)
    mask = (rng.random((4, 12)) < 0.7).astype(np.float32)
    return {"input_ids": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": mask,
            "segments": segments, "positions": positions}  # fmt: skip


def logs(of: tuple[Any, dict[str, np.ndarray]], rows: dict[str, np.ndarray]) -> np.ndarray:
    """Log-probabilities [B, T, V], float64."""
    ops, (spec, params) = load_ops("torch"), of
    weights = ops.to_device(params, "float32")
    more = {name: rows[name] for name in ("segments", "positions")}
    hidden = forward.hidden(spec, weights, rows["input_ids"], ops, **more)
    scores = forward.logits(spec, weights, hidden, ops).numpy().astype(np.float64)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize(("top", "share"), [(0, 1.0), (5, 0.25)])
def test_the_loss_is_the_divergence(backend: str, top: int, share: float) -> None:
    teacher, student, rows = model(2, 0), model(1, 1), batch()
    given = Teacher(*teacher, backend, top).complete(rows)
    assert ("teacher_ids" in given) == (top > 0)

    def loss(*arguments: Any) -> Any:
        return next_token_loss(*arguments, teacher=Distillation(share, top))

    stepper = make_stepper(backend, *student, loss, micro_batch=2)
    result = stepper.evaluate(given)
    p, q = np.exp(logs(teacher, rows)), logs(student, rows)
    if top:
        p = np.where(p >= np.sort(p, -1)[..., -top, None], p, 0)
        p /= p.sum(-1, keepdims=True)
    kl = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - q), 0).sum(-1)
    nll = -np.take_along_axis(q, rows["targets"][..., None], -1)[..., 0]
    mask, mean = rows["loss_mask"], rows["loss_mask"].sum()
    assert result.extras["kl"] == pytest.approx((kl * mask).sum(), rel=1e-4)
    assert result.extras["nll"] == pytest.approx((nll * mask).sum(), rel=1e-4)
    wanted = (share * kl + (1 - share) * nll) * mask
    assert result.loss == pytest.approx(wanted.sum() / mean, rel=1e-4)
    before = result.extras["kl"]
    for number in range(8):
        stepper.step(given, 3e-3, number=number)
    assert stepper.evaluate(given).extras["kl"] < 0.9 * before


def test_a_model_has_nothing_to_learn_from_itself() -> None:
    own, rows = model(2, 0), batch()
    given = Teacher(*own, "torch").complete(rows)

    def loss(*arguments: Any) -> Any:
        return next_token_loss(*arguments, teacher=Distillation())

    stepper = make_stepper("torch", *own, loss)
    assert abs(stepper.evaluate(given).loss) < 1e-5
    assert max(float(np.abs(g).max()) for g in stepper.gradients(given).values()) < 1e-5


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    root = tmp_path_factory.mktemp("teacher")
    tokenizer = train_bpe(["dois mais três são cinco"] * 4, 300)
    tokenizer.save(root / "t")
    for name, more, layers in (("teacher", 0, 2), ("model", 0, 1), ("other", 1, 1)):
        config = new_config(hidden=32, layers=layers, heads=4, vocab=tokenizer.vocab_size + more)
        spec = from_config(config)
        params = {k: np.array(4 * v) for k, v in hub.init_params(spec, layers).items()}
        hub.save_model(root / name, spec, params, tokenizer_from=root / "t")
    ids = np.random.default_rng(0).integers(0, 200, (16, 32))
    table = pa.table({"id": [str(i) for i in range(16)], "input_ids": ids.tolist(),
                      "document_lengths": [[20, 12]] * 16})  # fmt: skip
    pq.write_table(table, root / "rows.parquet")
    return root


def pretrain(files: Path, out: Path, *more: object) -> Any:
    return sabia("pretrain", files / "rows.parquet", "--model", files / "model", "--batch", 4,
                 "--warmup", 0, "--steps", 12, "--lr", "3e-3", "--validation",
                 files / "rows.parquet", "-o", out, *more)  # fmt: skip


def test_a_run_learns_from_a_teacher(files: Path, tmp_path: Path) -> None:
    teacher = ("--teacher", files / "teacher", "--precision", "qat-int4")
    done = pretrain(files, tmp_path / "run", *teacher, "--to", "jsonl")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    first, last = (row["validation_kl"] for row in rows if row.get("validation_kl") is not None)
    assert last < 0.9 * first
    steps = [row for row in rows if row.get("kl") is not None]
    assert len(steps) == 12 and steps[0]["objective"] == pytest.approx(steps[0]["kl"])
    other = pretrain(files, tmp_path / "run", "--teacher", files / "model")
    assert other.exit_code == 2 and "holds another run" in other.output
    plain = pretrain(files, tmp_path / "plain", "--to", "jsonl")
    assert plain.exit_code == 0 and '"kl"' not in plain.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--teacher", "other"), "(expected the model's, "),
        (("--teacher", "teacher", "--mesh", "tensor=2"), "with the mesh axis tensor"),
        (("--teacher-top", 5), "--teacher-top: only with --teacher"),
    ],
)
def test_teachers_that_do_not_fit_are_refused(
    files: Path, tmp_path: Path, more: tuple, message: str
) -> None:
    words = [files / word if word in ("other", "teacher") else word for word in more]
    done = pretrain(files, tmp_path / "run", *words)
    assert done.exit_code == 2 and message in done.output, done.output
