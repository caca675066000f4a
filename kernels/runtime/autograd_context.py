"""The context of a `torch.autograd.Function`, with types."""

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
