"""What it costs to load a sharded model for training and to write it back, in memory and in bytes.

Peaks are of the resident memory of a process, less those of the same with a small model: so
interpreter, libraries and buffers cancel. What a trainer in fp32 must hold is parameters and two
moments, 12 bytes a parameter, and in a step gradients, 16; beyond that the files may cost one
shard, not all of them.
"""

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training_cases import ENVIRONMENT, make_tokens, sabia

from sabia.core.model.init import init_params
from sabia.core.model.storage.hub import read_checkpoint, save_model
from sabia.core.model.storage.safetensors_file import release_pages
from sabia.core.numerics.floats import numpy_dtype
from sabia.core.spec import from_config, load_spec, new_config, parameter_count

pytest.importorskip("torch", reason="the torch backend")
SHARDS = 4
SLACK = 24 << 20
SIZES = {
    "small": {"hidden": 64, "layers": 2, "vocab": 512, "heads": 4, "ffn": 128},
    "large": {"hidden": 512, "layers": 8, "vocab": 8192, "heads": 8, "ffn": 1536},
}


def make_model(folder: Path, size: str, dtype: np.dtype) -> Path:
    """A model directory of at least four shards."""
    spec = from_config(new_config("llama", **SIZES[size], context=64, tied=False))
    params = {name: x.astype(dtype) for name, x in init_params(spec, 1).items()}
    most = sum(x.nbytes for x in params.values()) // SHARDS
    save_model(folder, spec, params, max_shard_bytes=most)
    assert len(list(folder.glob("*.safetensors"))) >= SHARDS
    return folder


def tensors(folder: Path) -> dict[str, tuple[str, str]]:
    """Name → (dtype, hash of the bytes), read by the format's definition."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, said in header.items():
            first, end = said["data_offsets"]
            digest = hashlib.sha256(data[start + first : start + end]).hexdigest()
            found[name] = (said["dtype"], digest)
    return found


REPORT = """
    status = open("/proc/self/status").read()
    print(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1], file=sys.stderr)
"""
RUN = f"""
import re, sys
from sabia.cli.main import main
try:
    main()
finally: {REPORT}
"""
LOAD = f"""
import re, sys
from sabia.core.model.storage.hub import load_model
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper
stepper = make_stepper("torch", *load_model(sys.argv[1]), next_token_loss)
if stepper.params: {REPORT}
"""


def peak(script: str, *words: object) -> int:
    """Most bytes that a process has held; ru_maxrss would count its parent's as well."""
    command = [sys.executable, "-c", script, *map(str, words)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr
    return int(done.stderr) << 10


def held(peaks: dict[str, int], folder: Path, bytes_each: int) -> None:
    """The large model's peak is the state of so many bytes a parameter, and one shard at most."""
    counts = [parameter_count(load_spec(folder / size)) for size in ("small", "large")]
    shard = max(path.stat().st_size for path in (folder / "large").glob("*.safetensors"))
    state, found = bytes_each * (counts[1] - counts[0]), peaks["large"] - peaks["small"]
    print(f"held {found / 1e6:.0f} MB, state {state / 1e6:.0f} MB, shard {shard / 1e6:.0f} MB")
    assert 0.8 * state < found <= state + shard + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_loading_holds_the_state_and_one_shard(tmp_path: Path, dtype: str) -> None:
    """Parameters and two moments: the mapped files do not stay in memory beside them."""
    models = {size: make_model(tmp_path / size, size, numpy_dtype(dtype)) for size in SIZES}
    held({size: peak(LOAD, model) for size, model in models.items()}, tmp_path, 12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_training_holds_the_state_and_one_shard(tmp_path: Path, dtype: str) -> None:
    """From loading over a step and a checkpoint to the exported model; gradients, too."""
    tokens, peaks = make_tokens(tmp_path / "tokens", 8), {}
    more = ("--steps", 1, "--batch", 1, "--export-dtype", dtype, "--peak-flops", "1T", "-q")
    for size in SIZES:
        model = make_model(tmp_path / size, size, numpy_dtype(dtype))
        out = tmp_path / f"{size}-run"
        peaks[size] = peak(RUN, "pretrain", tokens, "--model", model, *more, "-o", out)
    held(peaks, tmp_path, 16)


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "small", numpy_dtype("float32"))
    arrays = read_checkpoint(model)
    before = {name: array.copy() for name, array in arrays.items()}
    for array in (*arrays.values(), *before.values()):  # of memory that is not mapped nothing goes
        release_pages(array)
        release_pages(array[:1].T)
    assert all(np.array_equal(arrays[name], before[name]) for name in arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_frozen_tensors_come_out_byte_for_byte(tmp_path: Path, dtype: str) -> None:
    model = make_model(tmp_path / "model", "small", numpy_dtype(dtype))
    tokens = make_tokens(tmp_path / "tokens", 8)
    done = sabia(
        *("pretrain", tokens, "--model", model, "--steps", 2, "--batch", 4, "--lr", 1e-2),
        *("--freeze", "embed|attn", "--export-dtype", dtype, "--peak-flops", "1T", "-q"),
        *("-o", tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    given, final = tensors(model), tensors(tmp_path / "run" / "final")
    assert set(given) == set(final)
    assert {kind for kind, _ in final.values()} == {{"bfloat16": "BF16", "float32": "F32"}[dtype]}
    untouched = {name for name in given if given[name] == final[name]}
    assert untouched == {
        name
        for name in given
        if "embed_tokens" in name or "self_attn" in name or "input_layernorm" in name
    }
    assert json.loads((tmp_path / "run/final/config.json").read_text())["dtype"] == dtype
