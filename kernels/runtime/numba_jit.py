"""numba's decorator for the kernels, which keeps compiled code in the folder of caches.

Left to itself numba keeps it beside the source files, in the folder of installed packages.
"""

import os
from typing import Any

import numba

from sabia.kernels.runtime.cache_folder import compiled_code_folder


def njit(**settings: Any) -> Any:
    """`numba.njit(**settings)` with its cache, if asked for, in NUMBA_CACHE_DIR or ours."""
    chosen = os.environ.get("NUMBA_CACHE_DIR") or str(compiled_code_folder("numba"))
    numba.config.CACHE_DIR = chosen  # numba reads the environment only when it is imported
    return numba.njit(**settings)
