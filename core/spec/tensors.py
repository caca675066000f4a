"""One row of a model's table: everything that any package needs to know about one tensor.

Shapes are those of the files on the Hugging Face hub ([out, in] for matrices), so that loading and
exporting copy bytes and change none. `axes` name each dimension logically (vocab, embed, heads,
kv_heads, head_dim, mlp, expert); the sharding rules map them to mesh axes. A vector with the one
axis head_dim is shared by all heads. A stacked tensor (experts) has one file name per slice of its
first dimension; a part of a fused projection is a FusedPart of a file's tensor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

InitKind = Literal["normal", "fan_in", "ones", "zeros", "rate", "step"]
DtypeClass = Literal["weight", "vector"]
Component = Literal["embedding", "head", "norm", "attention", "conv", "mlp", "router"]


@dataclass(frozen=True)
class FusedPart:
    """The position of a tensor inside a larger tensor of the files (a fused projection).

    The file's tensor of `shape` is reshaped to `view` and sliced by `cut`, (start, stop, step) on
    each axis; its axes are transposed to `order`, and the result has the tensor's own shape.
    """

    file: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    cut: tuple[tuple[int, int, int], ...]
    order: tuple[int, ...]


def fused_parts(
    file: str, shape: tuple[int, ...], view: tuple[int, ...], axis: int, sizes: Mapping[str, int]
) -> dict[str, FusedPart]:
    """Parts of a file's tensor that follow each other on one axis of `view`, by name."""
    parts, start = {}, 0
    for name, size in sizes.items():
        cut = [(0, length, 1) for length in view]
        cut[axis] = (start, start + size, 1)
        parts[name] = FusedPart(file, shape, view, tuple(cut), tuple(range(len(view))))
        start += size
    return parts


FileName = str | tuple[str, ...] | FusedPart
FileTemplate = str | FusedPart  # names with {layer} and {expert}


@dataclass(frozen=True)
class Init:
    """Initial values: `ones`, `zeros`, `normal` (mean 0, standard deviation `std`) and others.

    fan_in: normal of standard deviation 1/sqrt(last dimension). rate: logarithms of decay rates
    spread evenly over (0.01, 16); step: what softplus maps to time steps whose logarithms are
    spread evenly over (0.001, 0.1); both as in Mamba-2 (arXiv 2405.21060).
    """

    kind: InitKind
    std: float = 0.0


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model.

    dtype_class: `weight` follows the compute dtype; `vector` (norms, biases, routers) may stay
    in fp32.
    hf: name in the checkpoint's files, one name per slice of the first dimension, or a FusedPart.
    decay, muon: whether weight decay and Muon's orthogonal update apply.
    trained: False for tensors without a gradient (a router's expert biases).
    active_share: (used, of), the fraction of the tensor that one token uses.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    dtype_class: DtypeClass
    component: Component
    hf: FileName
    decay: bool
    muon: bool
    layer: int | None = None
    active_share: tuple[int, int] = (1, 1)
    trained: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the tensors in the files that hold it."""
        if isinstance(self.hf, FusedPart):
            return (self.hf.file,)
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    @property
    def stacked(self) -> bool:
        """Whether it holds a tensor of every expert on its first axis."""
        return self.axes[:1] == ("expert",)

    @property
    def linear(self) -> bool:
        """Whether it is the matrix of a linear layer, or one of every expert."""
        matrix = len(self.shape) - self.stacked > 1
        return matrix and self.component not in ("embedding", "conv")


@dataclass(frozen=True)
class TableRow:
    """A tensor as a layer declares it, before the model adds its prefix and its file name."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    component: Component
    init: InitKind = "normal"
    residual_output: bool = False
    active_share: tuple[int, int] = (1, 1)
    trained: bool = True

    def tensor(self, prefix: str, hf: FileName, std: float, layer: int | None) -> TensorSpec:
        """The tensor with `prefix` before its name, initialised with `std` if it is normal."""
        matrix = self.init == "normal" and len(self.shape) > 1
        return TensorSpec(
            name=prefix + self.name,
            shape=self.shape,
            axes=self.axes,
            init=Init(self.init, std if self.init == "normal" else 0.0),
            dtype_class="weight" if matrix and self.component != "router" else "vector",
            component=self.component,
            hf=hf,
            decay=matrix,
            muon=matrix and self.component not in ("embedding", "head", "router"),
            layer=layer,
            active_share=self.active_share,
            trained=self.trained,
        )
