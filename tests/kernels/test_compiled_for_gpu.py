"""The Triton kernels compile to machine code for Hopper and Blackwell and fit their shared memory.

The interpreter accepts much that the compiler refuses; compiling needs no GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "compile_for_gpu.py"
SHARED_BYTES = 227 << 10  # of a block, compute capability 9.0 and 10.0


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_every_kernel_compiles_and_fits(capability: int) -> None:
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-W", "ignore", str(SCRIPT), str(capability)]
    done = subprocess.run(words, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [(name, int(size)) for name, size in map(str.split, done.stdout.splitlines())]
    assert len(sizes) == 22
    assert all(size <= SHARED_BYTES for _, size in sizes), sizes
