"""Import a backend's operations by name."""

from importlib import import_module
from typing import cast

from sabia.core.errors import MissingBackend, UsageError
from sabia.core.model.ops import Ops

BACKENDS = ("torch", "jax")


def load_ops(name: str) -> Ops:
    """The operations of `torch` or `jax`.

    Raises UsageError for another name, MissingBackend where the package is not installed.
    """
    if name not in BACKENDS:
        raise UsageError(f"--backend: {name!r} (expected one of {', '.join(BACKENDS)})")
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingBackend(
            f"backend {name}: the package is not installed (run: pip install {name})"
        ) from None
    return cast(Ops, import_module(f"sabia.core.model.ops_{name}"))
