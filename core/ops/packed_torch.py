"""Products of a generation on a CPU, with matrices in panels or in the layout of oneDNN.

A step of a few rows multiplies a small input by every matrix of the model, and MKL and oneDNN
arrange a plain matrix anew for each product. `packed` gives parameters that know their own packed
copies: those of matrices that are multiplied by one input (queries, keys and values; gate and up)
are one matrix. A copy is made when a product first needs it. One row is multiplied by the matrices
as they are (kernels.row_products). The values of all parameters stay as they are meanwhile.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sabia.core.ops.base import Params
from sabia.core.ops.product import Array, Matrix
from sabia.kernels.panel_products.interface import fill, panels_for, product
from sabia.kernels.panel_products.torch_arrays import serves as serves_panels
from sabia.kernels.row_products.torch_arrays import reads_in_order
from sabia.kernels.runtime.torch_fp32 import FP32_COMPUTED, HAS_ONEDNN, onednn_linear
from sabia.kernels.runtime.torch_support import numbers

if TYPE_CHECKING:
    from sabia.core.ops.experts_torch import DispatchPlan

Tensor = torch.Tensor
ROWS_OF_A_THREAD = 64  # at least


class Joined:
    """Matrices that are multiplied by one input. sizes: the outputs of each."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        self._weights = [matrix.weight for matrix in matrices]
        self.sizes = [len(weight) for weight in self._weights]
        self.outputs = sum(self.sizes)
        self.nbytes = sum(weight.nbytes for weight in self._weights)
        self.bias: Tensor | None = None
        if any(matrix.bias is not None for matrix in matrices):
            self.bias = torch.cat([
                weight.new_zeros(len(weight)) if bias is None else bias.to(weight.dtype)
                for _, weight, bias, _ in matrices
            ])  # fmt: skip

    @cached_property
    def packed(self) -> Tensor:
        """All of them as one matrix, in the layout of oneDNN."""
        whole = torch.cat(self._weights) if len(self.sizes) > 1 else self._weights[0].detach()
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight.default(whole, None)
        return packed

    @cached_property
    def arrays(self) -> list[np.ndarray]:
        """Each of them as it is."""
        return [numbers(weight) for weight in self._weights]

    @cached_property
    def panels(self) -> np.ndarray:
        """All of them as one matrix in panels (kernels.panel_products)."""
        panels, first = panels_for(self.arrays[0], self.outputs), 0
        for array in self.arrays:
            fill(panels, array, first)
            first += len(array)
        return panels

    def times(self, x: Tensor) -> Tensor:
        """x[..., in] times all matrices."""
        if not serves_panels(x):
            return onednn_linear(x, self.packed, self.bias)
        y = self.in_panels(x)
        return y if self.bias is None else y + self.bias

    def in_panels(self, x: Tensor) -> Tensor:
        """x[..., in] times all matrices, in float32 and then rounded to x's dtype; without a bias
        and a gradient."""
        rows = x.detach().reshape(-1, x.shape[-1]).float().contiguous()
        y = torch.empty(*x.shape[:-1], self.outputs)
        parts = numbers(rows), numbers(y).reshape(len(rows), -1)
        threads = max(1, min(torch.get_num_threads(), len(rows) // ROWS_OF_A_THREAD))
        if threads == 1:
            product(parts[0], self.panels, parts[1])
        else:
            split = [np.array_split(part, threads) for part in parts]
            with ThreadPoolExecutor(threads) as pool:
                inputs, results = split
                list(pool.map(product, inputs, [self.panels] * threads, results))
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def of_one_row(self, x: Tensor) -> Tensor:
        """x[..., in], of one row, times all matrices."""
        from sabia.kernels.row_products.interface import matrix_vector

        made, row, end = torch.empty(*x.shape[:-1], self.outputs), numbers(x.float().view(-1)), 0
        out = numbers(made).reshape(-1)
        for array, size in zip(self.arrays, self.sizes, strict=True):
            start, end = end, end + size
            matrix_vector(array, row, out[start:end])
        y = made if x.dtype == torch.float32 else made.to(x.dtype)
        return y if self.bias is None else y + self.bias


class Packed(torch.Tensor):
    """A matrix that is in all other respects a plain tensor. source, version: the tensor that it
    is, and how often that had been written to. joined: by the names of the matrices that are
    multiplied together, of which this is the first. layer: of the layer that it is the first
    matrix of, what core.ops.decoded_torch computes with; None: not known yet."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    source: Tensor
    version: int
    joined: dict[tuple[str, ...], Joined]
    layer: Any


def packed(params: Params, former: Params, most_bytes: int) -> Params:
    """See Ops.prepared: matrices as `Packed` where the processor gains by it."""
    matrices = {name: x for name, x in params.items() if _gains(x)}
    if sum(x.nbytes for x in matrices.values()) > most_bytes:
        return params
    if former.keys() == params.keys() and all(_is_of(former[n], x) for n, x in params.items()):
        return former
    return {name: _packed(x) if name in matrices else x for name, x in params.items()}


def _packed(x: Tensor) -> Packed:
    made: Packed = torch.Tensor._make_subclass(Packed, x)
    made.source, made.version, made.joined, made.layer = x, _version(x), {}, None
    return made


def _is_of(one: object, x: Array) -> bool:
    return one is x or (type(one) is Packed and one.source is x and one.version == _version(x))


def _version(x: Tensor) -> int:
    """How often the tensor was written to; those of inference mode do not count it."""
    return 0 if x.is_inference() else x._version


def _gains(x: Array) -> bool:
    if not (HAS_ONEDNN and isinstance(x, Tensor) and x.device.type == "cpu" and x.dim() == 2):
        return False
    return x.dtype in (torch.float32, torch.bfloat16) and x.dtype not in FP32_COMPUTED


def takes(x: Tensor, matrices: Sequence[Matrix], plan: "DispatchPlan | None") -> bool:
    """Whether `products` multiplies x by these matrices."""
    if type(matrices[0].weight) is not Packed or plan is not None:
        return False
    return all(type(m.weight) is Packed and m.weight.dtype == x.dtype for m in matrices)


def products(x: Tensor, matrices: Sequence[Matrix]) -> list[Tensor]:
    """x[..., in] times each of the matrices, the first of which is `Packed`."""
    whole = joined(matrices)
    if x.numel() == x.shape[-1] and reads_in_order(x, whole.nbytes):
        y = whole.of_one_row(x)
    else:
        y = whole.times(x)
    return [y] if len(matrices) == 1 else list(torch.split_with_sizes(y, whole.sizes, -1))


def joined(matrices: Sequence[Matrix]) -> Joined:
    """The matrices, the first of which is `Packed`, for products with one input."""
    first, key = matrices[0].weight, tuple([matrix.name for matrix in matrices])
    if (made := first.joined.get(key)) is None:
        first.joined[key] = made = Joined(matrices)
    return made
