"""Checkpoints in a local directory: names, commit, checks, retention.

`step-NNNNNNNN/` holds `state-RANK-NUMBER.safetensors`, `manifest.json` and `COMMITTED`, written
last, with the hash of the manifest. It is written as `.step-NNNNNNNN.saving` and renamed, so a
directory with the final name is complete. The manifest:

    format, step, and the caller's entries (model, optimizer, rng, data, mesh, …)
    files    name → size, xxh3
    tensors  name → dtype, shape, pieces: [{file, key, offset, shape}]

Every process of a run must see the directory under the same path (a shared filesystem, or one
host): processes synchronise through small files in it while they save.
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

from xxhash import xxh3_128_hexdigest

from sabia.core.errors import BadData, Failed
from sabia.core.shards.atomic import file_digest, fsync_directory, write_atomic

FORMAT = 2
MANIFEST, COMMITTED = "manifest.json", "COMMITTED"
READERS = 4  # files that are checked at the same time
_PREFIX = "step-"
Entry = Mapping[str, Any]  # part of a manifest


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint; checked: the sizes and hashes of its files have been verified."""

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
    """Directory of the checkpoint of a step."""
    return directory / name_of(step)


def saving_path(directory: Path, step: int) -> Path:
    """Directory in which it is written until it is complete."""
    return directory / f".{name_of(step)}.saving"


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in a directory, newest first, valid or not."""
    if not directory.is_dir():
        return []
    steps_there = (step_of(path.name) for path in directory.iterdir())
    return sorted((step for step in steps_there if step is not None), reverse=True)


def merge(entries: Iterable[Entry]) -> dict[str, object]:
    """Files and tensors of all processes; raises Failed unless the pieces form whole tensors."""
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for entry in entries:
        files |= entry["files"]
        for name, tensor in entry["tensors"].items():
            known = tensors.setdefault(name, {**tensor, "pieces": []})
            if (known["dtype"], known["shape"]) != (tensor["dtype"], tensor["shape"]):
                raise Failed(f"checkpoint: processes differ on the dtype or shape of {name}")
            known["pieces"] += tensor["pieces"]
    for name, tensor in tensors.items():
        # the pieces do not overlap, so equal counts mean a complete tensor
        stored = sum(math.prod(piece["shape"]) for piece in tensor["pieces"])
        expected = math.prod(tensor["shape"])
        if stored != expected:
            raise Failed(f"checkpoint: pieces of {name} hold {stored} of {expected} elements")
    return {"files": files, "tensors": tensors}


def commit(directory: Path, step: int, entries: Iterable[Entry], meta: Entry) -> None:
    """Write manifest and commit mark next to the synced files, and rename the directory."""
    saving, final = saving_path(directory, step), path_of(directory, step)
    manifest = {"format": FORMAT, "step": step, **meta, **merge(entries)}
    text = json.dumps(manifest, indent=1).encode()
    write_atomic(saving / MANIFEST, text)
    write_atomic(saving / COMMITTED, xxh3_128_hexdigest(text) + "\n")
    # the files must be durable before the rename makes them visible
    fsync_directory(saving)
    rename_into_place(saving, final)


def rename_into_place(saving: Path, final: Path) -> None:
    """Rename `saving` to `final`, replacing an older directory of that name."""
    old = final.with_name(f".{final.name}.old")
    # left by a process that was killed here
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        # an older checkpoint of the same step
        os.rename(final, old)
    os.rename(saving, final)
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def read_manifest(name: str, text: bytes, mark: bytes) -> dict[str, object]:
    """The manifest, if its hash equals the commit mark; BadData otherwise."""
    if xxh3_128_hexdigest(text) != mark.decode("ascii", "replace").strip():
        raise BadData(f"checkpoint {name}: manifest does not match its commit mark")
    manifest = json.loads(text)
    if manifest.get("format") != FORMAT:
        raise BadData(f"checkpoint {name}: format {manifest.get('format')} (expected {FORMAT})")
    return manifest


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint with a valid manifest, its files not yet checked; BadData otherwise."""
    try:
        text, mark = ((path / name).read_bytes() for name in (MANIFEST, COMMITTED))
        manifest = read_manifest(path.name, text, mark)
    except (OSError, ValueError) as error:
        raise BadData(f"checkpoint {path.name}: not readable ({error})") from error
    return Checkpoint(path, manifest)


def verify(path: Path, rank: int = 0, size: int = 1) -> Checkpoint:
    """A checkpoint after checking sizes and hashes of this process's share of the files."""
    checkpoint = open_checkpoint(path)
    files = checkpoint.manifest["files"]
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda name: check_file(checkpoint, name), sorted(files)[rank::size]))
    return Checkpoint(path, checkpoint.manifest, checked=True)


def check_file(checkpoint: Checkpoint, name: str) -> None:
    """Raise BadData unless a file has the size and the hash of the manifest."""
    path, expected = checkpoint.path / name, checkpoint.manifest["files"][name]
    try:
        size = path.stat().st_size
        same = size == expected["size"] and file_digest(path) == expected["xxh3"]
    except OSError as error:
        raise BadData(f"checkpoint {checkpoint.path.name}: not readable ({error})") from error
    if not same:
        raise BadData(f"checkpoint {path.parent.name}: {name} is corrupt (size or hash differs)")


def discard(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a kill leaves no partial checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        steps_to_delete = path.with_name(f".{path.name}.old")
        shutil.rmtree(steps_to_delete, ignore_errors=True)
        os.rename(path, steps_to_delete)
        shutil.rmtree(steps_to_delete)


def remove_leftovers(directory: Path) -> None:
    """Remove incomplete directories of killed processes (call it when no other run is writing)."""
    for old in directory.glob(f".{_PREFIX}*"):
        shutil.rmtree(old, ignore_errors=True)


def steps_to_delete(
    steps_there: Sequence[int], current: int, keep: int, keep_every: int = 0, best: int = 0
) -> list[int]:
    """The steps to delete once `current` is committed.

    Keeps `current`, the newest `keep` up to it (at least 1), step `best` and, if `keep_every` is
    given, the steps that it divides. Later steps were undone by a rewind.
    """
    # newest first
    before = sorted((step for step in steps_there if step <= current), reverse=True)
    to_keep = {current, best, *before[: max(1, keep)]}
    to_keep |= {step for step in before if keep_every and step % keep_every == 0}
    return [step for step in steps_there if step not in to_keep]
