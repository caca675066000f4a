"""The table of all kernels: each operation, its functions and its implementations.

A kernel is found through this table and not by the names of modules. The first implementation of a
framework is the reference, plain array code that defines the operation; text kernels without one
are compared with another library in their tests. Array kernels are chosen by
`runtime.dispatch.choose`, text kernels by `runtime.dispatch.engine_module`.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Implementations = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Kernel:
    """operation: the folder in `sabia.kernels`. functions: of its interface, the main one first.

    implementations: framework (torch, jax, numpy) → names, the reference first, if there is one.
    """

    operation: str
    functions: tuple[str, ...]
    implementations: Implementations

    def function(self, name: str = "") -> Callable[..., Any]:
        """A public function of the interface (default: the main one)."""
        return getattr(self.module("interface"), name or self.functions[0])

    def module(self, name: str) -> ModuleType:
        """A module of the kernel: interface, reference, torch_impl, …"""
        return importlib.import_module(f"sabia.kernels.{self.operation}.{name}")

    def reference(self, framework: str) -> str | None:
        """The name of the implementation that defines the operation."""
        names = self.implementations[framework]
        return "reference" if "reference" in names else None


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
        Kernel("minhash", ("sketch", "signatures", "jaccard", "gather"), _TEXT),
        Kernel("quality", ("measure",), _TEXT),
        Kernel("substring", ("find_repeats", "file_windows"), _TEXT),
        Kernel("language", ("score",), _TEXT),
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
        Kernel("fasttext", ("score",), _TEXT),
        Kernel("html", ("scan",), _COMPILED),
        Kernel("bpe", ("encode",), _COMPILED),
    )
}
