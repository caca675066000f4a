"""The optimizers in torch: `core.train.optimizer.config` over eager tensors, in place.

AdamW uses torch's fused kernel for all tensors of one rule at once (its functional form, because
importing the class takes 2 s for the compiler), Lion `torch._foreach`; the others go tensor by
tensor.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.adamw import adamw

from sabia.core.model.storage.lazy_array import batches_by_size
from sabia.core.ops.device_torch import TorchOps
from sabia.core.train.optimizer.config import Rule, init_state, update

Tensor = torch.Tensor
Group = list[tuple[Tensor, Tensor, dict[str, Tensor]]]  # (weight, gradient, state) of tensors
NamedTensorFunction = Callable[[str, Tensor], Tensor]
GROUP_ELEMENTS = 1 << 26  # Lion's temporary copy is at most this, or one tensor

OPS = TorchOps()


def init_torch(
    params: Mapping[str, Tensor],
    rules: Mapping[str, Rule],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Name → part → zeros: the state before the first update.

    `shapes`: of the whole tensors, if `params` are shards (unsharded parts have their size).
    """

    def zeros(name: str, size: tuple[int, ...], whole: bool) -> Tensor:
        p = params[name]
        return torch.zeros(size if whole else p.shape, device=p.device)

    whole_shapes = {name: p.shape for name, p in params.items()} if shapes is None else shapes
    return init_state({name: whole_shapes[name] for name in params}, rules, zeros)


@torch.no_grad()
def apply_torch(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: Mapping[str, dict[str, Tensor]],
    rules: Mapping[str, Rule],
    count: int,
    lr: float,
    gather: NamedTensorFunction | None = None,
    own: NamedTensorFunction | None = None,
    scale: float = 1.0,
) -> None:
    """Update parameters and state in place; `count` is the number of updates made before.

    Gradients are multiplied by `scale`, in place (AdamW's kernel scales them as it reads them).
    `gather(name, x)` returns the whole tensor of a shard, `own(name, x)` this device's shard of a
    whole tensor; without them the tensors are whole.
    """
    groups: dict[Rule, list[str]] = {}
    for name in params:
        if rules[name].trained:
            groups.setdefault(rules[name], []).append(name)
    for rule, names in groups.items():
        if rule.kind == "adamw" and all(params[name].is_contiguous() for name in names):
            _adamw(rule, [(params[n], grads[n], state[n]) for n in names], count, lr, scale)
            continue
        if scale != 1.0:
            torch._foreach_mul_([grads[name] for name in names], scale)
        if rule.kind == "lion":
            for batch in batches_by_size(names, lambda name: params[name].numel(), GROUP_ELEMENTS):
                _lion(rule, [(params[n], grads[n], state[n]) for n in batch], lr)
            continue
        for name in names:
            changes: dict[str, Any] = {}
            if gather is not None and own is not None:
                changes = {"gather": partial(gather, name), "own": partial(own, name)}
            tensors = params[name], grads[name], state[name]
            new, parts = update(rule, OPS, *tensors, count, lr, **changes)
            params[name].copy_(new)
            for part, value in parts.items():
                state[name][part].copy_(value)


def _adamw(rule: Rule, group: Group, count: int, lr: float, scale: float) -> None:
    device = group[0][0].device
    steps = torch.full((len(group),), float(count), device=device).unbind()
    adamw(
        [weight for weight, _, _ in group],
        [gradient.contiguous() for _, gradient, _ in group],  # the kernel ignores strides
        [parts["m"] for _, _, parts in group],
        [parts["v"] for _, _, parts in group],
        [],
        list(steps),
        fused=True,
        grad_scale=None if scale == 1.0 else torch.full((), 1 / scale, device=device),
        amsgrad=False,
        beta1=rule.config.settings["beta1"],
        beta2=rule.config.settings["beta2"],
        lr=lr * rule.lr_scale,
        weight_decay=rule.decay / rule.lr_scale,  # torch multiplies it by lr · lr_scale
        eps=rule.config.settings["eps"],
        maximize=False,
    )


def _lion(rule: Rule, group: Group, lr: float) -> None:
    weights, gradients = [item[0] for item in group], [item[1] for item in group]
    moments = [parts["m"] for _, _, parts in group]
    # u = sign(b1 m + (1 - b1) g), p = p (1 - lr decay) - lr u, then m = b2 m + (1 - b2) g
    directions = torch._foreach_lerp(moments, gradients, 1 - rule.config.settings["beta1"])
    torch._foreach_sign_(directions)
    torch._foreach_mul_(weights, 1 - lr * rule.decay)
    torch._foreach_add_(weights, directions, alpha=-lr * rule.lr_scale)
    torch._foreach_lerp_(moments, gradients, 1 - rule.config.settings["beta2"])
