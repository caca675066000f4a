"""The optimizers in torch: `core.train.optimizer.updates` over eager tensors, in place.

AdamW runs through torch's fused kernel, all tensors of one rule at once (its functional form: the
class takes 2 s to import the compiler), Lion through `torch._foreach`; the others tensor by tensor.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.adamw import adamw

from sabia.core.model.storage.size_batches import runs
from sabia.core.train.optimizer.config import Rule, init_state
from sabia.core.train.optimizer.updates import update

Tensor = torch.Tensor
NamedChange = Callable[[str, Tensor], Tensor]
GROUP_ELEMENTS = 1 << 26  # Lion's temporary copy is at most this, or one tensor


def _repeat(times: int, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    for _ in range(times):
        x = function(x)
    return x


MATHS = SimpleNamespace(
    sqrt=torch.sqrt,
    sign=torch.sign,
    floor=lambda x, least: torch.clamp(x, min=least),
    mean=lambda x, axes: torch.mean(x, axes, keepdim=True),
    argsort=lambda x: torch.argsort(x, dim=-1, stable=True),
    take=lambda x, indices, axis: torch.take_along_dim(x, indices, axis),
    eigenvectors=lambda x: torch.linalg.eigh(x)[1].flip(-1),
    orthonormal=lambda x: torch.linalg.qr(x)[0],
    expm1=math.expm1,
    cond=lambda condition, yes, no: yes() if condition else no(),
    repeat=_repeat,
)


def init_torch(
    params: Mapping[str, Tensor],
    rules: Mapping[str, Rule],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Name → part → zeros: the state before the first update.

    `shapes`: of the whole tensors, where `params` are shards (whole parts are made whole).
    """

    def zeros(name: str, size: tuple[int, ...], whole: bool) -> Tensor:
        p = params[name]
        return torch.zeros(size if whole else p.shape, device=p.device)

    held = {name: p.shape if shapes is None else shapes[name] for name, p in params.items()}
    return init_state(held, rules, zeros)


@torch.no_grad()
def apply_torch(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: Mapping[str, dict[str, Tensor]],
    rules: Mapping[str, Rule],
    count: int,
    lr: float,
    gather: NamedChange | None = None,
    own: NamedChange | None = None,
    scale: float = 1.0,
) -> None:
    """Update parameters and state in place; `count` is the number of updates made before.

    The gradients are multiplied by `scale`, in place (AdamW's kernel does it as it reads them).

    `gather(name, x)` gives the whole tensor of a shard, `own(name, x)` this device's shard of a
    whole one; without them the tensors are whole.
    """
    for rule, names in _by_rule(params, rules).items():
        if rule.kind == "adamw" and all(params[name].is_contiguous() for name in names):
            _adamw(rule, *_lists(names, params, grads, state), count, lr, scale)
            continue
        if scale != 1.0:
            torch._foreach_mul_([grads[name] for name in names], scale)
        if rule.kind == "lion":
            for some in runs(names, lambda name: params[name].numel(), GROUP_ELEMENTS):
                _lion(rule, *_lists(some, params, grads, state), lr)
        else:
            for name in names:
                _one(rule, name, params[name], grads[name], state[name], count, lr, gather, own)


def _lists(
    names: list[str],
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: Mapping[str, dict[str, Tensor]],
) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    return [params[n] for n in names], [grads[n] for n in names], [state[n] for n in names]


def _by_rule(params: Mapping[str, Tensor], rules: Mapping[str, Rule]) -> dict[Rule, list[str]]:
    groups: dict[Rule, list[str]] = {}
    for name in params:
        if rules[name].trained:
            groups.setdefault(rules[name], []).append(name)
    return groups


def _adamw(
    rule: Rule,
    params: list[Tensor],
    grads: list[Tensor],
    state: list[dict[str, Tensor]],
    count: int,
    lr: float,
    scale: float,
) -> None:
    device = params[0].device
    steps = torch.full((len(params),), float(count), device=device).unbind()
    adamw(
        params,
        [g.contiguous() for g in grads],  # the kernel reads memory in order, whatever the strides
        [parts["m"] for parts in state],
        [parts["v"] for parts in state],
        [],
        list(steps),
        fused=True,
        grad_scale=None if scale == 1.0 else torch.tensor(1 / scale, device=device),
        amsgrad=False,
        beta1=rule.config.beta1,
        beta2=rule.config.beta2,
        lr=lr * rule.lr_scale,
        weight_decay=rule.decay / rule.lr_scale,  # torch multiplies it by the scaled rate
        eps=rule.config.eps,
        maximize=False,
    )


def _lion(
    rule: Rule,
    params: list[Tensor],
    grads: list[Tensor],
    state: list[dict[str, Tensor]],
    lr: float,
) -> None:
    moments = [parts["m"] for parts in state]
    directions = torch._foreach_lerp(moments, grads, 1 - rule.config.beta1)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(params, 1 - lr * rule.decay)
    torch._foreach_add_(params, directions, alpha=-lr * rule.lr_scale)
    torch._foreach_lerp_(moments, grads, 1 - rule.config.beta2)


def _one(
    rule: Rule,
    name: str,
    p: Tensor,
    g: Tensor,
    state: dict[str, Tensor],
    count: int,
    lr: float,
    gather: NamedChange | None,
    own: NamedChange | None,
) -> None:
    changes: dict[str, Any] = {}
    if gather is not None and own is not None:
        changes = {"gather": lambda x: gather(name, x), "own": lambda x: own(name, x)}
    new, parts = update(rule, MATHS, p, g, state, count, lr, **changes)
    p.copy_(new)
    for part, value in parts.items():
        state[part].copy_(value)
