"""One row of a model's table: everything any room needs to know about one tensor.

Shapes follow the files on the Hugging Face hub ([out, in] for matrices), so that loading and
exporting move bytes and change none. `axes` name each dimension logically (vocab, embed, heads,
kv_heads, head_dim, mlp, expert); the sharding rules map them to mesh axes. A vector with the one
axis head_dim is shared by all heads. A stacked tensor (experts) has one file name per slice of its
first dimension; a piece of a fused projection is a Part of a file's tensor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

InitKind = Literal["normal", "fan_in", "ones", "zeros", "rate", "step"]
DtypeClass = Literal["weight", "vector"]
Component = Literal["embedding", "head", "norm", "attention", "conv", "mlp", "router"]


@dataclass(frozen=True)
class Part:
    """Where a tensor lies inside a larger tensor of the files (a fused projection).

    The file's tensor of `shape`, seen as `view`, is cut by (start, stop, step) on each axis of
    the view, the axes are put into `order`, and the result has the tensor's own shape.
    """

    file: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    cut: tuple[tuple[int, int, int], ...]
    order: tuple[int, ...]


def pieces(
    file: str, shape: tuple[int, ...], view: tuple[int, ...], axis: int, sizes: Mapping[str, int]
) -> dict[str, Part]:
    """Parts of a file's tensor that lie behind each other on one axis of `view`, by name."""
    found, start = {}, 0
    for name, size in sizes.items():
        cut = [(0, length, 1) for length in view]
        cut[axis] = (start, start + size, 1)
        found[name] = Part(file, shape, view, tuple(cut), tuple(range(len(view))))
        start += size
    return found


FileName = str | tuple[str, ...] | Part


@dataclass(frozen=True)
class Init:
    """Initial values: `ones`, `zeros`, `normal` (mean 0, standard deviation `std`) or others.

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
    hf: name in the checkpoint's files, one name per slice of the first dimension, or a Part.
    decay, muon: whether weight decay and Muon's orthogonal update apply.
    trained: False for what no gradient changes (a router's balancing bias).
    active_share: (used, of), the part of the tensor that one token visits.
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


@dataclass(frozen=True)
class Row:
    """A tensor as a layer declares it, before the model gives it a place and a file name."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    component: Component
    init: InitKind = "normal"
    residual_output: bool = False
    active_share: tuple[int, int] = (1, 1)
    trained: bool = True


def place(row: Row, prefix: str, hf: FileName, std: float, layer: int | None) -> TensorSpec:
    """The tensor that `row` becomes under `prefix`, initialised with `std` where normal."""
    matrix = row.init == "normal" and len(row.shape) > 1
    return TensorSpec(
        name=prefix + row.name,
        shape=row.shape,
        axes=row.axes,
        init=Init(row.init, std if row.init == "normal" else 0.0),
        dtype_class="weight" if matrix and row.component != "router" else "vector",
        component=row.component,
        hf=hf,
        decay=matrix,
        muon=matrix and row.component not in ("embedding", "head", "router"),
        layer=layer,
        active_share=row.active_share,
        trained=row.trained,
    )
