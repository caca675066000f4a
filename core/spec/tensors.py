"""One row of a model's table: everything any room needs to know about one tensor.

Shapes follow the files on the Hugging Face hub ([out, in] for matrices), so that loading and
exporting move bytes and change none. `axes` name each dimension logically (vocab, embed, heads,
kv_heads, head_dim, mlp, expert); the sharding rules map them to mesh axes. A stacked tensor
(experts) has one file name per slice of its first dimension.
"""

import math
from dataclasses import dataclass
from typing import Literal

InitKind = Literal["normal", "ones", "zeros"]
DtypeClass = Literal["weight", "vector"]
Component = Literal["embedding", "head", "norm", "attention", "mlp"]


@dataclass(frozen=True)
class Init:
    """Initial values: `normal` (mean 0, standard deviation `std`), `ones` or `zeros`."""

    kind: InitKind
    std: float = 0.0


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model.

    dtype_class: `weight` follows the compute dtype; `vector` (norms, biases) may stay in fp32.
    hf: name in the checkpoint's files, or one name per slice of the first dimension.
    decay, muon: whether weight decay and Muon's orthogonal update apply.
    active_share: (used, of), the part of the tensor that one token visits.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    dtype_class: DtypeClass
    component: Component
    hf: str | tuple[str, ...]
    decay: bool
    muon: bool
    layer: int | None = None
    active_share: tuple[int, int] = (1, 1)

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


def place(
    row: Row, prefix: str, hf: str | tuple[str, ...], std: float, layer: int | None
) -> TensorSpec:
    """The tensor that `row` becomes under `prefix`, initialised with `std` where normal."""
    matrix = row.init == "normal" and len(row.shape) > 1
    return TensorSpec(
        name=prefix + row.name,
        shape=row.shape,
        axes=row.axes,
        init=Init(row.init, std if row.init == "normal" else 0.0),
        dtype_class="weight" if matrix else "vector",
        component=row.component,
        hf=hf,
        decay=matrix,
        muon=matrix and row.component not in ("embedding", "head"),
        layer=layer,
        active_share=row.active_share,
    )
