"""μP: initial values and rates with which a rate found on a narrow model serves a wide one.

Maximal update parametrisation (Yang et al. 2022, Tensor Programs V, arXiv 2203.03466) in the form
of its table 3, without multipliers in the forward pass, so that the model stays a plain one of its
family. With r = base width / width, everything is as usual at r = 1, and
  matrices inside   variance 1/width        rate · r (Adam)
  head, router      variance r/width        rate · r  (that is, ∝ 1/width²)
  embedding         as at the base width    rate · 1
  norms, biases     as ever                 rate · 1
Lion's and Adafactor's updates are of even size as Adam's, and take its rates (arXiv 2308.01814).
Muon's have the spectral norm 0.2 sqrt(width) where a stable one is constant (arXiv 2310.17813), so
its matrices take sqrt r. The paper's 1/head_dim in attention is not needed as head_dim stays.
"""

import math
from typing import NamedTuple

from sabia.core.errors import UsageError
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec
from sabia.core.train.optimizer.config import OptimizerConfig, rules

# how the rate of a matrix inside falls with the width, by rule
_EXPONENTS = {"adamw": 1.0, "lion": 1.0, "adafactor": 1.0, "muon": 0.5}
_AXES = {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "expert", "choice"}


class Mup(NamedTuple):
    """Tensor name → standard deviation (`init_params`), and → factor of the rate (`lr_scales`)."""

    stds: dict[str, float]
    lr_scales: dict[str, float]


def mup(spec: ModelSpec, base_width: int, config: OptimizerConfig) -> Mup:
    """What μP makes of `spec`, its rate having been found at `base_width`.

    Heads and inner widths are taken to grow with the width, head_dim to stay. Factors in
    `config.lr_scales` are kept, multiplied. Raises UsageError where head_dim cannot stay, for tied
    heads, and for parts or optimizers that the theory was not worked out for.
    """
    _check(spec, base_width, config)
    share = base_width / spec.hidden_size
    given = rules(spec, config)
    stds: dict[str, float] = {}
    scales: dict[str, float] = {}
    for tensor in spec.tensors():
        std, falls = _tensor(spec, tensor, base_width)
        if tensor.init.kind == "normal":
            stds[tensor.name] = std
        rule = given[tensor.name]
        scales[tensor.name] = rule.lr_scale * share ** (_EXPONENTS[rule.kind] * falls)
    return Mup(stds, scales)


def _tensor(spec: ModelSpec, tensor: TensorSpec, base_width: int) -> tuple[float, bool]:
    """Standard deviation, and whether the rate falls with the width."""
    if tensor.component == "embedding":
        return 1 / math.sqrt(base_width), False
    if len(tensor.shape) == 1:
        return 0.0, False
    usual = 1 / math.sqrt(spec.hidden_size)
    if tensor.component in ("head", "router"):
        return usual * math.sqrt(base_width / spec.hidden_size), True
    residual = tensor.init.std / spec.init_std if spec.init_std else 1.0  # 1/sqrt(2L) of outputs
    return usual * residual, tensor.init.kind == "normal"


def _check(spec: ModelSpec, base_width: int, config: OptimizerConfig) -> None:
    if base_width < 1:
        raise UsageError(f"--mup-base: base width {base_width} (expected 1 or more)")
    if spec.tied:
        raise UsageError(
            "--mup-base: the head is the embedding, whose initial values and rate must fall with "
            "the width in one role and not in the other (expected tied=false)"
        )
    if spec.embed_scale != 1.0:
        raise UsageError(
            f"--mup-base: embeddings are multiplied by {spec.embed_scale:g} (expected a family "
            "without)"
        )
    if config.name not in _EXPONENTS:
        raise UsageError(
            f"--mup-base: optimizer {config.name} (expected one of {', '.join(_EXPONENTS)})"
        )
    odd = next((t for t in spec.tensors() if not set(t.axes) <= _AXES), None)
    if odd is not None:
        raise UsageError(
            f"--mup-base: {odd.name} has axes {odd.axes} (expected attention and gated MLPs)"
        )
    for layer in spec.layers:
        _check_heads(spec, layer.mixer, base_width)


def _check_heads(spec: ModelSpec, mixer: object, base_width: int) -> None:
    """head_dim is the base model's, of which both counts of heads must then be whole."""
    size = getattr(mixer, "head_dim", 0)
    for count in (getattr(mixer, "heads", 0), getattr(mixer, "kv_heads", 0)):
        if not count or count * base_width % spec.hidden_size:
            raise UsageError(
                f"--mup-base: {count} heads of {size} at width {spec.hidden_size} are "
                f"{count * base_width / spec.hidden_size:g} at width {base_width} (expected a "
                "whole number: head_dim is the same at both widths)"
            )
