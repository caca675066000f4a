"""Tensors that say that they are on `cuda` and compute on the CPU, to find mixed devices without a
GPU.

Within `pretended_cuda()`, tensors made for the device cuda, or from such tensors, are on it. An
operation that reads them and a tensor of the CPU raises MixedDevices, as torch does on a GPU, where
it allows numbers (tensors without dimensions), copies, and indices on the CPU. Their `.numpy()`
raises too. Instead of kernels their references are computed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from sabia.core.ops import device_torch, experts_torch

DEVICE = torch.device("cuda", 0)
CAPABILITY = (8, 0)  # without units for 8 bits, whose products a CPU cannot compute
ATEN = torch.ops.aten
COPIES = (ATEN.copy_.default, ATEN._to_copy.default, ATEN._copy_from.default)
BY_INDEX = (ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default,
            ATEN._index_put_impl_.default)  # fmt: skip


class MixedDevices(RuntimeError):
    """An operation read tensors of both devices."""


class OnDevice(torch.Tensor):
    """A tensor on the pretended device; `held` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "OnDevice":
        options = {"dtype": held.dtype, "device": "meta", "requires_grad": held.requires_grad}
        options |= {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **options)
        made.held = held.detach()
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    is_cpu = property(lambda self: False)

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:
        """A tensor of `data` on this device."""
        return torch.tensor(data, **{"dtype": self.dtype, "device": DEVICE} | options)

    def tolist(self) -> Any:
        """Values in host memory, which torch refuses for subclasses."""
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(function, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(function, args, kwargs or {})


def compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation of torch on tensors of either device."""
    on_device: dict[int, OnDevice] = {}
    on_cpu: list[torch.Tensor] = []

    def values(x: Any) -> Any:
        if isinstance(x, OnDevice):
            on_device[id(x.held)] = x
            return x.held
        if isinstance(x, torch.Tensor) and x.dim():
            on_cpu.append(x)
        return x

    plain_args, plain_kwargs = tree_map(values, (args, kwargs))
    if function in BY_INDEX:
        on_cpu = [x for x in on_cpu if x is args[0] or (len(args) > 2 and x is args[2])]
    if on_device and on_cpu and function not in COPIES:
        raise MixedDevices(f"{function} with tensors {[tuple(x.shape) for x in on_cpu]} on the CPU")
    wanted = plain_kwargs.get("device")
    if wanted is not None:
        plain_kwargs["device"] = torch.device("cpu")
    result_on_device = bool(on_device) if wanted is None else torch.device(wanted).type != "cpu"
    if function is ATEN.copy_.default:
        result_on_device = isinstance(args[0], OnDevice)

    def back(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not result_on_device:
            return x
        known = on_device.get(id(x))
        return OnDevice(x) if known is None else known

    return tree_map(back, function(*plain_args, **plain_kwargs))


def _without_gradients(mode: bool = True) -> Any:
    return torch.no_grad() if mode else nullcontext()


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Within it torch has a device cuda, which is the default one of core.ops.device_torch."""
    off = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    changes = {"_lazy_init": lambda: None, "get_device_capability": lambda _=None: CAPABILITY,
               "mem_get_info": lambda _=None: (1 << 30, 4 << 30)}  # fmt: skip
    chosen = dict.fromkeys(device_torch.TorchOps.requested, "reference")
    with ExitStack() as stack:
        stack.callback(torch._C._set_only_lift_cpu_tensors, off)
        stack.enter_context(mock.patch.object(device_torch.TorchOps, "requested", chosen))
        stack.enter_context(mock.patch.object(experts_torch, "REQUESTED", chosen))
        stack.enter_context(mock.patch.object(device_torch, "default_device", lambda: DEVICE))
        stack.enter_context(mock.patch.multiple(torch.cuda, **changes))
        # inference mode makes tensors past the mode below
        stack.enter_context(mock.patch.object(torch, "inference_mode", _without_gradients))
        stack.callback(device_torch._copied_constants.cache_clear)
        stack.enter_context(_Mode())
        yield
