"""Memory of products of many sizes, in a process of its own: oneDNN reads its settings once."""

import os
import subprocess
import sys

import pytest

PRODUCTS = """
import torch
from sabia.kernels.runtime.torch_support import keep_few_products
from sabia.kernels.runtime.torch_fp32 import HAS_ONEDNN, onednn_linear

def resident(first, end):
    for rows in range(first, end):
        onednn_linear(torch.ones(rows, 256), torch.ones(256, 256))
    return int(open("/proc/self/statm").read().split()[1]) * 4 >> 10

keep_few_products()
begun = resident(1, 101) if HAS_ONEDNN else 0
print(resident(101, 201) - begun if HAS_ONEDNN else -1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_products_of_many_sizes_do_not_fill_memory() -> None:
    settings = {k: v for k, v in os.environ.items() if not k.endswith("_CAPACITY")}
    given = {"env": settings | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    made = subprocess.run([sys.executable, "-c", PRODUCTS], check=True, **given)
    if (grown := int(made.stdout)) == -1:
        pytest.skip("no oneDNN")
    assert -100 < grown < 20


KEPT = """
import ctypes, resource, torch
from sabia.kernels.runtime.torch_support import keep_freed_memory

def faults(mib):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(mib << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keeps = keep_freed_memory() and ctypes.CDLL(None).mallopt(-3, 1 << 30)  # not every version
print(faults(48) if keeps and faults(64) else -1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are glibc's")
def test_large_blocks_are_kept() -> None:
    given = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True}
    made = subprocess.run([sys.executable, "-c", KEPT], check=True, **given)
    assert int(made.stdout) < 1000  # of 12,288 pages
