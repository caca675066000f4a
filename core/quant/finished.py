"""Finished layers of a quantization, next to its output: what a killed run goes on from.

In OUT.layers, layer N is `layer-N.safetensors` (the tensors of the files), and the states of the
tokens after it are `states-N.safetensors`, of which the last are kept. `layer-N.json`, written
last, has the digests of both, the fingerprint of the run (model, options and tokens), and the rows
of the report. The part after the last layer is what is outside of the layers.
"""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import Failed
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.model.storage.safetensors_file import (
    read_tensors,
    release_pages,
    write_tensors,
)
from sabia.core.shards.atomic import atomic_path, file_digest, read_json, write_json

SCHEMA_VERSION = 1


class FinishedLayers:
    """The folder; `records` are those of its finished layers, in order."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Read what there is; layers of another run, or damaged ones, are removed."""
        self.folder = folder
        self.made = {"schema_version": SCHEMA_VERSION, "fingerprint": fingerprint}
        self.records: list[dict[str, Any]] = []
        try:
            while (path := self._path("layer", len(self.records), "json")).exists():
                record = read_json(path)
                if {name: record.get(name) for name in self.made} != self.made:
                    notes.note(f"{folder} is of another run; its layers are made again")
                    self.remove()
                    return
                self.records.append(record)
            self._check()
        except (OSError, ValueError) as error:
            notes.warn(f"{folder} is damaged ({error}); all layers are made again")
            self.remove()

    def _check(self) -> None:
        for number, record in enumerate(self.records):
            last = number + 1 == len(self.records)
            for kind in ("layer", "states") if last and record["states"] else ("layer",):
                path = self._path(kind, number)
                if file_digest(path) != record[kind]:
                    raise ValueError(f"{path.name} is not as it was written")

    def add(
        self, tensors: Mapping[str, Any], states: Mapping[str, np.ndarray], record: dict[str, Any]
    ) -> None:
        """Keep a layer; states: those after it, by name, none after the last part."""
        number = len(self.records)
        self.folder.mkdir(parents=True, exist_ok=True)
        made = {**self.made, **record, "states": None}
        for kind, arrays in (("layer", tensors), ("states", states)):
            if arrays:
                with atomic_path(self._path(kind, number)) as temporary:
                    write_tensors(temporary, arrays)
                    made[kind] = file_digest(temporary)
        write_json(self._path("layer", number, "json"), made)
        self.records.append(made)
        if number:
            self._path("states", number - 1).unlink(missing_ok=True)

    def states(self) -> dict[str, np.ndarray]:
        """Those after the last finished layer."""
        path = self._path("states", len(self.records) - 1)
        return {name: np.array(array) for name, array in read_tensors(path).items()}

    def tensors(self) -> dict[str, LazyArray]:
        """All tensors by name, each of which is read when it is used."""
        tensors: dict[str, LazyArray] = {}
        for number, record in enumerate(self.records):
            path = self._path("layer", number)
            if file_digest(path) != record["layer"]:
                raise Failed(f"{path} is not as it was written (is the disk damaged?)")
            for name, array in read_tensors(path).items():
                tensors[name] = LazyArray(array.shape, array.dtype, partial(_rows, array))
        return tensors

    def remove(self) -> None:
        """Remove the folder."""
        self.records = []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, kind: str, number: int, end: str = "safetensors") -> Path:
        return self.folder / f"{kind}-{number:05d}.{end}"


def _rows(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    rows = np.array(array[start:stop])
    release_pages(array)
    return rows
