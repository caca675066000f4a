"""Find the newest valid checkpoint, and read any box of any of its tensors.

Damaged checkpoints, local or at a URL, are skipped with a warning. Every process of a run calls
`latest` with its rank and a function `agree` (the logical AND over all processes): each checks, or
downloads, its share of the files. If the directory is empty, the checkpoint is downloaded from the
URL into the directory, as if it had been written there.

A box is read whatever mesh wrote the tensor. It may overlap several pieces; only the bytes of the
overlap are read: directly into the result if they are contiguous in the file, otherwise through a
temporary memory map of the piece. A file's hash is checked when it is first read, unless the whole
checkpoint has been checked.
"""

import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import BadData, Failed
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.model.storage.safetensors_file import read_header
from sabia.core.numerics.floats import numpy_dtype
from sabia.core.parallel.world import World
from sabia.core.shards.atomic import fsync_directory
from sabia.core.train.checkpoint import local
from sabia.core.train.checkpoint.local import COMMITTED, MANIFEST, Checkpoint, check_file
from sabia.core.train.checkpoint.pieces import sync

Box = tuple[slice, ...]


class Reader(Mapping[str, LazyArray]):
    """The tensors of a checkpoint by name, read when used; `read` returns a box of one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._tensors: Mapping[str, Any] = checkpoint.manifest["tensors"]
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, name: str) -> LazyArray:
        entry = self._tensors[name]
        shape = tuple(entry["shape"])
        return LazyArray(shape, numpy_dtype(entry["dtype"]), partial(self._rows, name, shape))

    def _rows(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        if not shape:
            return self.read(name)
        rest = (0,) * (len(shape) - 1)
        return self.read(name, (start, *rest), (stop - start, *shape[1:]))

    def read(
        self, name: str, offset: Sequence[int] = (), shape: Sequence[int] | None = None
    ) -> np.ndarray:
        """The box of a tensor at `offset` of `shape` (all of it by default), a new array.

        Raises BadData for an unknown name, a box outside the tensor, a corrupt file.
        """
        if name not in self._tensors:
            raise BadData(f"checkpoint {self.checkpoint.path.name}: no tensor {name}")
        entry = self._tensors[name]
        shape = tuple(entry["shape"] if shape is None else shape)
        offset = tuple(offset) or (0,) * len(shape)
        ends = [o + n for o, n in zip(offset, shape, strict=True)]
        if len(ends) != len(entry["shape"]) or any(map(int.__gt__, ends, entry["shape"])):
            raise BadData(f"checkpoint: {name} at {offset} of {shape} is outside {entry['shape']}")
        result = np.empty(shape, numpy_dtype(entry["dtype"]))
        for piece in entry["pieces"]:
            self._copy(piece, offset, result)
        return result

    def _copy(self, piece: Mapping[str, Any], offset: Sequence[int], result: np.ndarray) -> None:
        """Copy the overlap of a piece and the result, whose box begins at `offset`."""
        begin = [max(a, b) for a, b in zip(offset, piece["offset"], strict=True)]
        box_end = [a + n for a, n in zip(offset, result.shape, strict=True)]
        piece_end = [a + n for a, n in zip(piece["offset"], piece["shape"], strict=True)]
        end = [min(a, b) for a, b in zip(box_end, piece_end, strict=True)]
        # the overlap of both boxes in the coordinates of the whole tensor
        if any(b >= e for b, e in zip(begin, end, strict=True)):
            return
        # the same overlap relative to the piece and to the result
        source, target = _box(begin, end, piece["offset"]), _box(begin, end, offset)
        header, data_start = self._header(piece["file"])
        position = data_start + header[piece["key"]]["data_offsets"][0]
        path = self.checkpoint.path / piece["file"]
        _copy_box(path, position, tuple(piece["shape"]), source, result, target)
        overlap = [e - b for b, e in zip(begin, end, strict=True)]
        self.bytes_read += int(np.prod(overlap, dtype=np.int64)) * result.dtype.itemsize

    def _header(self, file: str) -> tuple[dict[str, Any], int]:
        with self._lock:
            if file not in self._headers:
                # a file is hashed once, at its first use
                if not self.checkpoint.checked:
                    check_file(self.checkpoint, file)
                self._headers[file] = read_header(self.checkpoint.path / file)
            return self._headers[file]


def _box(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> Box:
    return tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, origin, strict=True))


def _is_contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Whether the elements of a box are contiguous in a row-major array of this shape."""
    # contiguous: one element in every axis before the last incomplete one
    lengths = [cut.stop - cut.start for cut in box]
    partial_axes = [axis for axis, n in enumerate(lengths) if n != shape[axis]]
    return not partial_axes or all(n == 1 for n in lengths[: partial_axes[-1]])


