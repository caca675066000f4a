"""μP: initial values and learning rates that transfer from a narrow model to a wide one.

Maximal update parametrisation (Yang et al. 2022, Tensor Programs V, arXiv 2203.03466) in the form
of its table 3, without multipliers in the forward pass, so that the model remains a normal one of
its family. With r = base width / width (r = 1 changes nothing):
  hidden matrices   variance 1/width        rate · r (Adam)
  head, router      variance r/width        rate · r  (that is, ∝ 1/width²)
  embedding         as at the base width    rate · 1
  norms, biases     unchanged               rate · 1
Lion's and Adafactor's updates have a constant size like Adam's, and use its rates (arXiv
2308.01814). Muon's have the spectral norm 0.2 sqrt(width), which should be constant (arXiv
2310.17813), so its matrices use sqrt r. The paper's 1/head_dim in attention is not needed because
head_dim does not change.
"""

import math
from typing import NamedTuple

from sabia.core.errors import UsageError
from sabia.core.numerics.optimizers import OPTIMIZERS, with_mup
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec
from sabia.core.train.optimizer.config import OptimizerConfig, rules

_AXES = {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "expert", "choice"}


class Mup(NamedTuple):
    """stds: tensor name → standard deviation (`init_params`); lr_scales: → factor of the rate."""

    stds: dict[str, float]
    lr_scales: dict[str, float]


def mup(spec: ModelSpec, base_width: int, config: OptimizerConfig) -> Mup:
    """Initial values and rates of `spec` for a learning rate that was tuned at `base_width`.

    Assumes that heads and inner widths grow with the width and that head_dim is constant. Factors
    in `config.lr_scales` are multiplied in. Raises UsageError if head_dim cannot be constant, for
    tied heads, and for parts or optimizers without a μP rule.
    """
    _check(spec, base_width, config)
    width_ratio = base_width / spec.hidden_size
    base_rules = rules(spec, config)
    stds: dict[str, float] = {}
    scales: dict[str, float] = {}
    for tensor in spec.tensors():
        std, rate_falls = _tensor(spec, tensor, base_width)
        if tensor.init.kind == "normal":
            stds[tensor.name] = std
        rule = base_rules[tensor.name]
        # rate · r^exponent
        exponent = (OPTIMIZERS[rule.kind].mup_exponent or 0.0) * rate_falls
        scales[tensor.name] = rule.lr_scale * width_ratio**exponent
    return Mup(stds, scales)


def _tensor(spec: ModelSpec, tensor: TensorSpec, base_width: int) -> tuple[float, bool]:
    """(standard deviation, whether the learning rate falls with the width)."""
    # as at the base width: variance 1/base_width
    if tensor.component == "embedding":
        return 1 / math.sqrt(base_width), False
    if len(tensor.shape) == 1:
        return 0.0, False
    standard_std = 1 / math.sqrt(spec.hidden_size)
    if tensor.component in ("head", "router"):
        # matrices with variance r/width
        return standard_std * math.sqrt(base_width / spec.hidden_size), True
    residual = tensor.init.std / spec.init_std if spec.init_std else 1.0  # 1/sqrt(2L) of outputs
    return standard_std * residual, tensor.init.kind == "normal"


def _check(spec: ModelSpec, base_width: int, config: OptimizerConfig) -> None:
    if base_width < 1:
        raise UsageError(f"--mup-base: base width {base_width} (expected 1 or more)")
    if spec.tied:
        raise UsageError(
            "--mup-base: the head is the embedding, whose initial values and rate must fall with "
            "the width in one role and not in the other (expected tied=false)"
        )
    scales = {"embeddings": spec.embed_scale, "the states before the head": spec.logit_scale}
    for what, scale in scales.items():
        if scale != 1.0:
            raise UsageError(
                f"--mup-base: {what} are multiplied by {scale:g} (expected a family without)"
            )
    if config.name not in with_mup():
        names = ", ".join(with_mup())
        raise UsageError(f"--mup-base: optimizer {config.name} (expected one of {names})")
    unsupported = next((t for t in spec.tensors() if not set(t.axes) <= _AXES), None)
    if unsupported is not None:
        raise UsageError(
            f"--mup-base: {unsupported.name} has axes {unsupported.axes} (expected only attention "
            "and gated MLPs)"
        )
    for layer in spec.layers:
        _check_heads(spec, layer.mixer, base_width)


def _check_heads(spec: ModelSpec, mixer: object, base_width: int) -> None:
    """Raise UsageError unless the base model, with the same head_dim, has whole head counts."""
    size = getattr(mixer, "head_dim", 0)
    for count in (getattr(mixer, "heads", 0), getattr(mixer, "kv_heads", 0)):
        if not count or count * base_width % spec.hidden_size:
            raise UsageError(
                f"--mup-base: {count} heads of {size} at width {spec.hidden_size} are "
                f"{count * base_width / spec.hidden_size:g} at width {base_width} (expected a "
                "whole number: head_dim is the same at both widths)"
            )
