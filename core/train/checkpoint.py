"""Checkpoints that any backend and any mesh can read, and that a kill at any moment cannot spoil.

A checkpoint is a directory `step-NNNNNNNN` of safetensors files, `manifest.json` (step, model,
optimizer, seeds, data position as integers, the mesh that wrote, every tensor's pieces, every
file's size and BLAKE2b), and `COMMITTED`, written last, with the hash of the manifest. It is
written under a dot-name and renamed, so what has the final name is whole; what fails its checks is
passed over with a warning and the one before it is used. Tensors are written file by file of at
most FILE_BYTES, fetched from the device only when their turn comes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.shards.atomic import atomic_directory

FORMAT = 1
FILE_BYTES = 512 << 20
MANIFEST, COMMITTED = "manifest.json", "COMMITTED"
_PREFIX = "step-"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: where it lies and what its manifest says."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Updates made when it was written."""
        return int(self.manifest["step"])


def save(
    directory: Path, step: int, state: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> Path:
    """Write `state` and `meta` as the checkpoint of `step`; returns its path.

    `meta` goes into the manifest as it is (JSON). One of the same step is replaced.
    """
    final = directory / f"{_PREFIX}{step:08d}"
    with atomic_directory(final) as temporary:
        _write(temporary, step, state, meta)
    return final


def _write(
    place: Path, step: int, state: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> None:
    from safetensors.numpy import save_file

    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for number, group in enumerate(_groups(state)):
        name = f"state-{number:05d}.safetensors"
        save_file(group, place / name)
        for key, array in group.items():
            shape = list(array.shape)
            piece = {"file": name, "offset": [0] * len(shape), "shape": shape}
            tensors[key] = {"dtype": str(array.dtype), "shape": shape, "pieces": [piece]}
        files[name] = {"size": _sync(place / name), "blake2b": file_hash(place / name)}
    manifest = {"format": FORMAT, "step": step, **meta, "files": files, "tensors": tensors}
    text = json.dumps(manifest, indent=1).encode()
    (place / MANIFEST).write_bytes(text)
    _sync(place / MANIFEST)
    (place / COMMITTED).write_text(_hash(text) + "\n")
    _sync(place / COMMITTED)


def _groups(state: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The tensors in groups of at most FILE_BYTES (or one tensor), each fetched once."""
    group: dict[str, np.ndarray] = {}
    size = 0
    for name in state:
        array = np.asarray(state[name], order="C")  # keeps numbers without axes as they are
        if group and size + array.nbytes > FILE_BYTES:
            yield group
            group, size = {}, 0
        group[name] = array
        size += array.nbytes
    if group:
        yield group


def _sync(path: Path) -> int:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_hash(path: Path) -> str:
    """128-bit BLAKE2b of a file as 32 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _discard(path: Path) -> None:
    """Remove a checkpoint; whatever the moment of a kill, no half of it keeps its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.{os.getpid()}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(path, doomed)
        shutil.rmtree(doomed)


def sweep(directory: Path) -> None:
    """Remove what killed processes left under dot-names (call it when no other run is writing)."""
    for old in directory.glob(f".{_PREFIX}*"):
        shutil.rmtree(old, ignore_errors=True)


def committed(directory: Path) -> list[Path]:
    """Checkpoints by name, newest first, whether or not they pass their checks."""
    found = [p for p in directory.glob(f"{_PREFIX}*") if p.name.removeprefix(_PREFIX).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(_PREFIX)), reverse=True)


def latest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that passes all checks; None when there is none."""
    for path in committed(directory):
        try:
            return Checkpoint(path, verify(path))
        except BadData as error:
            notes.warn(f"{error}; looking for the checkpoint before it")
    return None


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint after checking commit mark, hashes and sizes; else BadData."""
    try:
        mark = (path / COMMITTED).read_text().strip()
        text = (path / MANIFEST).read_bytes()
        if _hash(text) != mark:
            raise BadData(f"checkpoint {path.name}: manifest does not match its commit mark")
        manifest = json.loads(text)
        for name, wanted in manifest["files"].items():
            file = path / name
            if file.stat().st_size != wanted["size"] or file_hash(file) != wanted["blake2b"]:
                raise BadData(f"checkpoint {path.name}: {name} is corrupt (size or hash differs)")
    except (OSError, ValueError, KeyError) as error:
        raise BadData(f"checkpoint {path.name}: not readable ({error})") from error
    if manifest.get("format") != FORMAT:
        raise BadData(f"checkpoint {path.name}: format {manifest.get('format')} (expected 1)")
    return manifest


def load(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, whole, whatever pieces they were written in."""
    from safetensors import safe_open

    entries = checkpoint.manifest["tensors"]
    state = {k: np.empty(e["shape"], np.dtype(e["dtype"])) for k, e in entries.items()}
    by_file: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for key, entry in entries.items():
        for piece in entry["pieces"]:
            by_file.setdefault(piece["file"], []).append((key, piece))
    for name, pieces in by_file.items():
        with safe_open(checkpoint.path / name, "np") as file:
            for key, piece in pieces:
                place = tuple(
                    slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"], strict=True)
                )
                state[key][place] = file.get_tensor(key)
    return state


def prune(directory: Path, keep: int) -> None:
    """Keep the newest `keep` checkpoints (at least 1)."""
    for path in committed(directory)[max(1, keep) :]:
        _discard(path)
