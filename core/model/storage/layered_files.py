"""A model directory that is read layer by layer, so that one layer is in memory.

Pages of the mapped files are freed after use. The names and shapes are those of `hub.load_model`.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sabia.core.model.storage import hub
from sabia.core.model.storage.safetensors_file import release_pages
from sabia.core.numerics.nf4 import matrix_of
from sabia.core.numerics.published import BLOCKS, SCALES
from sabia.core.spec.families import load_spec
from sabia.core.spec.tensors import TensorSpec


class LayeredFiles:
    """The parameters of a directory by layer; quantized matrices are decoded."""

    def __init__(self, directory: str | Path, any_names: bool = False) -> None:
        """Raises what `hub.load_model` raises, for a tensor's absence or shape when it is read.

        any_names: whether tensors that the family does not know are no error.
        """
        self.spec = load_spec(directory)
        self.tensors = hub.read_checkpoint(directory)
        self.size_bytes = sum(array.nbytes for array in self.tensors.values())
        self.modules: dict[str, list[str]] = {}  # names of the tensors of a module
        for name in self.tensors:
            whole = name.removesuffix(BLOCKS).removesuffix(SCALES)
            module = whole if whole != name else matrix_of(name).rpartition(".")[0]
            self.modules.setdefault(module, []).append(name)
        own = {name for tensor in self.spec.tensors() for name in self._names(tensor)}
        if not any_names:
            hub.check_names(self.spec, (name for name in self.tensors if name not in own))

    def read(self, layer: int | None) -> dict[str, np.ndarray]:
        """The parameters of a layer by our names; None: those outside of the layers.

        In the dtype of the files, quantized ones float32; copies, no mapped memory.
        """
        table = [tensor for tensor in self.spec.tensors() if tensor.layer == layer]
        names = dict.fromkeys(name for tensor in table for name in self._names(tensor))
        selected = {name: self.tensors[name] for name in names if name in self.tensors}
        decoded = hub.decoded(self.spec, dict(selected))
        params = {tensor.name: np.array(hub.take(tensor, decoded)) for tensor in table}
        for array in selected.values():
            release_pages(array)
        return params

    def _names(self, tensor: TensorSpec) -> Iterator[str]:
        """Names in the files of a tensor, and of all of its module where it may be quantized."""
        for name in tensor.files:
            yield name
            if "quantization_config" in self.spec.config:
                yield from self.modules.get(name.removesuffix(".weight"), ())
