"""Random configurations of every family compute what transformers computes, in both backends.

Two comparisons: the configuration as transformers completes it, with all defaults of the family,
gives the same model (thousands, without weights); and logits and every gradient are equal.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import families, from_config

from .conftest import perturbed, states
from .random_configs import families as drawn_families
from .random_configs import random_config
from .test_transformers import GRADIENTS, reference, relative

transformers = pytest.importorskip("transformers", reason="transformers is the judge here")

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# model types that contain another one, and those that transformers lacks
OTHERS = {"gemma3", "qwen3_5", "qwen3_5_moe", "minicpm"}


def test_every_family_is_drawn() -> None:
    assert {*drawn_families()} | OTHERS == set(families())


def completed(config: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration with all fields that transformers gives it; None if it refuses it."""
    try:
        theirs = transformers.AutoConfig.for_model(**config)
    except Exception as error:
        assert "alidation" in type(error).__name__ or isinstance(error, (KeyError, ValueError))
        return None
    return theirs.to_dict()


@pytest.mark.parametrize("family", drawn_families())
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    compared = 0
    for seed in range(200):
        config = random_config(family, seed)
        whole = completed(config)
        if whole is None:
            continue
        try:
            ours = from_config(config)
        except UsageError as error:
            assert "expected" in str(error), seed
            continue
        assert ours == from_config(whole), (seed, config)
        compared += 1
    assert compared >= 100


class Errors(NamedTuple):
    """Relative errors of the logits, of the whole gradient, and of the worst tensor's gradient."""

    logits: float
    gradient: float
    tensor: float


# some random models are so sensitive that fp32 loses digits in transformers too
MEDIAN = Errors(logits=2e-6, gradient=5e-6, tensor=1e-5)
SOFTMAX = Errors(logits=4e-6, gradient=5e-5, tensor=1e-3)
HYBRID = Errors(logits=2e-5, gradient=5e-4, tensor=2e-3)


def errors(family: str, seed: int, ops: Any, directory: Path) -> Errors | None:
    """The errors of one random model; None if it is refused."""
    config = random_config(family, seed)
    try:
        spec = from_config(config)
    except UsageError:
        return None
    if completed(config) is None:
        return None
    random = np.random.default_rng(seed)
    ids = random.integers(1, spec.vocab_size, (2, int(random.integers(2, 75))))
    arrays = perturbed(spec, seed)
    hub.write_checkpoint(directory / "model", config, hub.to_hf(spec, arrays))
    task = "CausalLM" if spec.causal else "MaskedLM"
    logits, loss, grads = reference(directory / "model", directory / "gradients", ids, task)
    params = ops.to_device(arrays, "float32")
    our_loss, our_grads, ours = GRADIENTS[ops.name](spec, params, ops, ids=ids)
    assert our_loss == pytest.approx(loss, rel=1e-5), (seed, config)
    constant = {tensor.hf for tensor in spec.tensors() if not tensor.trained}
    named = {k: x for k, x in hub.to_hf(spec, our_grads).items() if k not in constant}
    assert named.keys() == grads.keys() - constant
    return Errors(relative(ours, logits), *gradient_errors(named, grads))


def gradient_errors(
    ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]
) -> tuple[float, float]:
    """(relative error of all gradients, of the worst tensor).

    A tensor's norm counts as at least 1 % of what it would be if all elements were equally large:
    gradients of the biases of keys, for instance, are sums that cancel.
    """
    off = {name: float(np.linalg.norm(x - theirs[name])) for name, x in ours.items()}
    norms = {name: float(np.linalg.norm(theirs[name])) for name in ours}
    whole = np.linalg.norm([*norms.values()])
    elements = sum(x.size for x in ours.values())
    least = {name: 0.01 * whole * (x.size / elements) ** 0.5 for name, x in ours.items()}
    worst = max(off[name] / max(norms[name], least[name]) for name in ours)
    return float(np.linalg.norm([*off.values()]) / whole), worst


@pytest.mark.parametrize("family", drawn_families())
def test_random_models(family: str, tmp_path: Path) -> None:
    check(family, range(4), load_ops("torch"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", drawn_families())
def test_many_random_models(family: str, ops: Any, tmp_path: Path) -> None:
    check(family, range(100, 145 if ops.name == "torch" else 108), ops, tmp_path)


def check(family: str, seeds: range, ops: Any, directory: Path) -> None:
    """Compare the models of these numbers."""
    worst = {seed: errors(family, seed, ops, directory / f"{seed}") for seed in seeds}
    compared = {seed: pair for seed, pair in worst.items() if pair is not None}
    bars = HYBRID if family in HYBRIDS else SOFTMAX
    wrong = {
        seed: found
        for seed, found in compared.items()
        if any(error > bar for error, bar in zip(found, bars, strict=True))
    }
    assert not wrong and len(compared) >= len(seeds) // 2
    assert (np.median([*compared.values()], 0) <= MEDIAN).all()


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_hybrids_are_as_exact_as_their_weights(family: str, ops: Any) -> None:
    """Packed and separate documents differ by less than weights in fp32 leave open.

    The norm of each head's result divides by its size. Where that is small, one unit in the last
    place of the weights changes the logits by up to 4e-5, and the gradient by up to 7e-4.
    """
    for seed in range(20 if ops.name == "torch" else 4):
        try:
            spec = from_config(random_config(family, seed))
        except UsageError:
            continue
        random = np.random.default_rng(seed)
        lengths = [*random.integers(1, 150, 2), *random.integers(1, 9, 2)]
        documents = [random.integers(1, spec.vocab_size, (1, n)) for n in lengths]
        rows = {"segments": np.repeat([1, 2, 3, 4], lengths)[None]}
        rows["positions"] = np.concatenate([np.arange(n) for n in lengths])[None]
        arrays = perturbed(spec, seed)
        params = ops.to_device(arrays, "float32")
        packed = states(spec, params, np.concatenate(documents, 1), ops, **rows)
        alone = [states(spec, params, document, ops) for document in documents]
        moved = {
            name: (x * (1 + random.uniform(-6e-8, 6e-8, x.shape))).astype(np.float32)
            for name, x in arrays.items()
        }
        params = ops.to_device(moved, "float32")
        near = states(spec, params, np.concatenate(documents, 1), ops, **rows)
        allowed = max(2e-6, 3 * relative(near, packed))
        assert relative(packed, np.concatenate(alone, 1)) <= allowed, seed
