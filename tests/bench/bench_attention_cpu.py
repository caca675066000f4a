"""CPU seconds of a training step, and of its attention alone, for documents and windows.

    OMP_NUM_THREADS=1 python tests/bench/bench_attention_cpu.py [--length 4096] [--rounds 3]

A Llama of 4 layers (width 256, 4 heads of 64, fp32), one row a step. The kinds of rows take turns;
medians of the rounds. "plain" is a row without document lengths, the cheapest mask there is.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from sabia.core.model.storage.hub import init_params
from sabia.core.spec import from_config, new_config
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.stepper_factory import make_stepper
from sabia.kernels.attention.interface import attention, attention_mask

SHAPE = {"hidden": 256, "layers": 4, "vocab": 4096, "heads": 4, "kv_heads": 4, "ffn": 704}
WINDOWED = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}


def lengths(kind: str, length: int) -> list[int]:
    """Lengths of the documents of a row."""
    random = np.random.default_rng(0)
    if kind == "packed 64":
        return [64] * (length // 64)
    if kind == "random 1 to 400":
        drawn = random.integers(1, 401, length)
        cut = int(np.searchsorted(drawn.cumsum(), length))
        return [*drawn[:cut].tolist(), length - int(drawn[:cut].sum())]
    return [length]


def row(kind: str, length: int) -> dict[str, np.ndarray]:
    """A batch of one row."""
    ids = np.random.default_rng(1).integers(0, 4096, (1, length)).astype(np.int32)
    documents = lengths(kind, length)
    segments = np.repeat(np.arange(1, len(documents) + 1), documents)[None].astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in documents])[None].astype(np.int32)
    return {
        "input_ids": ids,
        "targets": np.roll(ids, -1, 1),
        "loss_mask": np.ones((1, length), np.float32),
        "segments": segments,
        "positions": positions,
        "source": np.ones((1, 1), np.float32),
    }


def step(kind: str, length: int) -> Callable[[], object]:
    """One training step."""
    if kind == "window 64":
        spec = from_config(new_config("qwen3", head_dim=64, **SHAPE) | WINDOWED)
    else:
        spec = from_config(new_config("llama", **SHAPE))
    stepper = make_stepper("torch", spec, init_params(spec, 0), next_token_loss)
    batch = row(kind, length)
    return lambda: stepper.step(batch, 1e-3)


def alone(kind: str, length: int) -> Callable[[], object]:
    """Forward and backward pass of the attention of one layer."""
    q, k, v = (torch.randn(1, length, 4, 64, requires_grad=True) for _ in range(3))
    segments = None if kind == "plain" else torch.from_numpy(row(kind, length)["segments"])
    window = 64 if kind == "window 64" else None
    mask = attention_mask(q, length, length, segments=segments, window=window)
    return lambda: attention(q, k, v, mask).sum().backward()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ("plain", "one document", "packed 64", "random 1 to 400", "window 64")
    for name, make, several in (("attention of a layer", alone, kinds), ("step", step, kinds[1:])):
        calls = {kind: make(kind, options.length) for kind in several}
        took: dict[str, list[float]] = {kind: [] for kind in several}
        for turn in range(options.rounds + 1):
            for kind, call in calls.items():
                since = time.process_time()
                call()
                if turn:
                    took[kind].append(time.process_time() - since)
        for kind, seconds in took.items():
            print(f"{name}, {kind}: {statistics.median(seconds):.3f} CPU s")


if __name__ == "__main__":
    main()
