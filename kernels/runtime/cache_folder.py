"""The folder of caches: $XDG_CACHE_HOME/sabia, else ~/.cache/sabia; never beside the source files.

numba/, triton/, inductor/ and cuda/ hold compiled code; calls/ holds finished calls of language
models. `sabia(1)` names them under FILES.
"""

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

# folder → the variable by which its compiler is told
COMPILERS = {
    "inductor": "TORCHINDUCTOR_CACHE_DIR",
    "triton": "TRITON_CACHE_DIR",
    "cuda": "CUDA_CACHE_PATH",
}


def cache_folder(name: str) -> Path:
    """The folder of one cache; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sabia" / name


def compiled_code_folder(name: str) -> Path:
    """A writable folder for compiled code, which is made: `cache_folder(name)`, or one among the
    temporary files where that cannot be written (a home that is read-only)."""
    folder = cache_folder(name)
    if not _writable(folder):
        folder = _own_temporary_folder() / name
        folder.mkdir(exist_ok=True)
    return folder


def name_compilers_folders(environment: MutableMapping[str, str] = os.environ) -> None:
    """Tell COMPILERS where to keep what they compile; a variable that is set is left alone."""
    for name, variable in COMPILERS.items():
        if variable not in environment:
            environment[variable] = str(compiled_code_folder(name))


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _own_temporary_folder() -> Path:
    """A folder that only this user can write: code is loaded from it, and others may write /tmp."""
    folder = Path(tempfile.gettempdir()) / f"sabia-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="sabia-"))
