"""The table of all kernels, and the choice of an implementation with the reason.

A kernel is found through the table and not by the names of modules. The first implementation of a
framework is the reference, plain array code that defines the operation; text kernels without one
are compared with another library in their tests. Array kernels are chosen by `choose`, text kernels
by `engine_module`.

Every operation has a `reference` (plain array code that defines it) and may have `eager` (array
operations of the backend, arranged for caches and memory: the default on CPU), `library` (a kernel
of torch or JAX), `triton` and `pallas` (kernels of this package). By default an operation uses the
first implementation that is available; an implementation named by the caller is used or
refused, never replaced. Kernels run on CPU only if the environment enables an interpreter:
TRITON_INTERPRET=1 (Triton's own switch, read when triton is imported) and PALLAS_INTERPRET=1
(`simulate` runs the slower simulator of a TPU core, which fills fresh memory with NaN).
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple

Implementations = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Kernel:
    """operation: the folder in `sabia.kernels`. functions: of its interface, the main one first.

    implementations: framework (torch, jax, numpy) → names, the reference first, if there is one.
    switches: whether the reference computes until it is compiled (runtime.first_runs).
    """

    operation: str
    functions: tuple[str, ...]
    implementations: Implementations
    switches: bool = False

    def function(self, name: str = "") -> Callable[..., Any]:
        """A public function of the interface (default: the main one)."""
        return getattr(self.module("interface"), name or self.functions[0])

    def module(self, name: str) -> ModuleType:
        """A module of the kernel: interface, reference, torch_impl, …"""
        return importlib.import_module(f"sabia.kernels.{self.operation}.{name}")


_BOTH = {"torch": ("reference", "library", "triton"), "jax": ("reference", "library", "pallas")}
_OWN = {"torch": ("reference", "triton"), "jax": ("reference", "pallas")}
_EAGER = {"torch": ("reference", "eager", "triton"), "jax": ("reference", "eager", "pallas")}
_ALL = ("reference", "eager", "library", "triton")
_TEXT = {"numpy": ("reference", "numba")}
_COMPILED = {"numpy": ("numba",)}

KERNELS: Mapping[str, Kernel] = {
    kernel.operation: kernel
    for kernel in (
        Kernel("attention", ("attention", "attention_mask"), _BOTH),
        Kernel("grouped_matmul", ("grouped_matmul",), {**_BOTH, "torch": _ALL}),
        Kernel("rms_norm", ("rms_norm",), {"torch": _ALL, "jax": ("reference", "pallas")}),
        Kernel("vocabulary_loss", ("linear_cross_entropy",), _EAGER),
        Kernel("quantize", ("quantize",), _OWN),
        Kernel("minhash", ("sketch", "signatures", "jaccard", "gather"), _TEXT, switches=True),
        Kernel("quality", ("measure",), _TEXT, switches=True),
        Kernel("substring", ("find_repeats", "file_windows"), _TEXT),
        Kernel("language", ("score",), _TEXT, switches=True),
        Kernel("word_spans", ("word_spans", "ngram_hashes", "align"), _TEXT),
        Kernel("row_products", ("matrix_vector", "scores", "weighted_sums", "attention"), _TEXT),
        Kernel(
            "row_functions",
            (
                "rms_norm",
                "rms_norm_gradient",
                "silu_product",
                "silu_product_gradient",
                "rotate",
                "log_sums",
                "softmax_gradient",
            ),
            _TEXT,
        ),
        Kernel("decoder_layer", ("decoder_layer",), _TEXT),
        Kernel("panel_products", ("fill", "product"), _TEXT),
        Kernel("fasttext", ("score",), _TEXT),
        Kernel("html", ("scan",), _COMPILED),
        Kernel("bpe", ("encode",), _COMPILED),
    )
}


Framework = Literal["torch", "jax"]
IMPLEMENTATIONS = ("reference", "eager", "library", "triton", "pallas")
AUTO = "auto"  # engine of text kernels
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class Unavailable(RuntimeError):
    """The implementation that the caller named is not available; the message gives the reason."""


class Choice(NamedTuple):
    """The chosen implementation, one of IMPLEMENTATIONS, and the reason."""

    implementation: str
    reason: str


class Option(NamedTuple):
    """A candidate: `obstacle` is None if it is available; `automatic` if it may be the default."""

    implementation: str
    reason: str
    obstacle: str | None = None
    automatic: bool = True


def numba_available() -> bool:
    """True when the package can be found; it is not imported."""
    return importlib.util.find_spec("numba") is not None


def text_engine() -> str:
    """The engine of text kernels where nobody names one: AUTO, or numpy where numba is missing."""
    return AUTO if numba_available() else "numpy"


@functools.cache
def engine_module(kernel: str, engine: str) -> Any:
    """The module of a text kernel for an engine, loaded when it is first used: `numba` is compiled
    code; AUTO too, but a kernel that `switches` computes plainly until it is compiled; any other
    name selects the reference."""
    if engine == AUTO and KERNELS[kernel].switches:
        from sabia.kernels.runtime.first_runs import SwitchingModule

        return SwitchingModule(kernel)
    name = "numba_impl" if engine in ("numba", AUTO) else "reference"
    return importlib.import_module(f"sabia.kernels.{kernel}.{name}")


_FRAMEWORKS: dict[type, Framework] = {}


def framework(x: object) -> Framework:
    """The library of an array (or JAX tracer). Raises TypeError for other types."""
    kind = type(x)
    if (known := _FRAMEWORKS.get(kind)) is not None:
        return known
    root = kind.__module__.split(".", 1)[0]
    if root in ("jax", "jaxlib"):
        return _FRAMEWORKS.setdefault(kind, "jax")
    if root == "torch" or any(t.__module__.startswith("torch.") for t in kind.__mro__):
        return _FRAMEWORKS.setdefault(kind, "torch")
    raise TypeError(f"expected a torch tensor or a JAX array, got {kind.__name__}")


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
    """The option that every operation has if no kernel is available."""
    return Option("reference", "plain array code: no kernel is available")


def triton_obstacle(x: Any) -> str | None:
    """The reason why Triton cannot process a torch tensor, or None."""
    if not _HAS_TRITON:
        return "the package triton is missing (pip install 'sabia[gpu]')"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if x.device.type == "cuda" or (interpreted and x.device.type == "cpu"):
        return None
    return f"tensors are on {x.device.type} (expected cuda, or cpu with TRITON_INTERPRET=1)"


def jax_platform() -> str:
    """The default platform of JAX: cpu, gpu or tpu (tracers have no device of their own)."""
    import jax

    return jax.default_backend()


def pallas_obstacle() -> str | None:
    """The reason why a Pallas kernel for TPU cannot run, or None."""
    if jax_platform() == "tpu" or os.environ.get("PALLAS_INTERPRET"):
        return None
    return f"JAX runs on {jax_platform()} (expected tpu, or cpu with PALLAS_INTERPRET=1)"


def pallas_interpret() -> Any:
    """The argument `interpret` of `pallas_call` in this environment."""
    wanted = os.environ.get("PALLAS_INTERPRET")
    if wanted == "simulate":
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams()
    return bool(wanted)
