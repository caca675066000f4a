"""numba.njit that writes its cache of compiled code to the cache folder.

By default numba writes it next to the source files, in the folder of installed packages.
"""

import os
from typing import Any

import numba

from sabia.kernels.runtime.cache_folder import writable_cache_folder


def njit(**settings: Any) -> Any:
    """`numba.njit(**settings)` with its cache, if enabled, in NUMBA_CACHE_DIR or in our cache
    folder."""
    chosen = os.environ.get("NUMBA_CACHE_DIR") or str(writable_cache_folder("numba"))
    numba.config.CACHE_DIR = chosen  # numba reads the environment only when it is imported
    return numba.njit(**settings)
