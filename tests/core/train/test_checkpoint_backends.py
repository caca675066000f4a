"""Arrays of JAX and torch go into a checkpoint and come out bit for bit, whatever their mesh."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from waiting import HANG_S

from sabia.core.train.checkpoint import local
from sabia.core.train.checkpoint.pieces import Piece
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import Saver

JAX_CASE = """
import sys, pathlib
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import Saver
from sabia.core.train.checkpoint import pieces_jax

place = pathlib.Path(sys.argv[1])
jax.config.update("jax_num_cpu_devices", 8)
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
host = np.arange(16 * 6, dtype=np.float32).reshape(16, 6)
layouts = {"a": P("fsdp", "tensor"), "b": P("tensor"), "c": P(None, "tensor"), "d": P()}
arrays = {n: jax.device_put(jnp.asarray(host, jnp.bfloat16), NamedSharding(mesh, s))
          for n, s in layouts.items()}
arrays["count"] = jax.device_put(jnp.int32(3), NamedSharding(mesh, P()))
pieces = [p for n, a in arrays.items()
          for p in pieces_jax.jax_pieces(n, a, np.int64 if n == "count" else None)]
assert [sum(p.name == n for p in pieces) for n in arrays] == [8, 2, 2, 1, 1]
with Saver(place) as saver:
    saver.save(1, pieces, {})
reader = Reader(latest(place))
for name, array in arrays.items():
    wanted = np.asarray(array)
    assert np.array_equal(reader.read(name), wanted), name
other = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"))
def cut(index):
    ends = [s.indices(n) for s, n in zip(index, (16, 6))]
    return reader.read("a", [e[0] for e in ends], [e[1] - e[0] for e in ends])
for spec in (P("tensor"), P("fsdp"), P("tensor", "fsdp")):
    again = jax.make_array_from_callback((16, 6), NamedSharding(other, spec), cut)
    assert np.array_equal(np.asarray(again), np.asarray(arrays["a"]))
sliced = pieces_jax._rows(arrays["d"].addressable_shards[0].data, 4, 3)
assert np.array_equal(np.asarray(sliced), host[4:7].astype(sliced.dtype))
assert int(pieces_jax._rows(jnp.int32(5), 0, 1)) == 5
"""


def run(place: Path, text: str, *launcher: str) -> None:
    script = place / "case.py"
    script.write_text(text)
    words = [sys.executable, *launcher, str(script), str(place / "checkpoints")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]


def test_jax_shards(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    run(tmp_path, JAX_CASE)
    found = local.verify(tmp_path / "checkpoints" / "step-00000001")
    assert Reader(found)["a"].dtype.name == "bfloat16"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_torch_dtypes(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    from sabia.core.train.stepper_torch_shards import lazy

    tensor = (torch.arange(12).reshape(3, 4) % 5).to(getattr(torch, kind))
    with Saver(tmp_path) as saver:
        named = {"x": tensor, "turned": tensor.T, "one": tensor[1, 1]}
        saver.save(1, [Piece(name, lazy(one)) for name, one in named.items()], {})
    reader = Reader(latest(tmp_path))
    assert reader["x"].dtype.name == kind
    as_numbers = tensor.float().numpy()
    assert np.array_equal(reader.read("x").astype(np.float32), as_numbers)
    assert np.array_equal(reader.read("turned").astype(np.float32), as_numbers.T)
    assert float(reader.read("one").astype(np.float32)) == as_numbers[1, 1]


def test_torch_step_may_go_on(tmp_path: Path) -> None:
    """Tensors on a CPU share their memory with NumPy; what is saved is of before the step."""
    torch = pytest.importorskip("torch")
    from sabia.core.train.stepper_torch_shards import lazy

    tensor = torch.ones(1 << 20)
    with Saver(tmp_path) as saver:
        saver.save(1, [Piece("x", lazy(tensor))], {})
        tensor.zero_()
    assert Reader(latest(tmp_path)).read("x").all()
