"""Cache folders: $XDG_CACHE_HOME/sabia, or ~/.cache/sabia; never next to the source files.

numba/, triton/, inductor/, cuda/ and jax/ hold compiled code; calls/ holds completed requests to
language models; hashes/ the hashes of large files; rows/ unpacked token rows and indices of them;
objects/ what was fetched from URLs; spool/ what is not uploaded yet.
`sabia(1)` lists them under FILES.
"""

import os
import tempfile
from collections.abc import Callable, MutableMapping
from pathlib import Path

# folder → the environment variable that sets it for its compiler
COMPILERS = {
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "triton": "TRITON_CACHE_DIR",
    "cuda": "CUDA_CACHE_PATH",
    "jax": "JAX_COMPILATION_CACHE_DIR",
}

# text kernel → how many functions are compiled for it where the cache is empty
FUNCTIONS = {
    "quality": 57, "bpe": 58, "html": 37, "minhash": 16, "substring": 7, "fasttext": 18,
    "language": 10, "word_spans": 6, "row_products": 17, "row_functions": 17,
    "decoder_layer": 30, "panel_products": 4,
}  # fmt: skip

# called with the name of each function that is about to be compiled for the cache numba/
compile_listeners: list[Callable[[str], None]] = []
# called once with a sentence when a kernel computes without being compiled
choice_listeners: list[Callable[[str], None]] = []


def has_compiled(kernel: str) -> bool:
    """Whether the cache has a compiled function of the kernel."""
    return any(compiled_folder().glob(f"{kernel}.*.bin"))


def compiled_share(done: int, total: int, seconds: float) -> str:
    """How much of `total` functions is compiled after some seconds, and how long the rest takes."""
    total = max(total, done)
    left = seconds / max(done - 1, 1) * (total - done)  # a function is counted when it begins
    return f"{done} of {total} functions, about {left:.0f} s left"


def cache_folder(name: str) -> Path:
    """The folder of one cache; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sabia" / name


def writable_cache_folder(name: str) -> Path:
    """Create and return a writable folder of a cache: `cache_folder(name)`, or a temporary folder
    if that one is not writable (a read-only home)."""
    folder = cache_folder(name)
    if not _writable(folder):
        folder = _own_temporary_folder() / name
        folder.mkdir(exist_ok=True)
    return folder


def compiled_folder() -> Path:
    """The folder of compiled text kernels: NUMBA_CACHE_DIR, or numba/ of the cache."""
    return Path(os.environ.get("NUMBA_CACHE_DIR") or writable_cache_folder("numba"))


def name_compilers_folders(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the cache folders of COMPILERS in `environment`; variables that are set are kept."""
    for name, variable in COMPILERS.items():
        if variable not in environment:
            environment[variable] = str(writable_cache_folder(name))


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _own_temporary_folder() -> Path:
    """A folder that only this user can write: code is loaded from it, and other users can write to
    /tmp."""
    folder = Path(tempfile.gettempdir()) / f"sabia-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="sabia-"))
