"""Checkpoints on a disk: names, commit, checks, retention.

`step-NNNNNNNN/` holds `state-RANK-NUMBER.safetensors`, `manifest.json` and `COMMITTED`, written
last, with the hash of the manifest. It is written as `.step-NNNNNNNN.saving` and renamed, so what
has the final name is whole. The manifest:

    format, step, and what the caller says (model, optimizer, rng, data, mesh, …)
    files    name → size, xxh3
    tensors  name → dtype, shape, pieces: [{file, key, offset, shape}]

Every process of a run must see the directory under the same path (a shared filesystem, or one
host): processes meet in it through small files while they save.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sabia.core.errors import BadData, Failed
from sabia.core.shards.atomic import fsync_directory
from sabia.core.train.checkpoint.writer import file_hash, text_hash

FORMAT = 2
MANIFEST, COMMITTED = "manifest.json", "COMMITTED"
READERS = 4  # files that are checked at the same time
_PREFIX = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: where it lies, what its manifest says, whether its files were read
    and found to be what was written."""

    path: Path
    manifest: Mapping[str, Any]
    checked: bool = False

    @property
    def step(self) -> int:
        """Updates made when it was written."""
        return int(self.manifest["step"])


def name_of(step: int) -> str:
    """Directory name of a step's checkpoint."""
    return f"{_PREFIX}{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a directory name; None for other names."""
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name.startswith(_PREFIX) and digits.isdigit() else None


def path_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / name_of(step)


def saving_path(directory: Path, step: int) -> Path:
    """Where it is written before it is whole."""
    return directory / f".{name_of(step)}.saving"


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints there, newest first, whether or not they pass their checks."""
    if not directory.is_dir():
        return []
    found = (step_of(path.name) for path in directory.iterdir())
    return sorted((step for step in found if step is not None), reverse=True)


def merge(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All processes' files and tensors; raises Failed unless the pieces make up whole tensors."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for entry in entries:
        files |= entry["files"]
        for name, said in entry["tensors"].items():
            known = tensors.setdefault(name, {**said, "pieces": []})
            if (known["dtype"], known["shape"]) != (said["dtype"], said["shape"]):
                raise Failed(f"checkpoint: processes differ on the dtype or shape of {name}")
            known["pieces"] += said["pieces"]
    for name, said in tensors.items():
        held, wanted = sum(math.prod(p["shape"]) for p in said["pieces"]), math.prod(said["shape"])
        if held != wanted:
            raise Failed(f"checkpoint: pieces of {name} hold {held} of {wanted} elements")
    return {"files": files, "tensors": tensors}


def commit(
    directory: Path, step: int, entries: Iterable[Mapping[str, Any]], meta: Mapping[str, Any]
) -> None:
    """Write manifest and mark beside synced files, and give the directory its name."""
    saving, final = saving_path(directory, step), path_of(directory, step)
    manifest = {"format": FORMAT, "step": step, **meta, **merge(entries)}
    text = json.dumps(manifest, indent=1).encode()
    _write_synced(saving / MANIFEST, text)
    _write_synced(saving / COMMITTED, text_hash(text).encode() + b"\n")
    fsync_directory(saving)
    set_in_place(saving, final)


def set_in_place(saving: Path, final: Path) -> None:
    """Rename, moving one that has the name already out of the way."""
    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.rename(final, old)
    os.rename(saving, final)
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(name: str, text: bytes, mark: bytes) -> dict[str, Any]:
    """A manifest that its commit mark vouches for; BadData otherwise."""
    if text_hash(text) != mark.decode("ascii", "replace").strip():
        raise BadData(f"checkpoint {name}: manifest does not match its commit mark")
    manifest = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise BadData(f"checkpoint {name}: format {manifest.get('format')} (expected {FORMAT})")
    return manifest


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint by its manifest, its files not yet checked; BadData when that is not whole."""
    try:
        manifest = read_manifest(
            path.name, (path / MANIFEST).read_bytes(), (path / COMMITTED).read_bytes()
        )
    except (OSError, ValueError) as error:
        raise BadData(f"checkpoint {path.name}: not readable ({error})") from error
    return Checkpoint(path, manifest)


def verify(path: Path, rank: int = 0, size: int = 1) -> Checkpoint:
    """A checkpoint after checking sizes and hashes of this process's share of the files."""
    found = open_checkpoint(path)
    files = found.manifest["files"]
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda name: check_file(found, name), sorted(files)[rank::size]))
    return Checkpoint(path, found.manifest, checked=True)


def check_file(found: Checkpoint, name: str) -> None:
    """Raise BadData unless a file has the size and the hash that the manifest says."""
    path, wanted = found.path / name, found.manifest["files"][name]
    try:
        size = path.stat().st_size
        same = size == wanted["size"] and file_hash(path) == wanted["xxh3"]
    except OSError as error:
        raise BadData(f"checkpoint {found.path.name}: not readable ({error})") from error
    if not same:
        raise BadData(f"checkpoint {found.path.name}: {name} is corrupt (size or hash differs)")


def discard(path: Path) -> None:
    """Remove a checkpoint; whatever the moment of a kill, no half of it keeps its name."""
    with contextlib.suppress(FileNotFoundError):
        doomed = path.with_name(f".{path.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def sweep(directory: Path) -> None:
    """Remove what killed processes left under dot-names (call it when no other run is writing)."""
    for old in directory.glob(f".{_PREFIX}*"):
        shutil.rmtree(old, ignore_errors=True)


def doomed(found: Sequence[int], current: int, keep: int, keep_every: int = 0) -> list[int]:
    """Which of the steps `found` to delete once `current` is safe.

    Kept are `current`, the newest `keep` up to it (at least 1) and, where `keep_every` is given,
    the steps it divides. Later ones belong to a course of the run that was given up.
    """
    before = sorted((step for step in found if step <= current), reverse=True)
    kept = {current, *before[: max(1, keep)]}
    kept |= {step for step in before if keep_every and step % keep_every == 0}
    return [step for step in found if step not in kept]
