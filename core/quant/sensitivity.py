"""How much the rounding of a matrix changes what a model predicts, from gradients and inputs.

With log-probabilities of labels that the model itself draws, the mean square of their gradient is
the diagonal F of the Fisher matrix, and to second order the divergence KL(original ‖ rounded) of a
token is ½ Σ F E² for errors E = W' - W that are independent (the squared gradients of LeCun et al.
1989 and of HAWQ-type searches such as arXiv 2306.07629). GPTQ makes errors that are not: they are
larger, and cancel on the inputs. With inputs and gradients of the outputs taken as independent of
each other, as in K-FAC (arXiv 1503.05671), the divergence of a row o of the matrix is
½ Σ_i F_oi · (E_o H E_oᵀ) / Σ_i H_ii, H being the second moments of the inputs (`expected`).
Gradients need one backward pass for all formats; measuring the divergence of one rounded matrix at
a time needs a pass for each matrix and format.

The pass is backward layer by layer: the states between layers wait in files, so that one layer, its
gradients and its F are in memory.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sabia.core import stop
from sabia.core.model import forward
from sabia.core.ops.base import Ops
from sabia.core.parallel.build_ops import build_ops
from sabia.core.quant.divergence import embeddings
from sabia.core.quant.hessians import Batch, CalibrationStage, Hessians, add_inputs, run_block
from sabia.core.quant.quantize import finite
from sabia.core.spec import ModelSpec

Read = Callable[[int | None], Mapping[str, np.ndarray]]
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class LayerFisher:
    """A layer (None: what is outside of the layers): its parameters in float32, and of those `of`
    which F is computed the mean F of a token, by name.

    inputs: sums the Hessians of its matrices over some of the batches.
    """

    layer: int | None
    values: Arrays
    fisher: Arrays
    inputs: Callable[[Hessians, slice], Hessians]


def fisher(
    spec: ModelSpec, read: Read, of: frozenset[str], batches: Sequence[Batch], seed: int, ops: Ops
) -> Iterator[LayerFisher]:
    """F of the parameters `of`, from the last layer to the first, over the tokens of `batches`.

    read: parameters as for `quantize.Rounding`. seed: of the drawn labels. Every batch is one draw
    of the squared gradient, so that many small ones tell more than a large one.
    """
    tokens = sum(int(batch.segments.sum()) for batch in batches)
    layers = len(spec.layers)
    with tempfile.TemporaryDirectory() as folder:
        states = _States(Path(folder))
        _forward(spec, read, batches, ops, states)
        generator = torch.Generator().manual_seed(seed)
        for layer in (None, *reversed(range(layers))):
            values = finite(read(layer))
            params = ops.to_device(values, "float32")
            names = [name for name in params if name in of]
            for name in names:
                params[name].requires_grad_()
            sums = {name: torch.zeros_like(params[name]) for name in names}
            index = layers if layer is None else layer
            for number, batch in enumerate(batches):
                stop.check()
                x = states.read(index, number, ops).requires_grad_()
                graph = build_ops("torch", stage=CalibrationStage(index, x))
                out = run_block(spec, params, graph, batch)
                if layer is None:
                    scalar = _drawn_loss(spec, params, out, batch, graph, generator)
                    gradients = _gradients(scalar, None, x, params, names)
                else:
                    gradients = _gradients(out, states.read(-1, number, ops), x, params, names)
                states.write(-1, number, gradients[0])
                for name, gradient in zip(names, gradients[1:], strict=True):
                    sums[name] += gradient.square()
            means = {name: (total / tokens).cpu().numpy() for name, total in sums.items()}
            detached = {name: value.detach() for name, value in params.items()}
            inputs = partial(_inputs, spec, detached, index, batches, states, ops)
            yield LayerFisher(layer, values, means, inputs)


def expected(off: np.ndarray, fisher: np.ndarray, hessian: torch.Tensor | None) -> float:
    """The divergence in nats that errors off[O, I] of a matrix cause, for F[O, I] and H[I, I]; by F
    alone where no inputs were seen."""
    if hessian is None:
        return 0.5 * float(np.sum(fisher * off * off, dtype=np.float64))
    e, rows = torch.from_numpy(off).to(hessian), torch.from_numpy(fisher).to(hessian).sum(1)
    of_outputs = (e @ hessian).mul_(e).sum(1, dtype=torch.float64)  # E_o H E_oᵀ, [O]
    return 0.5 * max(0.0, float(rows.double() @ of_outputs / hessian.trace()))


def _inputs(
    spec: ModelSpec,
    params: Mapping[str, torch.Tensor],
    index: int,
    batches: Sequence[Batch],
    states: "_States",
    ops: Ops,
    hessians: Hessians,
    of: slice,
) -> Hessians:
    with torch.inference_mode():
        for number, batch in [*enumerate(batches)][of]:
            stop.check()
            add_inputs(spec, params, index, states.read(index, number, ops), batch, hessians)
    return hessians


class _States:
    """States [B, T, D] by layer and batch, in files; layer -1: gradients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, layer: int, number: int, states: torch.Tensor) -> None:
        """Keep the states of a batch."""
        np.save(self.folder / f"{layer}-{number}.npy", states.detach().cpu().numpy())

    def read(self, layer: int, number: int, ops: Ops) -> torch.Tensor:
        """The states of a batch, on the device."""
        array = np.load(self.folder / f"{layer}-{number}.npy")
        states: torch.Tensor = ops.to_device({"x": array}, "float32")["x"]
        return states


def _forward(
    spec: ModelSpec, read: Read, batches: Sequence[Batch], ops: Ops, states: _States
) -> None:
    with torch.inference_mode():
        outside = ops.to_device(finite(read(None)), "float32")
        for number, x in enumerate(embeddings(spec, outside, batches, ops)):
            states.write(0, number, x)
        for layer in range(len(spec.layers)):
            params = ops.to_device(finite(read(layer)), "float32")
            for number, batch in enumerate(batches):
                stop.check()
                stage = CalibrationStage(layer, states.read(layer, number, ops))
                out = run_block(spec, params, build_ops("torch", stage=stage), batch)
                states.write(layer + 1, number, out)


def _gradients(
    out: torch.Tensor,
    of_out: torch.Tensor | None,
    x: torch.Tensor,
    params: Mapping[str, torch.Tensor],
    names: Sequence[str],
) -> list[torch.Tensor]:
    """The gradients of x and of the named parameters; zeros where one has no effect (an expert
    that no token reaches)."""
    inputs = [x, *(params[name] for name in names)]
    gradients = torch.autograd.grad(out, inputs, of_out, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True)]


def _drawn_loss(
    spec: ModelSpec,
    params: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    batch: Batch,
    ops: Ops,
    generator: torch.Generator,
) -> torch.Tensor:
    """Σ -log p of labels that are drawn from p, over the tokens."""
    logs = forward.logits(spec, params, hidden, ops).log_softmax(-1)[batch.mask.to(hidden.device)]
    labels = torch.multinomial(logs.detach().exp().cpu(), 1, generator=generator)
    return -logs.gather(1, labels.to(logs.device)).sum()