def _copy_box(
    path: Path, position: int, shape: tuple[int, ...], source: Box, result: np.ndarray, target: Box
) -> None:
    """Copy the box `source` of an array that begins at byte `at` into result[target]."""
    item = result.dtype.itemsize
    with open(path, "rb", buffering=0) as file:
        if _is_contiguous(source, shape) and _is_contiguous(target, result.shape):
            strides = np.cumprod((item, *shape[:0:-1]))[::-1] if shape else ()  # in bytes
            first = sum(int(s) * cut.start for s, cut in zip(strides, source, strict=True))
            whole: Any = (*target, ...)
            into: Any = result[whole].reshape(-1).view(np.uint8)
            _read_into(file.fileno(), memoryview(into), position + first)
            return
        # a map must start at a multiple of the page size
        start = position - position % mmap.ALLOCATIONGRANULARITY
        size = int(np.prod(shape, dtype=np.int64)) * item
        end = position - start + size
        with mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ, offset=start) as m:
            flat = np.frombuffer(m, np.uint8, size, position - start).view(result.dtype)
            result[target] = flat.reshape(shape)[source]
            del flat  # the map cannot be closed while a view of it exists


def _read_into(descriptor: int, view: memoryview, at: int) -> None:
    while view:
        count = os.preadv(descriptor, [view], at)
        if not count:
            raise BadData(
                "checkpoint: a file was truncated by another process while it was read; run again"
            )
        view, at = view[count:], at + count


if TYPE_CHECKING:
    from sabia.core.train.checkpoint.remote import Remote

Agree = Callable[[bool], bool]


def latest(
    directory: Path, remote_url: str = "", world: World | None = None, agree: Agree = bool
) -> Checkpoint | None:
    """The newest checkpoint that passes all checks, in `directory`; None if there is none.

    Raises BadData if there are checkpoints but none is valid, Failed if the URL does not respond.
    """
    search = _Search(directory, world or World(), agree)
    remote = None
    if remote_url:
        from sabia.core.train.checkpoint.remote import Remote

        remote = Remote(remote_url)
    local_steps, remote_steps = local.steps(directory), remote.steps() if remote else []
    for step in sorted({*local_steps, *remote_steps}, reverse=True):
        # a local checkpoint is preferred; a damaged one may be intact at the URL
        checkpoint = search.local(step) if step in local_steps else None
        if checkpoint is None and remote and step in remote_steps:
            checkpoint = search.downloaded(remote, step)
        if checkpoint is not None:
            return checkpoint
    if local_steps or remote_steps:
        raise BadData(
            f"{directory}: none of {len({*local_steps, *remote_steps})} checkpoints is valid; "
            "restore a valid one, or use --force to start over"
        )
    return None


class _Search:
    def __init__(self, directory: Path, world: World, agree: Agree) -> None:
        self.directory, self.world, self.agree = directory, world, agree

    def local(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step if every process finds its share of the files valid."""
        checkpoint, good = None, True
        try:
            path = local.path_of(self.directory, step)
            checkpoint = local.verify(path, self.world.rank, self.world.size)
        except BadData as error:
            notes.warn(f"{error}; looking for the checkpoint before it")
            good = False
        return checkpoint if self.agree(good) else None

    def downloaded(self, remote: "Remote", step: int) -> Checkpoint | None:
        """The checkpoint of a step, downloaded from the URL."""
        into = local.saving_path(self.directory, step)
        if self.world.leads:
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir(parents=True)
        # a barrier: the directory exists for all processes
        self.agree(True)
        if not self.agree(self._download(remote, step, into)):
            return None
        if self.world.leads:
            fsync_directory(into)
            local.rename_into_place(into, local.path_of(self.directory, step))
        self.agree(True)
        return self.local(step)

    def _download(self, remote: "Remote", step: int, into: Path) -> bool:
        try:
            manifest, text, mark = remote.manifest(step)
            # every process downloads its share of the files
            names = sorted(manifest["files"])[self.world.rank :: self.world.size]
            remote.download(step, names, into)
        except (BadData, Failed) as error:
            notes.warn(f"{error}; looking for the checkpoint before it")
            return False
        except OSError as error:
            raise Failed(f"checkpoint: {into} cannot be written ({error})") from error
        if self.world.leads:
            (into / MANIFEST).write_bytes(text)
            (into / COMMITTED).write_bytes(mark)
        sync(into / name for name in names)
        notes.note(f"{remote.url}: downloaded the checkpoint of step {step:,}")
        return True
