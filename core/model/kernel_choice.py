"""Which implementation computes attention, expert products, norms and the vocabulary loss.

By itself a model takes kernels (sabia.kernels, which says what it chooses) on accelerators, and on
CPU the operations of ops_torch and ops_jax, written for it. The environment variable
`SABIA_KERNELS`, read when a backend's operations are imported, says otherwise:

  auto    that (default)
  NAME    reference, library, triton (torch) or pallas (JAX), of every operation that has it in the
          backend; an operation that has not stays at auto
  OPERATION=NAME,…    of these operations: attention, grouped_matmul, rms_norm, vocabulary_loss

What is named is obeyed or refused (UsageError: there is no such thing; MissingBackend: it cannot
serve here), never replaced. Norms in JAX are the compiler's. On CPU kernels run interpreted where
TRITON_INTERPRET=1 or PALLAS_INTERPRET=1 asks for it.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import MissingBackend, UsageError
from sabia.kernels.runtime.dispatch import IMPLEMENTATIONS, Unavailable

VARIABLE = "SABIA_KERNELS"
_ALL, _OWN = ("reference", "library"), ("reference",)
OFFERED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "torch": {
        "attention": (*_ALL, "triton"),
        "grouped_matmul": (*_ALL, "triton"),
        "rms_norm": (*_ALL, "triton"),
        "vocabulary_loss": (*_OWN, "triton"),
    },
    "jax": {
        "attention": (*_ALL, "pallas"),
        "grouped_matmul": (*_ALL, "pallas"),
        "vocabulary_loss": (*_OWN, "pallas"),
    },
}
_AUTOMATIC: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "torch": dict.fromkeys(OFFERED["torch"], ("cuda",)),
    "jax": dict.fromkeys(OFFERED["jax"], ("tpu",)) | {"attention": ("tpu", "gpu")},
}


@dataclass(frozen=True)
class Kernels:
    """asked: the named implementation of each operation, or None; automatic: platforms where
    kernels serve unasked."""

    asked: Mapping[str, str | None]
    automatic: Mapping[str, tuple[str, ...]]

    def serve(self, operation: str, platform: str) -> bool:
        """Whether sabia.kernels computes the operation; platform: of torch or JAX (cuda, gpu)."""
        return self.asked[operation] is not None or platform in self.automatic[operation]


def kernels_of(backend: str) -> Kernels:
    """What SABIA_KERNELS says for a backend; UsageError for what there is not."""
    asked = _parsed(os.environ.get(VARIABLE) or "auto", backend)
    return Kernels(asked, _AUTOMATIC[backend])


@functools.cache
def _parsed(text: str, backend: str) -> dict[str, str | None]:
    offered, found = OFFERED[backend], dict.fromkeys(OFFERED[backend])
    if "=" in text:
        for operation, _, name in (word.strip().partition("=") for word in text.split(",")):
            if operation not in offered or name not in (*offered[operation], "auto"):
                raise UsageError(f"{VARIABLE}: {operation}={name} with {backend} (expected "
                                 + "; ".join(_choices(offered)) + ")")  # fmt: skip
            found[operation] = None if name == "auto" else name
        return found
    if text == "auto":
        return found
    if text not in {name for names in offered.values() for name in names}:
        known = ", ".join(("auto", *IMPLEMENTATIONS))
        where = f" with {backend}" if text in IMPLEMENTATIONS else ""
        raise UsageError(f"{VARIABLE}: {text!r}{where} (expected one of {known}; triton is of "
                         "torch, pallas of jax)")  # fmt: skip
    return {operation: text if text in names else None for operation, names in offered.items()}


def _choices(offered: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    return (f"{operation}={'|'.join(('auto', *names))}" for operation, names in offered.items())


def obeyed(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which refuses a named implementation that cannot serve with MissingBackend."""

    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return kernel(*args, **options)
        except Unavailable as error:
            raise refusal(str(error)) from None

    return call


def refusal(why: str) -> MissingBackend:
    """The error for a named implementation that cannot serve."""
    return MissingBackend(f"{VARIABLE}: {why}; {VARIABLE}=auto takes what serves here")
