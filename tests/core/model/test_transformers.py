"""Logits, losses and every gradient equal transformers', in both backends."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.spec import from_config

from .conftest import CONFIGS, compiled, perturbed

transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
torch = pytest.importorskip("torch", reason="transformers needs torch")

IDS = np.random.default_rng(7).integers(0, 293, (2, 33))


def reference(
    path: Path, scratch: Path, ids: np.ndarray = IDS, task: str = "CausalLM"
) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """(logits, mean next-token loss, gradients by file name) of transformers, eager, fp32.

    Gradients take their parameters' places and are saved, so that the judge itself names them.
    """
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, report = getattr(transformers, f"AutoModelFor{task}").from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, **eager
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    rows = torch.from_numpy(ids)
    model.config.use_cache = False
    logits = model.eval()(rows).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    for parameter in model.parameters():
        parameter.data.copy_(0 * parameter if parameter.grad is None else parameter.grad)
    model.save_pretrained(scratch)
    return logits.detach().numpy(), loss.item(), hub.read_checkpoint(scratch)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """|ours - theirs| / |theirs|, 2-norms; an expert that no token visited has gradients of 0."""
    return float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) or 1.0))


def scores(spec: Any, params: Any, ops: Any) -> np.ndarray:
    """Logits of IDS; the stream has the parameters' dtype."""

    def run(params: Any) -> Any:
        x = forward.hidden(spec, params, IDS, ops)
        assert x.dtype == params["embed"].dtype
        return forward.logits(spec, params, x, ops)

    return ops.to_numpy({"x": compiled(ops, run)(params)})["x"]


def loss_and_logits(
    spec: Any, params: Any, ops: Any, ids: np.ndarray = IDS, **options: Any
) -> tuple[Any, Any]:
    """Mean next-token loss of ids through `token_losses`, and their logits."""
    x = forward.hidden(spec, params, ids, ops, **options)
    assert x.dtype == params["embed"].dtype
    losses = forward.token_losses(spec, params, x[:, :-1], ids[:, 1:], ops)[0]
    return losses.mean(), forward.logits(spec, params, x, ops)


def torch_gradients(spec: Any, params: Any, ops: Any, **options: Any) -> tuple[float, dict, Any]:
    params = {name: p.requires_grad_() for name, p in params.items()}
    loss, logits = loss_and_logits(spec, params, ops, **options)
    loss.backward()
    found = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in params.items()}
    return loss.item(), ops.to_numpy(found), logits.detach().numpy()


def jax_gradients(spec: Any, params: Any, ops: Any, **options: Any) -> tuple[float, dict, Any]:
    import jax

    run = jax.value_and_grad(lambda p: loss_and_logits(spec, p, ops, **options), has_aux=True)
    (loss, logits), grads = compiled(ops, run)(params)
    return float(loss), ops.to_numpy(grads), np.asarray(logits)


GRADIENTS = {"torch": torch_gradients, "jax": jax_gradients}


def test_logits_loss_and_gradients(checkpoint: Path, ops: Any, tmp_path: Path) -> None:
    logits, loss, grads = reference(checkpoint, tmp_path)
    spec, arrays = hub.load_model(checkpoint)
    params = ops.to_device(arrays, "float32")
    our_loss, our_grads, ours = GRADIENTS[ops.name](spec, params, ops)
    assert ours.shape == logits.shape and ours.dtype == np.float32
    assert relative(ours, logits) <= 4e-6 and logits.std() > 0.5
    assert np.abs(ours - logits).max() <= 1e-5 * np.abs(logits).max()
    assert our_loss == pytest.approx(loss, abs=1e-5)
    named = hub.to_hf(spec, our_grads)
    assert named.keys() == grads.keys()
    constant = {tensor.hf for tensor in spec.tensors() if not tensor.trained}
    for name in grads.keys() - constant:
        assert relative(named[name], grads[name]) <= 1e-4, name


def test_rematerialised_gradients_are_the_same(tiny: Any, ops: Any) -> None:
    spec, arrays = tiny
    plain, *others = (
        GRADIENTS[ops.name](spec, ops.to_device(arrays, "float32"), ops, remat=policy)
        for policy in ("none", "full", "matmuls")
    )
    for loss, grads, _ in others:
        assert loss == pytest.approx(plain[0], abs=1e-6)
        assert max(relative(grads[name], grad) for name, grad in plain[1].items()) <= 1e-5


def test_bfloat16_is_near_and_scores_stay_fp32(tiny: Any, ops: Any) -> None:
    spec, arrays = tiny
    found = []
    for dtype in ("float32", "bfloat16"):
        params = ops.to_device(arrays, dtype)
        found.append(scores(spec, params, ops))
    assert found[1].dtype == np.float32
    assert 1e-4 < relative(found[1], found[0]) < 0.05


MINICPM = CONFIGS["llama"] | {"model_type": "minicpm", "head_dim": 12, "attention_bias": True}
MINICPM |= {"scale_emb": 7, "scale_depth": 0.9, "dim_model_base": 50}
GRANITE = CONFIGS["llama"] | {"head_dim": 12, "attention_bias": True}
GRANITE |= {"embedding_multiplier": 7, "residual_multiplier": 0.9 / 2**0.5}
GRANITE |= {"logits_scaling": 72 / 50, "attention_multiplier": 12**-0.5, "model_type": "granite"}


def test_minicpm_is_granite_with_other_names_of_its_factors(ops: Any, tmp_path: Path) -> None:
    """transformers lacks `minicpm`; its Granite has the same factors, given one by one."""
    spec = from_config(MINICPM)
    arrays = perturbed(spec)
    hub.write_checkpoint(tmp_path / "granite", GRANITE, hub.to_hf(spec, arrays))
    logits, loss, grads = reference(tmp_path / "granite", tmp_path / "gradients")
    our_loss, our_grads, ours = GRADIENTS[ops.name](spec, ops.to_device(arrays, "float32"), ops)
    assert relative(ours, logits) <= 2e-6 and our_loss == pytest.approx(loss, abs=1e-5)
    named = hub.to_hf(spec, our_grads)
    for name in grads:
        assert relative(named[name], grads[name]) <= 1e-5, name
