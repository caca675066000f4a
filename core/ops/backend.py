"""The operations of one device of a backend, by name."""

from importlib import import_module

from sabia.core.errors import MissingBackend, UsageError
from sabia.core.ops.base import Ops

BACKENDS = ("torch", "jax")


def load_ops(name: str) -> Ops:
    """The operations of `torch` or `jax` on one device, without rules; see `operations_class`."""
    return operations_class(name)()


def operations_class(name: str) -> type[Ops]:
    """The class of the operations of `torch` or `jax` on one device.

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
    if name == "torch":
        from sabia.core.ops.device_torch import TorchOps

        return TorchOps
    from sabia.core.ops.device_jax import JaxOps

    return JaxOps
