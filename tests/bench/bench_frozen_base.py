"""Memory and speed of training adapters beside matrices of 4 bits, next to fp32 ones.

    python tests/bench/bench_frozen_base.py [none nf4 int4]

Each case is a process of its own: bytes of the parameters, resident memory after the stepper is
made, the peak of it, and training tokens per CPU second, of 8 rows of 128 tokens, 2 at a time.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from sabia.core.model.init import init_params
from sabia.core.model.lora import LoraConfig
from sabia.core.model.storage import hub
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper

SHAPE = {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 4096}
MIB = 1 << 20


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / MIB


def measure(base: str, model: str) -> None:
    """Print a row of one case."""
    import torch

    torch.set_num_threads(1)
    before = resident()
    spec, params = hub.load_model(model)
    lora = LoraConfig(16, 32.0, base="" if base == "none" else base)
    since = time.process_time()
    stepper = make_stepper("torch", spec, params, next_token_loss, lora=lora, micro_batch=2)
    start = time.process_time() - since
    size = sum(p.nbytes for p in stepper.params.values()) / MIB
    made = resident() - before
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, (8, 129))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    batch["loss_mask"] = np.ones((8, 128), np.float32)
    stepper.step(batch, 1e-4)
    since = time.process_time()
    for number in range(3):
        loss = stepper.step(batch, 1e-4, number=number).loss
    rate = 3 * 8 * 128 / (time.process_time() - since)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    print(f"{base:5} parameters {size:7.1f} MiB, resident {made:7.1f}, peak {peak:7.1f}, "
          f"{rate:6.0f} tokens a CPU second, start {start:.1f} CPU s, loss {loss:.5f}")  # fmt: skip


def main() -> None:
    """All cases, or those named."""
    if len(sys.argv) == 3 and sys.argv[2].startswith("/"):
        measure(sys.argv[1], sys.argv[2])
        return
    spec = from_config(new_config(**SHAPE, context=256))
    with tempfile.TemporaryDirectory() as folder:
        hub.save_model(folder, spec, init_params(spec, 0))
        for base in sys.argv[1:] or ("none", "nf4", "int4"):
            subprocess.run([sys.executable, __file__, base, folder], check=True)


if __name__ == "__main__":
    main()
