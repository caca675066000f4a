"""Training and scoring classifiers: losses, learning, resume, exports, scores of any company."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage import hub
from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.parallel import build_ops
from sabia.core.recipes import pooled_model
from sabia.core.recipes.classifier import fine_tuning
from sabia.core.recipes.classifier.sequence_classifier import ClassifierModel, ModelScorer
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.job import Job
from sabia.core.spec import from_config
from sabia.core.spec.families import with_classifier
from sabia.core.spec.model import classifier_config
from sabia.core.train.labelled_rows import labelled_rows
from sabia.core.train.losses.classification import classification_loss, row_losses
from sabia.core.train.stepper_factory import make_stepper

from .classifiers import DECODER, ENCODER, documents, model, report, texts

torch = pytest.importorskip("torch")
OPTIONS = {"label": "kind", "length": 32, "lr": 3e-3, "batch": 16, "warmup": "5%"}


def trained(tmp_path: Path, config: dict[str, Any], name: str = "run", **changes: Any) -> Path:
    """The directory of a run on 400 documents."""
    source = tmp_path / "docs.parquet"
    if not source.exists():
        documents(source, 400)
        model(tmp_path / "base", config)
    out = str(tmp_path / name)
    options = ClassifyTrainOptions(model=str(tmp_path / "base"), out=out, **OPTIONS | changes)
    fine_tuning.run(Job("classify train", (str(source),), out), options)
    return tmp_path / name


@pytest.mark.parametrize("name", build_ops.BACKENDS)
def test_losses_are_torchs(name: str) -> None:
    ops = build_ops.load_ops(name)
    random = np.random.default_rng(0)
    scores = random.standard_normal((7, 3)).astype(np.float32)
    hot = np.eye(3, dtype=np.float32)[random.integers(0, 3, 7)]
    many = (random.random((7, 3)) < 0.5).astype(np.float32)
    x = torch.from_numpy(scores)
    whole = {"reduction": "none"}
    expected = {
        "single_label_classification": torch.nn.functional.cross_entropy(
            x, torch.from_numpy(hot.argmax(-1)), **whole
        ),
        "multi_label_classification": torch.nn.functional.binary_cross_entropy_with_logits(
            x, torch.from_numpy(many), **whole
        ).mean(-1),
        "regression": torch.nn.functional.mse_loss(x, torch.from_numpy(many), **whole).mean(-1),
    }
    for problem, judged in expected.items():
        labels = hot if problem.startswith("single") else many
        given = ops.to_device({"s": scores, "l": labels})
        found = ops.to_numpy({"x": row_losses(given["s"], given["l"], problem, ops)})["x"]
        np.testing.assert_allclose(found, judged.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [ENCODER, DECODER], ids=["encoder", "decoder"])
def test_a_classifier_learns_and_says_how_well(tmp_path: Path, config: dict[str, Any]) -> None:
    run = trained(tmp_path, config)
    found = report(run)
    assert found["problem"] == "single_label_classification"
    assert 20 < found["held_out"]["documents"] < 70
    assert found["held_out"]["macro_f1"] > 0.9
    assert all(one["auc"] > 0.95 for one in found["labels"])
    before = (run / "held_out.json").stat().st_mtime_ns
    trained(tmp_path, config)  # done already
    assert (run / "held_out.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("config", [ENCODER, DECODER], ids=["encoder", "decoder"])
def test_exports_score_alike_in_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    run = trained(tmp_path, config, steps=2)
    kind = transformers.AutoModelForSequenceClassification
    judge, said = kind.from_pretrained(run / "final", dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert judge.config.id2label == {0: "bad", 1: "good"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "final")
    scorer = ModelScorer(str(run / "final"))
    for text in texts(5, 3)[0]:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=32)["input_ids"]
        expected = judge(ids).logits.softmax(-1).detach().numpy()[0]
        scores = scorer.score([text])
        np.testing.assert_allclose([scores["bad"][0], scores["good"][0]], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_scores_do_not_depend_on_company(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooled_model, "BATCH_TOKENS", 100)
    run = trained(tmp_path, ENCODER, steps=2)
    many = [*texts(30, 5)[0], "", "theorem"]
    scorer = ModelScorer(str(run / "final"), name)
    together = scorer.score(many)
    assert np.isnan(together["good"][30]) and np.isfinite(together["good"][31])
    for number in (0, 7, 31):
        alone = scorer.score([many[number]])
        np.testing.assert_allclose(alone["good"][0], together["good"][number], atol=1e-5)
    windows = ModelScorer(str(run / "final"), name, length=16, long="windows")
    long = max(many, key=len)
    rows, _ = windows.reader.read([long])
    assert len(rows) > 1 and all(len(row) <= 16 for row in rows)
    sizes = np.array([len(row) for row in rows])
    parts = ClassifierModel(str(run / "final"), name).scores(rows)[:, 1]
    expected = (parts * sizes).sum() / sizes.sum()
    np.testing.assert_allclose(windows.score([long])["good"], [expected], atol=1e-6)


def test_numbers_and_lists(tmp_path: Path) -> None:
    run = trained(tmp_path, ENCODER, "grades", label="grade", regression=True)
    found = report(run)
    assert found["problem"] == "regression" and found["held_out"]["pearson"] > 0.9
    assert ModelScorer(str(run / "final")).names == ("grade",)
    run = trained(tmp_path, ENCODER, "tags", label="tags")
    found = report(run)
    assert found["problem"] == "multi_label_classification"
    assert [one["label"] for one in found["labels"]] == ["bad", "good", "long"]
    assert all(one["f1"] > 0.9 for one in found["labels"][:2])


def test_stopped_runs_end_alike(tmp_path: Path) -> None:
    """The state after 3 steps, saved, and 3 more is that after 6, bit for bit."""
    whole = trained(tmp_path, ENCODER, "whole", steps=6, save_every="3")
    other = trained(tmp_path, ENCODER, "other", steps=6, save_every="3")
    for place in (other / "checkpoints").iterdir():
        if "3" not in place.name:
            shutil.rmtree(place)
    assert len(list((other / "checkpoints").iterdir())) == 1
    write_json(other / "run.json", read_json(other / "run.json") | {"finished": False})
    trained(tmp_path, ENCODER, "other", steps=6, save_every="3")
    theirs, ours = (hub.read_checkpoint(run / "final") for run in (whole, other))
    assert all(theirs[name].tobytes() == ours[name].tobytes() for name in theirs)


def test_adapters_train_the_head_too(tmp_path: Path) -> None:
    run = trained(tmp_path, ENCODER, steps=4, lora_rank=2)
    before, after = (hub.load_model(path)[1] for path in (tmp_path / "base", run / "final"))
    assert np.array_equal(before["layers.0.mlp.norm"], after["layers.0.mlp.norm"])
    assert not np.array_equal(before["layers.0.attn.q"], after["layers.0.attn.q"])
    assert np.array_equal(before["transform"], after["transform"])
    assert np.abs(after["classifier_bias"]).max() > 0
    assert not (run / "adapter").exists()


@pytest.mark.slow
def test_both_backends_take_the_same_steps(tmp_path: Path) -> None:
    base = from_config(ENCODER | {"vocab_size": 97})
    problem = "single_label_classification"
    spec = with_classifier(base, classifier_config(base.config, ("a", "b", "c"), problem, 0))
    random = np.random.default_rng(1)
    ids = [random.integers(1, 97, n) for n in (5, 30, 17, 9)]
    labels = np.eye(3)[random.integers(0, 3, 4)]
    rows = labelled_rows(ids, labels, np.array([1, 2, 0.5, 1]), "mean", causal=False)
    batch = rows.batch(np.arange(4))
    assert batch["input_ids"].shape == (4, 30)
    assert rows.batch(np.arange(4), 512)["pool"].shape == (4, 64)
    params = hub.init_params(spec, 0)
    gradients = []
    for name in build_ops.BACKENDS:
        loss = partial(classification_loss, problem=problem)
        stepper = make_stepper(name, spec, params, loss, micro_batch=2)
        gradients.append(stepper.gradients(batch))
    for name, one in gradients[0].items():
        other = gradients[1][name]
        assert np.linalg.norm(one - other) <= 1e-5 * max(np.linalg.norm(one), 1e-3), name


def test_what_cannot_be_learnt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no column 'sort'"):
        trained(tmp_path, ENCODER, label="sort")
    with pytest.raises(UsageError, match="--length: 80"):
        trained(tmp_path, ENCODER, length=80)
    with pytest.raises(UsageError, match="balanced with a regression"):
        trained(tmp_path, ENCODER, label="grade", regression=True, class_weights="balanced")
    with pytest.raises(BadData, match="no document with a label"):
        trained(tmp_path, ENCODER, label="kind", regression=True)
    with pytest.raises(UsageError, match="is not a classifier"):
        ModelScorer(str(tmp_path / "base"))
