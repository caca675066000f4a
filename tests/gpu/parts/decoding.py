"""Speed of generation: prefill and decoding of the 1B shape in BF16 at 1, 8, 64 and 512 rows.

A step of decoding has to read the weights of all products and the keys and values of all rows; the
time of these bytes at the measured rate of a copy is the bound that `bandwidth_share` refers to.
"""

import functools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from cases import Case, Device, Failed, Figures, best_seconds
from trainers import median, peak, reset_peak, synchronize
from workloads import RandomParameters, shape_spec

ROWS = (1, 8, 64, 512)
TINY_ROWS = (1, 8)
PROMPT, NEW = 512, 64
TINY_PROMPT, TINY_NEW = 16, 6
CACHE_BYTES = 40 << 30
SLOWEST_SHARE = 0.1  # steps at the begin, which choose algorithms, are not counted


def cases(device: Device) -> Iterator[Case]:
    """A case for each number of rows."""
    for rows in TINY_ROWS if device.tiny else ROWS:
        yield Case(f"1B / bf16 / {rows} rows", lambda rows=rows: generation(rows, device))


@functools.cache
def engine(device: Device) -> Any:
    """An engine that records the seconds of its steps."""
    import torch

    from sabia.core.generate.engine import Engine
    from sabia.core.generate.session import Session

    class TimedEngine(Engine):
        """seconds: of each prefill and of each step of decoding, with its rows and positions."""

        seconds: dict[str, list[tuple[float, int, int]]]

        def session(self, *sizes: int) -> Session:
            plain = super().session(*sizes)
            return TimedSession(self, plain.runner, sizes[0], sizes[2], plain.pages)

    class TimedSession(Session):
        """Records its steps in the engine."""

        def _prefill(self, group: Any, begun: Any) -> None:
            tokens = sum(len(waiting.request.prompt) for waiting in group)
            self._timed("prefill", tokens, 0, super()._prefill, group, begun)

        def _decode(self) -> None:
            longest = int(self.slots.inputs()[1].max()) + 1
            self._timed("decode", self.slots.active, longest, super()._decode)

        def _timed(self, kind: str, size: int, context: int, call: Any, *args: Any) -> None:
            synchronize(device)
            start = time.perf_counter()
            call(*args)
            synchronize(device)
            self.model.seconds[kind].append((time.perf_counter() - start, size, context))

    spec = shape_spec("1B", device)
    source = RandomParameters(spec, device)
    params = {name: source.tensor(name).to(torch.bfloat16) for name in source}
    tokenizer = SimpleNamespace(stop_ids=(), decode=lambda ids: "")
    made = TimedEngine(spec, params, tokenizer, "bfloat16", cache_bytes=CACHE_BYTES)
    made.seconds = {"prefill": [], "decode": []}
    return made


@functools.cache
def copy_bytes_per_s(device: Device) -> float:
    """Bytes read and written a second by a copy."""
    import torch

    source = torch.zeros((1 << 20) if device.tiny else (2 << 30), dtype=torch.uint8,
                         device=device.kind)  # fmt: skip
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device)


def generation(rows: int, device: Device) -> Figures:
    """Generate twice, the second time measured. Raises Failed where tokens differ or are few."""
    rate = copy_bytes_per_s(device)
    made = engine(device)
    prompt, new = (TINY_PROMPT, TINY_NEW) if device.tiny else (PROMPT, NEW)
    requests = _requests(made.spec.vocab_size, rows, prompt, new)
    first = made.generate(requests)
    made.seconds = {"prefill": [], "decode": []}
    reset_peak(device)
    start = time.perf_counter()
    second = made.generate(requests)
    total = time.perf_counter() - start
    figures: Figures = {"tokens_per_s": 0.0} | peak(device)
    figures |= _prefill(made.seconds["prefill"])
    figures |= _decode(made, rate)
    figures["whole_tokens_per_s"] = rows * new / total
    lengths = {len(completion.tokens) for completion in second}
    if lengths != {new}:
        raise Failed(f"samples have {sorted(lengths)} tokens (expected {new})", figures)
    pairs = zip(first, second, strict=True)
    same = sum(a.tokens == b.tokens for a, b in pairs)
    if same < rows:
        raise Failed(f"{rows - same} of {rows} samples differ in a repetition", figures)
    return figures


def _requests(vocab: int, rows: int, prompt: int, new: int) -> list[Any]:
    from sabia.core.generate.requests import Request

    ids = np.random.default_rng(0).integers(0, vocab, (rows, prompt)).tolist()
    return [Request(row, new, id=f"row {number}") for number, row in enumerate(ids)]


def _prefill(steps: list[tuple[float, int, int]]) -> Figures:
    seconds, tokens = sum(s[0] for s in steps), sum(s[1] for s in steps)
    return {"prefill_tokens_per_s": tokens / seconds, "prefill_s": seconds,
            "prefills": len(steps)}  # fmt: skip


def _decode(made: Any, rate: float) -> Figures:
    """Tokens a second of the median step, and its share of the bound by the bytes it reads."""
    steps = made.seconds["decode"]
    steps = steps[int(len(steps) * SLOWEST_SHARE) :]
    step_s = median([step[0] for step in steps])
    rows = steps[0][1]
    context = sum(step[2] for step in steps) / len(steps)
    weights, cache = _bytes_read(made, rows, context)
    bound = (weights + cache) / rate
    return {"tokens_per_s": rows / step_s, "step_s": step_s, "bandwidth_share": bound / step_s,
            "weight_bytes": weights, "cache_bytes": cache, "copy_gb_per_s": rate / 1e9}  # fmt: skip


def _bytes_read(made: Any, rows: int, context: float) -> tuple[float, float]:
    """Bytes of the weights of all products, and of the keys and values of all rows."""
    from sabia.core.spec import matmul_parameter_count

    size = made.params["embed"].element_size()
    shapes = [layer.mixer.cache_shapes().values() for layer in made.spec.layers]
    width = sum(heads * dims for layer in shapes for heads, dims in layer)
    return matmul_parameter_count(made.spec) * size, rows * context * width * size
