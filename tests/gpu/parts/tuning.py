"""Block sizes of the Triton kernels: candidates timed on the device, the best written to a file.

Each case tries the candidates of one kernel and key (see kernels.runtime.tuned), checks that they
give the default's result, and adds the fastest to OUT/DEVICE.json, and on a GPU to kernels/tuned,
where the kernels read it, if it is at least LEAST_GAIN faster. Times are of the whole operation.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any
from unittest import mock

from cases import Case, Device, Failed, Figures, best_seconds

from sabia.kernels.quantize import definitions
from sabia.kernels.runtime import tuned
from sabia.kernels.runtime.dispatch import KERNELS

LEAST_GAIN = 1.02
ALLOWED = 2e-2  # the result of other blocks differs by the order of sums in bfloat16
Blocks = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """prepare returns the operation to time; kernel, key: names in kernels.runtime.tuned."""

    kernel: str
    key: str
    candidates: tuple[Blocks, ...]
    prepare: Callable[[], Callable[[], Any]]


def cases(device: Device) -> Iterator[Case]:
    """Kernels in the order of what a training step spends on them."""
    for problem in (*attention(device), *grouped(device), *loss(device), *norm(device),
                    *quantize(device)):  # fmt: skip
        yield Case(f"{problem.kernel} / {problem.key}", partial(tune, device, problem))


def tune(device: Device, problem: Problem) -> Figures:
    """Time the default and every candidate; write the best."""
    import torch

    run = problem.prepare()
    expected = run()
    times = {"rounds": 1, "inner": 1} if device.tiny else {"rounds": 5, "inner": 5}
    default_s = best_seconds(run, device, **times)
    best: tuple[float, Blocks | None] = default_s, None
    tried, refused = 0, 0
    for blocks in problem.candidates:
        table = {problem.kernel: {problem.key: blocks}}
        with mock.patch.object(tuned, "blocks_of", return_value=table):
            try:
                actual = run()
                seconds = best_seconds(run, device, **times)
            except Exception as error:
                # too much shared memory, or a shape that the compiler refuses
                if "CUDA error" in str(error):
                    raise
                refused += 1
                print(f"{problem.kernel} {problem.key} {blocks}: {str(error)[:200]}")
                continue
        tried += 1
        for one, other in zip(_tensors(actual), _tensors(expected), strict=True):
            gap = (one.float() - other.float()).abs().max() / other.float().abs().max()
            if not gap <= ALLOWED:
                raise Failed(f"blocks {blocks}: the result differs by {float(gap):.3g}")
        best = min(best, (seconds, blocks), key=lambda pair: pair[0])
    gain = default_s / best[0]
    if best[1] is not None and gain >= LEAST_GAIN:
        write(device, problem, best[1], gain)
    torch.cuda.empty_cache() if device.cuda else None
    return {
        "default_s": default_s,
        "blocks": list(best[1] or ()) or "default",
        "gain": gain,
        "tried": tried,
        "refused": refused,
    }


def _tensors(value: Any) -> list[Any]:
    return [value] if hasattr(value, "shape") else [x for x in value if x is not None]


def write(device: Device, problem: Problem, blocks: Blocks, gain: float) -> None:
    """Add the blocks of a kernel to the files of the device."""
    import triton

    name = tuned.file_name(device.name)
    folders = [device.out, tuned.FOLDER] if device.cuda else [device.out]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        path = folder / name
        table = json.loads(path.read_text()) if path.exists() else {"blocks": {}}
        table |= {"device": device.name, "triton": triton.__version__, "date": str(date.today())}
        rows = table["blocks"].setdefault(problem.kernel, {})
        rows[problem.key] = {"blocks": list(blocks), "gain": round(gain, 3)}
        path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def _draw(device: Device, *shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    generator = torch.Generator().manual_seed(math.prod(shape) or 1)
    kind = torch.float32 if device.tiny else getattr(torch, dtype)
    return torch.randn(shape, generator=generator).to(device.kind, kind)


def _key(device: Device, words: str = "") -> str:
    return f"{words} {'float32' if device.tiny else 'bfloat16'}".strip()


def _forward(inputs: dict[str, Any], call: Callable[..., Any]) -> Callable[[], Any]:
    import torch

    def run() -> Any:
        with torch.no_grad():
            return call(**inputs)

    return run


def _backward(inputs: dict[str, Any], call: Callable[..., Any], wrt: tuple[str, ...]) -> Any:
    import torch

    for name in wrt:
        inputs[name].requires_grad_()
    out = call(**inputs)
    outs = out if isinstance(out, tuple) else (out,)
    weights = [torch.ones_like(o) for o in outs]
    leaves = [inputs[name] for name in wrt]
    return lambda: torch.autograd.grad(outs, leaves, weights, retain_graph=True)


def attention(device: Device) -> Iterator[Problem]:
    """Packed rows of 8,192 tokens, grouped heads, by head size and direction."""
    import torch

    length = 40 if device.tiny else 8192
    shapes = ((2, 1, 16),) if device.tiny else ((32, 8, 128), (32, 8, 64), (16, 16, 192))
    pairs = itertools.product((64, 128), (32, 64, 128), (4, 8))
    forward = tuple(
        (m, n, w, s) for (m, n, w), s in zip(pairs, itertools.cycle((2, 3)), strict=False)
    )
    backward = ((64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 2), (64, 32, 4, 2), (128, 64, 8, 2),
                (64, 128, 8, 2), (32, 32, 4, 2), (64, 64, 8, 1), (128, 32, 8, 2))  # fmt: skip
    few = ((16, 16, 4, 2), (32, 16, 4, 2))
    for heads, groups, size in shapes:
        for kernel, candidates in (("forward", forward), ("backward", backward)):

            def prepare(heads=heads, groups=groups, size=size, kernel=kernel) -> Any:
                q, k, v = (_draw(device, 1, length, n, size) for n in (heads, groups, groups))
                edges = torch.arange(length, device=device.kind) * 3 // length
                mask = KERNELS["attention"].function("attention_mask")(
                    q, length, length, segments=1 + edges[None].int()
                )
                call = partial(KERNELS["attention"].function(), mask=mask, implementation="triton")
                inputs = {"q": q, "k": k, "v": v}
                if kernel == "forward":
                    return _forward(inputs, call)
                return _backward(inputs, call, ("q", "k", "v"))

            width = max(16, 1 << (size - 1).bit_length())
            tried = few if device.tiny else candidates
            yield Problem(f"attention.{kernel}", _key(device, f"{width}"), tried, prepare)


def grouped(device: Device) -> Iterator[Problem]:
    """Rows of eight experts, 2,048 × 1,536 each."""
    import torch

    rows, d, f, count = (24, 24, 40, 3) if device.tiny else (16384, 2048, 1536, 8)
    candidates = ((128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 32, 4, 4),
                  (64, 128, 64, 4, 4), (64, 256, 64, 8, 3), (128, 64, 64, 4, 4))  # fmt: skip
    for kernel, wrt in (("rows", ()), ("matrices", ("weight",))):

        def prepare(wrt=wrt) -> Any:
            counts = torch.full((count,), rows // count, dtype=torch.int32, device=device.kind)
            call = partial(
                KERNELS["grouped_matmul"].function(), counts=counts, implementation="triton"
            )
            inputs = {"x": _draw(device, rows, d), "weight": _draw(device, count, f, d)}
            return _backward(inputs, call, wrt) if wrt else _forward(inputs, call)

        tried = candidates[:1] if device.tiny else candidates
        yield Problem(f"grouped_matmul.{kernel}", _key(device), tried, prepare)


def loss(device: Device) -> Iterator[Problem]:
    """8,192 tokens of a vocabulary of 128,256."""
    import torch

    tokens, width, vocabulary = (8, 16, 293) if device.tiny else (8192, 2048, 128256)
    candidates = ((1024, 4), (2048, 8), (4096, 4), (4096, 16), (8192, 8), (8192, 16), (16384, 16))
    for kernel in ("loss", "gradient"):

        def prepare(kernel=kernel) -> Any:
            targets = torch.arange(tokens, device=device.kind) % vocabulary
            call = partial(
                KERNELS["vocabulary_loss"].function(), targets=targets, implementation="triton"
            )
            inputs = {"hidden": _draw(device, tokens, width)}
            inputs["weight"] = _draw(device, vocabulary, width) * width**-0.5
            if kernel == "loss":
                return _forward(inputs, call)
            inputs["weight"] = inputs["weight"].detach()
            return _backward(inputs, call, ("hidden", "weight"))

        tried = candidates[:1] if device.tiny else candidates
        yield Problem(f"vocabulary_loss.{kernel}", _key(device), tried, prepare)


def norm(device: Device) -> Iterator[Problem]:
    """Rows with a residual, by width and direction."""
    for width in (36,) if device.tiny else (2048, 4096):
        for kernel in ("forward", "backward"):

            def prepare(width=width, kernel=kernel) -> Any:
                rows = 8 if device.tiny else 32768
                x, residual = (_draw(device, rows, width) for _ in range(2))
                inputs = {"x": x, "residual": residual, "weight": _draw(device, width)}
                call = partial(KERNELS["rms_norm"].function(), eps=1e-5, implementation="triton")
                if kernel == "forward":
                    return _forward(inputs, call)
                return _backward(inputs, call, ("x", "weight"))

            padded = 1 << (width - 1).bit_length()
            warps = tuple((n,) for n in ((1,) if device.tiny else (1, 2, 4, 8, 16)))
            yield Problem(f"rms_norm.{kernel}", _key(device, f"{padded}"), warps, prepare)


def quantize(device: Device) -> Iterator[Problem]:
    """Activations and weights in FP8 and NVFP4."""
    for name in ("FP8_TILES",) if device.tiny else ("FP8", "FP8_TILES", "NVFP4"):
        layout = getattr(definitions, name)

        def prepare(layout=layout) -> Any:
            sizes = (32, 256) if device.tiny else (8192, 4096)
            call = partial(KERNELS["quantize"].function(), layout=layout, implementation="triton")
            return _forward({"x": _draw(device, *sizes)}, call)

        key = f"{layout.element} {layout.scale} {layout.tile or ''}".strip()
        candidates = ((16, 128, 8), (32, 128, 4), (16, 256, 4), (32, 256, 8), (64, 128, 8))
        tried = candidates[:1] if device.tiny else candidates
        yield Problem("quantize", key, tried, prepare)
