"""ModernBERT: sizes, files, logits and every gradient equal transformers', in both backends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.generate.engine import Engine
from sabia.core.model import forward
from sabia.core.model.forward import class_logits, pool_weights
from sabia.core.model.storage import hub
from sabia.core.ops.kv_cache import KVCache
from sabia.core.spec import ModelSpec, from_config, parameter_count

from .conftest import compiled, perturbed, states

transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
torch = pytest.importorskip("torch", reason="transformers needs torch")

CONFIG = {
    "architectures": ["ModernBertForMaskedLM"],
    "model_type": "modernbert",
    "vocab_size": 293,
    "hidden_size": 72,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "local_attention": 10,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "pad_token_id": 0,
    "norm_eps": 1e-5,
}
BIASED = {"attention_bias": True, "mlp_bias": True, "classifier_bias": True}
BIASED |= {"classifier_activation": "silu", "global_attn_every_n_layers": 2}
BIASED |= {"num_hidden_layers": 4}
BIASED |= {"tie_word_embeddings": False}
CLASSIFIER = {"architectures": ["ModernBertForSequenceClassification"]}
CLASSIFIER |= {"id2label": {"0": "a", "1": "b", "2": "c"}}
LLAMA = {
    "architectures": ["LlamaForSequenceClassification"],
    "model_type": "llama",
    "vocab_size": 293,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "pad_token_id": 0,
    "num_labels": 1,
}
CLASSIFIERS = {
    "cls": CONFIG | CLASSIFIER,
    "mean": CONFIG | BIASED | CLASSIFIER | {"classifier_pooling": "mean"},
    "llama": LLAMA,
    "qwen3": LLAMA
    | {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}
    | {"head_dim": 20, "num_labels": 4, "tie_word_embeddings": True},
}
LENGTHS = (33, 19, 1)
IDS = np.random.default_rng(3).integers(1, 293, (3, 33)) * (
    np.arange(33) < np.array(LENGTHS)[:, None]
)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1.0))


def judged(path: Path, scratch: Path, kind: Any, ids: np.ndarray) -> Any:
    """(logits, gradients of half their squares by file name) of transformers, eager, fp32."""
    model, report = kind.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    logits = model(torch.from_numpy(ids), attention_mask=torch.from_numpy(ids != 0)).logits
    (logits.square().sum() / 2).backward()
    for parameter in model.parameters():
        parameter.data.copy_(0 * parameter if parameter.grad is None else parameter.grad)
    model.save_pretrained(scratch)
    return logits.detach().numpy(), hub.read_checkpoint(scratch)


def ours(spec: ModelSpec, params: dict[str, np.ndarray], ops: Any, function: Any) -> Any:
    """(logits, gradients of half their squares by file name)."""
    params = ops.to_device(params, "float32")
    if ops.name == "torch":
        for tensor in params.values():
            tensor.requires_grad_()
        logits = function(params)
        (logits.square().sum() / 2).backward()
        grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in params.items()}
        return logits.detach().numpy(), hub.to_hf(spec, ops.to_numpy(grads))
    import jax

    def loss(params: Any) -> Any:
        logits = function(params)
        return (logits * logits).sum() / 2, logits

    (_, logits), grads = compiled(ops, jax.value_and_grad(loss, has_aux=True))(params)
    return np.asarray(logits), hub.to_hf(spec, ops.to_numpy(grads))


def agree(mine: Any, theirs: Any) -> None:
    assert relative(mine[0], theirs[0]) < 1e-5
    for name, gradient in mine[1].items():
        assert relative(gradient, theirs[1][name]) < 1e-5, name


SLOW = pytest.param(BIASED, id="biased", marks=pytest.mark.slow)


@pytest.mark.parametrize("extra", [pytest.param({}, id="plain"), SLOW])
def test_masked_lm(ops: Any, extra: dict[str, Any], tmp_path: Path) -> None:
    spec = from_config(CONFIG | extra)
    params = perturbed(spec)
    hub.save_model(tmp_path / "model", spec, params)
    ids = np.random.default_rng(7).integers(1, 293, (2, 33))
    theirs = judged(tmp_path / "model", tmp_path / "g", transformers.AutoModelForMaskedLM, ids)

    def logits(params: Any) -> Any:
        return forward.logits(spec, params, forward.hidden(spec, params, ids, ops), ops)

    agree(ours(spec, params, ops, logits), theirs)


@pytest.mark.parametrize(
    "name", ["cls", "llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mean", "qwen3"))]
)
def test_classifiers(ops: Any, name: str, tmp_path: Path) -> None:
    spec = from_config(CLASSIFIERS[name])
    params = perturbed(spec)
    hub.save_model(tmp_path / "model", spec, params)
    kind = transformers.AutoModelForSequenceClassification
    theirs = judged(tmp_path / "model", tmp_path / "g", kind, IDS)
    pool = ops.to_device({"p": pool_weights(LENGTHS, 33, spec.classifier.pooling)})["p"]

    def logits(params: Any) -> Any:
        segments = None if spec.causal else (IDS != 0).astype(np.int32)
        x = forward.hidden(spec, params, IDS, ops, segments=segments)
        return class_logits(spec, params, x, pool, ops)

    agree(ours(spec, params, ops, logits), theirs)


def test_token_losses_count_the_bias(ops: Any) -> None:
    spec = from_config(CONFIG)
    params = ops.to_device(perturbed(spec), "float32")
    ids = np.random.default_rng(5).integers(0, 293, (2, 9))
    x = forward.hidden(spec, params, ids, ops)
    lse = ops.to_numpy({"x": forward.token_losses(spec, params, x, ids, ops)[1]})["x"]
    logits = ops.to_numpy({"x": forward.logits(spec, params, x, ops)})["x"]
    expected = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(lse, expected, rtol=1e-5)


def test_packed_documents_do_not_see_each_other(ops: Any) -> None:
    spec = from_config(CONFIG)
    params = ops.to_device(perturbed(spec), "float32")
    sizes = (7, 13, 9)
    ids = np.random.default_rng(1).integers(1, 293, (1, 33))
    segments = np.repeat([1, 2, 3, 0], [*sizes, 4])[None]
    positions = np.concatenate([np.arange(n) for n in (*sizes, 4)])[None]
    packed = states(spec, params, ids, ops, segments=segments, positions=positions)
    for start, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
        alone = states(spec, params, ids[:, start : start + size], ops)
        assert relative(packed[:, start : start + size], alone) < 1e-5


def test_files_come_back_byte_for_byte(tmp_path: Path) -> None:
    config = transformers.ModernBertConfig(**{k: v for k, v in CONFIG.items() if k[0] != "a"})
    transformers.ModernBertForMaskedLM(config).save_pretrained(tmp_path / "theirs")
    spec, params = hub.load_model(tmp_path / "theirs")
    hub.save_model(tmp_path / "ours", spec, params)
    theirs, mine = (hub.read_checkpoint(tmp_path / name) for name in ("theirs", "ours"))
    theirs.pop("decoder.weight", None)  # the embedding
    assert theirs.keys() == mine.keys()
    assert all(theirs[name].tobytes() == mine[name].tobytes() for name in theirs)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((768, 1152, 22, 12), 149_655_232),  # of transformers' ModernBertForMaskedLM
        ((1024, 2624, 28, 16), 395_881_664),
    ],
)
def test_published_sizes(shape: tuple[int, ...], count: int) -> None:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    published = {"vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128}
    spec = from_config(CONFIG | published | dict(zip(names, shape, strict=True)))
    assert parameter_count(spec) == count
    with torch.device("meta"):
        model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**spec.config))
    assert sum(p.numel() for p in model.parameters()) == count


def test_what_is_not_computed_is_refused(ops: Any) -> None:
    with pytest.raises(UsageError, match="norm_bias"):
        from_config(CONFIG | {"norm_bias": True})
    with pytest.raises(UsageError, match="classifier_pooling"):
        from_config(CONFIG | {"classifier_pooling": "max"})
    with pytest.raises(UsageError, match="classifier of 3 labels"):
        _ = from_config(CONFIG | CLASSIFIER).head_name
    spec = from_config(CONFIG)
    params = ops.to_device(perturbed(spec), "float32")
    with pytest.raises(UsageError, match="encoder"):
        forward.hidden(spec, params, IDS, ops, cache=KVCache((), 0))


def test_encoders_and_classifiers_write_no_text() -> None:
    for config in (CONFIG, LLAMA):
        spec = from_config(config)
        with pytest.raises(UsageError, match=r"encoder|classifier of 1"):
            Engine(spec, {}, None)
