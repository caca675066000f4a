"""LoRA: low-rank adapters of frozen matrices (Hu et al. 2021, arXiv 2106.09685).

A targeted matrix W[out, in] becomes W + alpha/rank · B A with A[rank, in], B[out, rank]; only A and
B are trained. They are ordinary tensors, NAME.lora_a and NAME.lora_b, and are sharded like their
matrix; `core.ops.product.LowRankAdapter` adds them to its products. B starts at zero, so training
starts from the model itself. There is no dropout: with it, an update would depend on more than
(seed, step), and the paper's gains do not need it.

With a `base` (QLoRA, arXiv 2305.14314) the matrices of the layers, all but routers, are frozen as
codes of 4 bits and decoded for each product. They are a function of the starting model, so that no
checkpoint has them; the trained model is that of the decoded matrices.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.model.init import init_tensor
from sabia.core.ops.base import Array, Params
from sabia.core.ops.product import A, B
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import Init, TensorSpec

APART = "attn.kv_up"  # decoding of latent attention multiplies by its parts


@dataclass(frozen=True)
class LoraConfig:
    """rank and alpha as above; targets: regular expression, searched in names of matrices; base: a
    format of core.numerics.frozen_base, '' for the matrices themselves.

    The matrices inside the layers that multiply every token can have an adapter: not embeddings,
    heads, routers and stacked experts. '' targets all of them.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str = ""
    base: str = ""

    def __post_init__(self) -> None:
        if self.rank < 1 or not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UsageError(
                f"lora: rank {self.rank}, alpha {self.alpha} (expected 1 or more and above 0)"
            )

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def adaptable(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The matrices that can have an adapter."""
    return tuple(t for t in spec.tensors() if t.muon and len(t.shape) == 2)


def targeted(spec: ModelSpec, config: LoraConfig) -> tuple[TensorSpec, ...]:
    """The matrices that get an adapter; raises UsageError if there are none."""
    adaptable_matrices = adaptable(spec)
    matrices = tuple(t for t in adaptable_matrices if re.search(config.targets, t.name))
    if not matrices:
        names = ", ".join(sorted({t.name.split(".", 2)[-1] for t in adaptable_matrices}))
        raise UsageError(
            f"--lora-targets: {config.targets!r} matches no matrix that can have an adapter "
            f"(expected some of layers.N.{{{names}}})"
        )
    return matrices


def base_names(spec: ModelSpec, config: LoraConfig | None) -> frozenset[str]:
    """The matrices, of experts too, that are held in the format of `config.base`."""
    if config is None or not config.base:
        return frozenset()
    matrices = (t for t in spec.tensors() if t.muon and t.linear and t.name.startswith("layers."))
    return frozenset(t.name for t in matrices if not t.name.endswith(APART))


def lora_tensors(spec: ModelSpec, config: LoraConfig) -> tuple[TensorSpec, ...]:
    """The adapters' tensors, A and B of each targeted matrix, in the order of the table."""
    tensors: list[TensorSpec] = []
    for matrix in targeted(spec, config):
        (outs, ins), (out_axis, in_axis), rank = matrix.shape, matrix.axes, config.rank
        module = f"base_model.model.{str(matrix.hf).removesuffix('.weight')}"
        adapters: Any = (
            (A, (rank, ins), ("lora", in_axis), Init("normal", ins**-0.5), "lora_A"),
            (B, (outs, rank), (out_axis, "lora"), Init("zeros"), "lora_B"),
        )
        for suffix, shape, axes, init, part in adapters:
            tensor = replace(matrix, name=matrix.name + suffix, hf=f"{module}.{part}.weight")
            tensor = replace(tensor, shape=shape, axes=axes, init=init)
            tensors.append(replace(tensor, muon=False, active_share=(1, 1)))
    return tuple(tensors)


def init_lora(spec: ModelSpec, config: LoraConfig, seed: int) -> dict[str, np.ndarray]:
    """name → fp32 initial values of adapters, a pure function of its arguments."""
    return {t.name: init_tensor(t, seed) for t in lora_tensors(spec, config)}


def merged(params: Params, config: LoraConfig) -> dict[str, Array]:
    """The model's parameters, W + alpha/rank · B A where there is an adapter; without adapters."""
    model = {name: p for name, p in params.items() if not name.endswith((A, B))}
    for name in (name for name in model if name + A in params):
        model[name] = model[name] + config.scale * (params[name + B] @ params[name + A])
    return model


def with_adapters(names: Mapping[str, str], params: Params) -> Mapping[str, str]:
    """names (short → full) of a layer's tensors, with the adapters that `params` holds for them."""
    pairs = ((s + end, full + end) for s, full in names.items() for end in (A, B))
    adapters = {short: full for short, full in pairs if full in params}
    return {**names, **adapters} if adapters else names
