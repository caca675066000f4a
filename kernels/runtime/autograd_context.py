"""For functions of torch: the context of a `torch.autograd.Function` with types, compilations."""

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx


class Context(FunctionCtx):
    """What torch gives to `forward` and `backward`; a function adds attributes of its own."""

    saved_tensors: tuple[Any, ...]  # a tensor or None each
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: torch.Tensor | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


COMPILATIONS = 64  # of a function for arrays of other sizes, in a process; torch's default is 8


def allow_compilations() -> None:
    """Let torch compile a function COMPILATIONS times; then it runs eagerly, or fails."""
    import torch._dynamo

    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILATIONS)
