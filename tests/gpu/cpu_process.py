"""A process that computes references on the CPU while a part computes on the device.

usage: cpu_process.py FILE FOLDER ARGUMENT…    (reads names from stdin, answers each with a line)

FILE is a Python file with `reference(name, *arguments)`, which returns arrays by name; they are
written to FOLDER/NAME.npz.
"""

import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class References:
    """The process; it goes on with the next name while the results of one are compared.

    file: with `reference`. names: in the order in which they will be asked for.
    """

    def __init__(self, file: str, folder: Path, names: Sequence[str], *arguments: int) -> None:
        self.folder, self.names, self._asked = folder, list(names), list[str]()
        self._errors: dict[str, str] = {}  # name → its error, '' where there is none
        self._words = [sys.executable, __file__, file, str(folder), *map(str, arguments)]
        self._process: subprocess.Popen[str] | None = None

    def get(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of a name; RuntimeError if the process could not compute them."""
        index = self.names.index(name)
        for ahead in self.names[index : index + 2]:
            self._ask(ahead)
        assert self._process is not None and self._process.stdout is not None
        while name not in self._errors:
            word, _, error = self._process.stdout.readline().rstrip("\n").partition(" ")
            if not word:
                raise RuntimeError(f"the CPU process ended at {name}; see log.txt")
            self._errors[word] = error
        if self._errors[name]:
            raise RuntimeError(f"on the CPU: {self._errors[name]}")
        with np.load(self.folder / f"{name}.npz") as file:
            return dict(file)

    def _ask(self, name: str) -> None:
        if self._process is None:
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._words, stdin=pipe, stdout=pipe, text=True, env=environment
            )
        if name not in self._asked:
            assert self._process.stdin is not None
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
            self._asked.append(name)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main(file: str, folder: str, *arguments: str) -> None:
    """Answer names until stdin ends: `NAME`, or `NAME ERROR`."""
    reference = runpy.run_path(file)["reference"]
    for line in sys.stdin:
        name, error = line.strip(), ""
        try:
            arrays = reference(name, *map(int, arguments))
            np.savez(Path(folder) / f"{name}.npz", **arrays)
        except Exception as failure:
            traceback.print_exc()
            error = f" {type(failure).__name__}: {failure}".splitlines()[0]
        print(name + error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
