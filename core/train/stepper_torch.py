"""The training step in torch: autograd over the shared forward pass, fused AdamW.

Data parallel: each process adds up the gradients of its own rows; one all-reduce of one flat
buffer carries gradients, loss, weight, extras and tallies, so N processes make the update of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim.adamw import adamw

from sabia.core.model.backend import load_ops
from sabia.core.parallel.launch import World
from sabia.core.spec.model import ModelSpec
from sabia.core.train.losses import Loss
from sabia.core.train.optimizer import COUNT, OptimizerConfig, check_state, decays, state_names
from sabia.core.train.stepper import Batch, LazyState, weight_names

Tensor = torch.Tensor


class TorchStepper:
    """See `core.train.stepper.Stepper`."""

    fixed_shapes = False

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, np.ndarray],
        loss: Loss,
        config: OptimizerConfig,
        precision: str,
        micro_batch: int,
        compiled: bool,
        world: World,
    ) -> None:
        self.spec, self.config, self.world = spec, config, world
        self.ops, self.micro_batch = load_ops("torch"), micro_batch
        # a clone lies where torch aligns it: products of unaligned matrices round differently
        self.params = {k: p.clone() for k, p in self.ops.to_device(params, "float32").items()}
        self.device = next(iter(self.params.values())).device
        for tensor in self.params.values():
            tensor.requires_grad_()
        self._loss = self._bind(loss, precision)
        if compiled:
            self._loss = torch.compile(self._loss)
        zeros = partial(torch.zeros_like, requires_grad=False)
        self.moments = {part: {k: zeros(p) for k, p in self.params.items()} for part in "mv"}
        self.counts = {k: torch.zeros((), device=self.device) for k in self.params}
        self.fixed_shapes = compiled

    def _bind(self, loss: Loss, precision: str) -> Any:
        narrow = weight_names(self.spec) if precision == "bf16" else frozenset()

        def bound(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
            if narrow:
                params = {k: p.bfloat16() if k in narrow else p for k, p in params.items()}
            return loss(self.spec, params, batch, self.ops)

        return bound

    @torch.no_grad()
    def _update(self, gradients: dict[str, Tensor], lr: float) -> None:
        """AdamW through its functional form: the class takes 2 s to import the compiler."""
        marked, config = decays(self.spec), self.config
        for wanted in (True, False):
            names = [name for name in self.params if marked[name] is wanted]
            if not names:
                continue
            adamw(
                [self.params[name] for name in names],
                [gradients[name] for name in names],
                [self.moments["m"][name] for name in names],
                [self.moments["v"][name] for name in names],
                [],
                [self.counts[name] for name in names],
                fused=True,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=lr,
                weight_decay=config.weight_decay if wanted else 0.0,
                eps=config.eps,
                maximize=False,
            )

    def step(self, batch: Batch, lr: float, tallies: np.ndarray | None = None) -> dict[str, Any]:
        """See Stepper.step."""
        sums: dict[str, Tensor] = {}
        for micro in self._micro_batches(batch):
            loss, weight, extras = self._loss(self.params, micro)
            loss.backward()
            _add(sums, {"loss": loss, "weight": weight, **extras})
        if tallies is not None:
            sums["tallies"] = torch.as_tensor(tallies, dtype=torch.float32, device=self.device)
        by_name = {name: _gradient(p) for name, p in self.params.items()}
        gradients = list(by_name.values())
        sums = self._reduce(sums, gradients)
        norms = torch.stack(torch._foreach_norm(gradients))
        sums["grad_norm"] = torch.linalg.vector_norm(norms)
        found = _fetch(sums)
        weight_sum, norm_sum = found["weight"], found["grad_norm"]
        updated = weight_sum > 0 and bool(np.isfinite(norm_sum + found["loss"]))
        if updated:
            norm = norm_sum / weight_sum
            clip = self.config.clip_norm
            scale = clip / norm if clip and norm > clip else 1.0
            torch._foreach_mul_(gradients, scale / weight_sum)
            self._update(by_name, lr)
        for parameter in self.params.values():
            parameter.grad = None
        return found | {
            "loss": found["loss"] / max(weight_sum, 1e-30),
            "grad_norm": norm_sum / max(weight_sum, 1e-30),
            "updated": updated,
        }

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Any]:
        """See Stepper.evaluate."""
        sums: dict[str, Tensor] = {}
        for micro in self._micro_batches(batch):
            loss, weight, extras = self._loss(self.params, micro)
            _add(sums, {"loss": loss, "weight": weight, **extras})
        found = _fetch(self._reduce(sums, []))
        return found | {"loss": found["loss"] / max(found["weight"], 1e-30)}

    def _micro_batches(self, batch: Batch) -> list[dict[str, Tensor]]:
        arrays = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in batch.items()}
        rows = len(next(iter(arrays.values())))
        size = self.micro_batch or rows
        return [
            {
                k: v[start : start + size].to(self.device, non_blocking=True)
                for k, v in arrays.items()
            }
            for start in range(0, rows, size)
        ]

    def _reduce(self, sums: dict[str, Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
        """The sums and (in place) the gradients of all processes."""
        if self.world.size == 1:
            return sums
        flat = torch.cat([t.reshape(-1).float() for t in (*gradients, *sums.values())])
        torch.distributed.all_reduce(flat)
        parts = flat.split([t.numel() for t in (*gradients, *sums.values())])
        for gradient, part in zip(gradients, parts, strict=False):
            gradient.copy_(part.view_as(gradient))
        rest = parts[len(gradients) :]
        return {k: part.view(sums[k].shape) for k, part in zip(sums, rest, strict=True)}

    def state(self) -> Mapping[str, np.ndarray]:
        """See Stepper.state; on a CPU the arrays are views: copy what must outlive a step."""
        return LazyState(state_names(self.params), self._fetch_state)

    def _fetch_state(self, name: str) -> np.ndarray:
        if name == COUNT:
            return np.array(int(next(iter(self.counts.values()))), np.int64)
        part, _, key = name.partition("/")
        found = self.params[key] if part == "param" else self.moments[part][key]
        return found.detach().cpu().numpy()

    @torch.no_grad()
    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """See Stepper.load."""
        check_state(state, {k: tuple(p.shape) for k, p in self.params.items()})
        for part, held in {"param": self.params, **self.moments}.items():
            for key, tensor in held.items():
                tensor.copy_(torch.from_numpy(np.array(state[f"{part}/{key}"])))
        for count in self.counts.values():
            count.fill_(float(state[COUNT]))


def _add(sums: dict[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for key, value in new.items():
        value = torch.as_tensor(value).detach().float()
        sums[key] = sums[key] + value if key in sums else value


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _fetch(sums: Mapping[str, Tensor]) -> dict[str, Any]:
    """All sums as NumPy arrays or floats, by one transfer from the device."""
    device = next(iter(sums.values())).device
    flat = torch.cat([value.to(device).reshape(-1) for value in sums.values()]).cpu().numpy()
    found: dict[str, Any] = {}
    start = 0
    for key, value in sums.items():
        part = flat[start : start + value.numel()]
        start += value.numel()
        found[key] = part.reshape(value.shape) if value.dim() else float(part[0])
    return found
