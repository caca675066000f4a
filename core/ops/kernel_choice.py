"""Which implementation computes attention, expert products, norms and the vocabulary loss.

By default sabia.kernels chooses one for the arrays and the device. The environment variable
`SABIA_KERNELS`, read when a backend's operations are imported, changes this:

  auto    the default
  NAME    reference, eager, library, triton (torch) or pallas (JAX), for every operation that has
          this implementation in the backend; the other operations stay at auto
  OPERATION=NAME,…    for these operations: attention, grouped_matmul, rms_norm, vocabulary_loss

A named implementation is used or the run ends with an error (UsageError: there is no such name;
MissingBackend: it does not work here); it is never replaced. XLA computes the norms in JAX. On CPU,
kernels run interpreted with TRITON_INTERPRET=1 or PALLAS_INTERPRET=1.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sabia.core.errors import MissingBackend, UsageError
from sabia.kernels.runtime.dispatch import (
    IMPLEMENTATIONS,
    KERNELS,
    Implementations,
    Unavailable,
)

VARIABLE = "SABIA_KERNELS"
_OPERATIONS = {
    "torch": ("attention", "grouped_matmul", "rms_norm", "vocabulary_loss"),
    "jax": ("attention", "grouped_matmul", "vocabulary_loss"),
}
OFFERED: Mapping[str, Implementations] = {
    backend: {name: KERNELS[name].implementations[backend] for name in names}
    for backend, names in _OPERATIONS.items()
}


def requested_kernels(backend: str) -> Mapping[str, str | None]:
    """The implementation of each operation that SABIA_KERNELS names, None where it names none.

    Raises UsageError for unknown names.
    """
    return _parsed(os.environ.get(VARIABLE) or "auto", backend)


@functools.cache
def _parsed(text: str, backend: str) -> dict[str, str | None]:
    offered, requested = OFFERED[backend], dict.fromkeys(OFFERED[backend])
    if "=" in text:
        for operation, _, name in (word.strip().partition("=") for word in text.split(",")):
            if operation not in offered or name not in (*offered[operation], "auto"):
                raise UsageError(f"{VARIABLE}: {operation}={name} with {backend} (expected "
                                 + "; ".join(_choices(offered)) + ")")  # fmt: skip
            requested[operation] = None if name == "auto" else name
        return requested
    if text == "auto":
        return requested
    if text not in {name for names in offered.values() for name in names}:
        known = ", ".join(("auto", *IMPLEMENTATIONS))
        with_backend = f" with {backend}" if text in IMPLEMENTATIONS else ""
        raise UsageError(f"{VARIABLE}: {text!r}{with_backend} (expected one of {known}; triton is "
                         "for torch only, pallas for jax only)")  # fmt: skip
    return {operation: text if text in names else None for operation, names in offered.items()}


def _choices(offered: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    return (f"{operation}={'|'.join(('auto', *names))}" for operation, names in offered.items())


def raises_missing_backend(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which raises MissingBackend if a named implementation does not work here."""

    @functools.wraps(kernel)
    def call(*args: object, **options: object) -> Any:
        try:
            return kernel(*args, **options)
        except Unavailable as error:
            raise unavailable(str(error)) from None

    return call


def unavailable(why: str) -> MissingBackend:
    """The error for a named implementation that does not work here."""
    return MissingBackend(f"{VARIABLE}: {why}; use {VARIABLE}=auto")
