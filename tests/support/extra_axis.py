"""Runs mesh_torch.py or mesh_jax.py with one more mesh axis: one line more in core.parallel.mesh.

usage: extra_axis.py torch|jax ARGUMENTS…    (those of mesh_torch.py or mesh_jax.py)
The axis `replica` holds copies of the model, with rows of their own, outside of `data`.
"""

import importlib.util
import sys
from pathlib import Path

NAME = "sabia.core.parallel.mesh"
LINE, BEFORE = '    replica: int = axis("rows")\n', '    data: int = axis("rows")\n'


def add_axis() -> None:
    """Import the module of meshes from its source and one line more."""
    found = importlib.util.find_spec(NAME)
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    assert source.count(BEFORE) == 1
    module = sys.modules[NAME] = importlib.util.module_from_spec(found)
    exec(compile(source.replace(BEFORE, LINE + BEFORE), found.origin, "exec"), module.__dict__)


if __name__ == "__main__":
    add_axis()
    if sys.argv[1] == "torch":
        import mesh_torch

        mesh_torch.main(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        import mesh_jax

        mesh_jax.main(*sys.argv[2:])
