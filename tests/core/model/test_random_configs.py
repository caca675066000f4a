"""Random configurations of every family compute what transformers computes, in both backends.

Two comparisons: the configuration as transformers completes it, with all defaults of the family,
gives the same model (thousands, without weights); and logits and every gradient are equal.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model.backend import load_ops
from sabia.core.model.storage import hub
from sabia.core.spec import families, from_config

from .conftest import perturbed
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


def compare(family: str, seed: int, ops: Any, directory: Path) -> bool:
    """Compare one random configuration; False if it is refused, by us or by transformers."""
    config = random_config(family, seed)
    try:
        spec = from_config(config)
    except UsageError:
        return False
    if completed(config) is None:
        return False
    random = np.random.default_rng(seed)
    ids = random.integers(1, spec.vocab_size, (2, int(random.integers(2, 75))))
    arrays = perturbed(spec, seed)
    hub.write_checkpoint(directory / "model", config, hub.to_hf(spec, arrays))
    task = "CausalLM" if spec.causal else "MaskedLM"
    logits, loss, grads = reference(directory / "model", directory / "gradients", ids, task)
    params = ops.to_device(arrays, "float32")
    our_loss, our_grads, ours = GRADIENTS[ops.name](spec, params, ops, ids=ids)
    bars = (2e-6, 5e-6) if family not in HYBRIDS else (4e-5, 4e-4)
    assert relative(ours, logits) <= bars[0], (seed, config)
    assert our_loss == pytest.approx(loss, abs=1e-5), (seed, config)
    assert gradient_error(spec, our_grads, grads) <= bars[1], (seed, config)
    return True


def gradient_error(spec: Any, ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest error of a tensor's gradient relative to its norm.

    A norm counts as at least 1 % of what it would be if all elements were equally large: gradients
    of biases of keys, for instance, are sums that cancel.
    """
    named = hub.to_hf(spec, ours)
    assert named.keys() == theirs.keys()
    elements = sum(x.size for x in theirs.values())
    mean = np.sqrt(
        sum(float((x.astype(np.float64) ** 2).sum()) for x in theirs.values()) / elements
    )
    constant = {tensor.hf for tensor in spec.tensors() if not tensor.trained}
    return max(
        float(np.linalg.norm(named[name] - x))
        / max(float(np.linalg.norm(x)), 0.01 * mean * x.size**0.5)
        for name, x in theirs.items()
        if name not in constant
    )


@pytest.mark.parametrize("family", drawn_families())
def test_random_models(family: str, tmp_path: Path) -> None:
    ops = load_ops("torch")
    compared = sum(compare(family, seed, ops, tmp_path / f"{seed}") for seed in range(4))
    assert compared >= 2


@pytest.mark.slow
@pytest.mark.parametrize("family", drawn_families())
def test_many_random_models(family: str, ops: Any, tmp_path: Path) -> None:
    seeds = range(100, 145 if ops.name == "torch" else 112)
    compared = sum(compare(family, seed, ops, tmp_path / f"{seed}") for seed in seeds)
    assert compared >= len(seeds) * 2 // 3
