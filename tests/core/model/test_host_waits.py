"""Steps of training and decoding make the host wait for nothing: no copies to the device, no reads.

On a GPU the host stops at each such copy until all earlier kernels have run, so that the device
idles afterwards. Tensors on the device `meta` show the copies without a GPU: they have no values,
so reading one is an error.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sabia.core.model import forward
from sabia.core.ops import device_torch
from sabia.core.ops.kv_cache import KVCache
from sabia.core.ops.precision import precision_named
from sabia.core.parallel.build_ops import build_ops, load_ops
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.optimizer.config import OptimizerConfig, rules
from sabia.core.train.optimizer.updates_torch import apply_torch, init_torch

from .conftest import CONFIGS

META = torch.device("meta")
FAMILIES = {"llama": {}, "mixtral": {"experts": 4, "chosen": 2}}
FROM_LISTS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)


class _Functions(TorchFunctionMode):
    """Names of functions that make a tensor on `meta` of numbers or arrays of the host."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        data = args[1] if func is torch.Tensor.new_tensor else args[0] if args else None
        if func in FROM_LISTS and out.is_meta and not isinstance(data, torch.Tensor):
            self.names.append(func.__name__)
        return out


class Copies(TorchDispatchMode):
    """Names of operations that bring tensors from the host to the device `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.functions = _Functions(self.names)

    def __enter__(self) -> "Copies":
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.functions.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        # single numbers are arguments of a kernel, unless they are what is copied
        from_host = any(not x.is_meta and (x.dim() or "copy" in str(func)) for x in given)
        if from_host and any(x.is_meta for x in made):
            self.names.append(str(func))
        return out


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default device is `meta`."""
    monkeypatch.setattr(device_torch, "default_device", lambda: META)
    yield


def small(family: str, layers: int) -> Any:
    sizes = {"hidden": 64, "layers": layers, "vocab": 128, "heads": 4, "kv_heads": 2}
    return from_config(new_config(family, **sizes, **FAMILIES[family]))


def packed_batch() -> dict[str, torch.Tensor]:
    shape, names = (2, 32), ("input_ids", "targets", "positions", "segments")
    whole = {name: torch.zeros(shape, dtype=torch.int64, device=META) for name in names}
    return whole | {"loss_mask": torch.ones(shape, device=META)}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_forward_and_backward_copy_nothing(on_meta: None, family: str, precision: str) -> None:
    """The second pass, after constants have been copied once."""
    spec = small(family, 4 if precision == "nvfp4" else 1)
    ops = build_ops("torch", spec, precision=precision_named(precision))
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    params = {
        t.name: torch.zeros(t.shape, device=META, requires_grad=True,
                            dtype=dtype if t.dtype_class == "weight" else torch.float32)
        for t in spec.tensors()
    }  # fmt: skip

    def run() -> list[str]:
        with Copies() as copies:
            ops.at(3, 1)
            loss, _, _ = next_token_loss(spec, params, packed_batch(), ops)
            loss.backward()
        return copies.names

    run()
    assert run() == []


def test_an_update_copies_nothing() -> None:
    """AdamW with gradients that are scaled."""
    spec = small("llama", 1)
    params = {t.name: torch.zeros(t.shape, device=META) for t in spec.tensors()}
    table = rules(spec, OptimizerConfig())
    state = init_torch(params, table)
    gradients = {name: torch.zeros_like(p) for name, p in params.items()}
    with Copies() as copies:
        apply_torch(params, gradients, state, table, 3, 1e-3, scale=0.5)
    assert copies.names == []


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"modernbert"}))
def test_a_step_of_decoding_copies_nothing(on_meta: None, name: str) -> None:
    """So that a CUDA graph can be made of it."""
    spec, ops = from_config(CONFIGS[name]), load_ops("torch")
    params = {t.name: torch.zeros(t.shape, device=META) for t in spec.tensors()}
    cache = KVCache.create(spec, 4, 20, ops, "float32", params["embed"], slack=0)
    ids = torch.zeros((3, 1), dtype=torch.int64, device=META)

    def run() -> list[str]:
        with Copies() as copies, torch.inference_mode():
            view = cache.first(3).upto(16)
            hidden = forward.hidden(spec, params, ids, ops, positions=ids, cache=view)
            cache.take_states(view, 3)
            forward.logits(spec, params, hidden, ops)
        return copies.names

    run()
    assert run() == []


def test_copies_are_seen() -> None:
    """What the tests above look for."""
    host = torch.ones(3)
    with Copies() as copies:
        host.to(META)
        torch.ones(3, device=META) * 2.0
    assert len(copies.names) == 1
    with Copies() as copies:
        torch.tensor([1.0, 2.0], device=META)
    assert copies.names == ["tensor"]
    with pytest.raises(RuntimeError):
        torch.ones((), device=META).item()
