"""Which implementation of an operation serves, and why.

Every operation here has a `reference` (plain array code, the definition) and may have `library`
(a kernel that torch or JAX already carries), `triton` and `pallas` (our own). Left to itself an
operation takes the first that can serve; a name given by the caller is obeyed or refused, never
replaced. Kernels run on CPU only where an interpreter was asked for by the environment:
TRITON_INTERPRET=1 (Triton's own switch, read when triton is imported) and PALLAS_INTERPRET=1
(`simulate` runs the slower simulator of a TPU core, which fills fresh memory with NaN).
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple

Framework = Literal["torch", "jax"]
IMPLEMENTATIONS = ("reference", "library", "triton", "pallas")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class Unavailable(RuntimeError):
    """The implementation that the caller named cannot serve here; the message says why."""


class Choice(NamedTuple):
    """What serves: one of IMPLEMENTATIONS, and the reason in words."""

    implementation: str
    reason: str


class Option(NamedTuple):
    """A candidate: no `obstacle` where it can serve; `automatic` if it may be chosen unnamed."""

    implementation: str
    reason: str
    obstacle: str | None = None
    automatic: bool = True


def numba_available() -> bool:
    """True when the package can be found; it is not imported."""
    return importlib.util.find_spec("numba") is not None


def engine_module(kernel: str, engine: str) -> ModuleType:
    """The module of a text kernel for an engine: `numba` is compiled code, any other name selects
    the reference; loaded when it is first used."""
    name = "numba_impl" if engine == "numba" else "reference"
    return importlib.import_module(f"sabia.kernels.{kernel}.{name}")


def framework(x: Any) -> Framework:
    """Whose array x is; a TypeError for anything but torch and JAX arrays (tracers too)."""
    root = type(x).__module__.split(".", 1)[0]
    if root in ("jax", "jaxlib"):
        return "jax"
    if root == "torch" or any(t.__module__.startswith("torch.") for t in type(x).__mro__):
        return "torch"
    raise TypeError(f"expected a torch tensor or a JAX array, got {type(x).__name__}")


def choose(operation: str, options: Sequence[Option], requested: str | None) -> Choice:
    """The option named by `requested`, else the first automatic one without an obstacle."""
    if requested is None:
        option = next(o for o in options if o.automatic and o.obstacle is None)
        return Choice(option.implementation, option.reason)
    if requested not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"{operation}: implementation {requested!r} (expected one of {names})")
    for option in options:
        if option.implementation == requested:
            if option.obstacle is not None:
                raise Unavailable(f"{operation}: {requested} cannot serve: {option.obstacle}")
            return Choice(requested, "named by the caller")
    raise Unavailable(f"{operation}: {requested} does not exist for these arrays")


def reference_option() -> Option:
    """The last resort of every operation."""
    return Option("reference", "plain array code: no kernel serves here")


def triton_obstacle(x: Any) -> str | None:
    """Why Triton cannot take a torch tensor, or None."""
    if not _HAS_TRITON:
        return "the package triton is missing (pip install 'sabia[gpu]')"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if x.device.type == "cuda" or (interpreted and x.device.type == "cpu"):
        return None
    return f"tensors are on {x.device.type} (expected cuda, or cpu with TRITON_INTERPRET=1)"


def jax_platform() -> str:
    """Where JAX runs by default: cpu, gpu or tpu. Tracers know no device, so this must do."""
    import jax

    return jax.default_backend()


def pallas_obstacle() -> str | None:
    """Why a TPU kernel in Pallas cannot run, or None."""
    if jax_platform() == "tpu" or os.environ.get("PALLAS_INTERPRET"):
        return None
    return f"JAX runs on {jax_platform()} (expected tpu, or cpu with PALLAS_INTERPRET=1)"


def pallas_interpret() -> Any:
    """What `pallas_call` takes as `interpret` under this environment."""
    wanted = os.environ.get("PALLAS_INTERPRET")
    if wanted == "simulate":
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams()
    return bool(wanted)
