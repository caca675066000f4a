"""The table of kernels names every kernel, its functions and exactly its implementations."""

from pathlib import Path

import pytest

import sabia.kernels
from sabia.kernels.runtime.dispatch import KERNELS, Kernel, Unavailable, choose, reference_option
from sabia.kernels.runtime.first_runs import SWITCHING

FOLDER = Path(sabia.kernels.__path__[0])
SHARED = {"runtime", "text", "tuned"}  # folders that are not kernels


def test_every_kernel_is_in_the_table() -> None:
    folders = {path.parent.name for path in FOLDER.glob("*/interface.py")}
    assert folders - SHARED == set(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_functions_and_implementations_exist(kernel: Kernel) -> None:
    assert all(callable(kernel.function(name)) for name in kernel.functions)
    for framework, names in kernel.implementations.items():
        if framework == "numpy":
            modules = ["numba_impl" if name == "numba" else name for name in names]
            assert all(kernel.module(name) for name in modules)
        else:
            assert set(kernel.module(f"{framework}_impl").IMPLEMENTATIONS) == set(names)


def test_kernels_that_switch_are_those_with_rows() -> None:
    assert {kernel.operation for kernel in KERNELS.values() if kernel.switches} == {*SWITCHING}


def test_an_implementation_that_is_not_offered_is_refused() -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        choose("norm", [reference_option()], "triton")
