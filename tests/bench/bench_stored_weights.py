"""Memory and speed of generation on stored weights beside the decoded model.

    python tests/bench/bench_stored_weights.py [w4a16 w8a16 fp8 …]

Each case is a process of its own: the growth of resident memory while the model is opened, and
tokens per CPU second of 1 and 16 samples of 32 tokens.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.model.storage import hub
from sabia.core.model.storage.stored_weights import load_stored
from sabia.core.parallel.build_ops import load_ops, ops_as_served
from sabia.core.quant import export, recipe
from sabia.core.quant.quantize import quantize
from sabia.core.spec import from_config, new_config

SHAPE = {"hidden": 768, "layers": 8, "heads": 12, "kv_heads": 4, "ffn": 2048, "vocab": 4096}


class NoTokenizer:
    """Texts are not needed."""

    stop_ids = ()

    @staticmethod
    def decode(ids: object) -> str:
        return ""


def resident() -> int:
    """Resident memory in bytes, without pages of files."""
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) << 10


def measure(directory: str, how: str) -> None:
    torch.set_num_threads(1)
    before = resident()
    spec, params = (load_stored if how == "stored" else hub.load_model)(directory)
    engine = Engine(spec, params, NoTokenizer(), ops=ops_as_served("torch", spec))
    del params
    memory, speeds = resident() - before, []
    for samples in (1, 16):
        request = [Request([1, 2, 3], 32, n=samples, stop_ids=())]
        engine.generate(request)
        start = time.process_time()
        engine.generate(request)
        speeds.append(32 * samples / (time.process_time() - start))
    print(f"{how:<8}{memory / 2**20:8.0f} MiB{speeds[0]:9.1f}{speeds[1]:9.1f} tokens per CPU s")


def main() -> None:
    spec = from_config(new_config("llama", **SHAPE))
    params = hub.init_params(spec, 0)
    for name in sys.argv[1:] or ["w4a16", "w8a16", "mxfp4a16"]:
        with tempfile.TemporaryDirectory() as root:
            made = quantize(spec, params, recipe.load_recipe(name), load_ops("torch"))
            export.export(Path(root) / "q", made, None)
            print(name, flush=True)
            for how in ("decoded", "stored"):
                subprocess.run([sys.executable, __file__, root + "/q", how], check=True,
                               env=os.environ)  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2] in ("decoded", "stored"):
        measure(*sys.argv[1:])
    else:
        main()
