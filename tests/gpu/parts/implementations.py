"""The implementations of each operation side by side: which one should be the default?

Milliseconds of a forward pass, and of forward and backward pass, by implementation, and the seconds
of the first call, which compiles. The default of the operation is named.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cases import Case, Device, Figures, best_seconds
from trainers import synchronize

from sabia.kernels.runtime.dispatch import KERNELS, Unavailable

LENGTH, TINY_LENGTH = 8192, 40
Inputs = Mapping[str, Any]  # tensors; those that require gradients are differentiated


def cases(device: Device) -> Iterator[Case]:
    """A case for each operation and shape."""
    for heads, groups, size, documents, window in (
        (32, 8, 64, 1, None), (32, 8, 64, 8, None), (32, 8, 128, 1, None), (32, 8, 128, 8, None),
        (32, 8, 128, 1, 1024), (8, 4, 256, 1, 1024),
    ):  # fmt: skip
        words = f"{heads} heads of {size}, {documents} documents, window {window}"
        given = (heads, groups, size, documents, window)
        yield Case(f"attention / {words}", lambda given=given: attention(device, *given))
    yield Case("rms_norm / 2048 wide", lambda: norm(device, 2048))
    yield Case("grouped_matmul / 8 experts", lambda: grouped(device))
    for megabytes in (256, 1024, 4096):
        name = f"vocabulary_loss / chunks of {megabytes} MiB"
        yield Case(name, lambda megabytes=megabytes: loss(device, megabytes))


def compared(
    device: Device, operation: str, inputs: Inputs, call: Callable[[str], Any], default: str
) -> Figures:
    """Times of all implementations but the reference."""
    import torch

    figures: Figures = {"default": default}
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]

    def both(name: str) -> Any:
        out = call(name)
        out = out[0] if isinstance(out, tuple) else out
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    for name in KERNELS[operation].implementations["torch"]:
        if name == "reference" or (name == "eager" and operation == "grouped_matmul"):
            continue  # what stores all scores, or waits for the device
        start = time.perf_counter()
        try:
            both(name)
        except Unavailable:
            continue
        synchronize(device)
        figures[f"{name}_first_s"] = time.perf_counter() - start
        with torch.no_grad():
            figures[f"{name}_forward_ms"] = 1e3 * _seconds(device, lambda name=name: call(name))
        figures[f"{name}_both_ms"] = 1e3 * _seconds(device, lambda name=name: both(name))
    return figures


def _seconds(device: Device, call: Callable[[], Any]) -> float:
    sizes = {"rounds": 1, "inner": 1} if device.tiny else {"rounds": 5, "inner": 4}
    return best_seconds(call, device, **sizes)


def _draw(device: Device, *shape: int, scale: float = 1.0) -> Any:
    import torch

    generator = torch.Generator(device.kind).manual_seed(0)
    made = torch.randn(shape, generator=generator, device=device.kind) * scale
    return made.to(torch.float32 if device.tiny else torch.bfloat16).requires_grad_()


def attention(
    device: Device, heads: int, groups: int, size: int, documents: int, window: int | None
) -> Figures:
    """One row of packed documents, or one document with a window."""
    import torch

    length = TINY_LENGTH if device.tiny else LENGTH
    if device.tiny:
        heads, groups, size = 2, 1, 16
    shapes = {"q": heads, "k": groups, "v": groups}
    inputs = {name: _draw(device, 1, length, n, size) for name, n in shapes.items()}
    kernel, segments = KERNELS["attention"], None
    if documents > 1:
        numbers = torch.arange(length, device=device.kind) * documents // length
        segments = 1 + numbers[None].int()
    mask = kernel.function("attention_mask")(
        inputs["q"], length, length, segments=segments, window=window
    )
    call = lambda name: kernel.function()(**inputs, mask=mask, implementation=name)  # noqa: E731
    chosen = kernel.module("interface").choose_attention(*inputs.values(), mask)
    return compared(device, "attention", inputs, call, chosen.implementation)


def norm(device: Device, width: int) -> Figures:
    """Rows without a residual, as layers use it."""
    rows, width = (8, 36) if device.tiny else (4 * LENGTH, width)
    inputs = {"x": _draw(device, rows, width), "weight": _draw(device, width)}
    kernel = KERNELS["rms_norm"]
    call = lambda name: kernel.function()(**inputs, eps=1e-5, implementation=name)  # noqa: E731
    chosen = kernel.module("interface").choose_rms_norm(inputs["x"], inputs["weight"])
    return compared(device, "rms_norm", inputs, call, chosen.implementation)


def grouped(device: Device) -> Figures:
    """Rows of eight experts of unequal shares."""
    import torch

    rows, d, f = (24, 24, 40) if device.tiny else (4 * LENGTH, 2048, 1536)
    shares = torch.arange(1, 9)
    counts = shares * rows // int(shares.sum())
    counts[-1] += rows - int(counts.sum())
    counts = counts.int().to(device.kind)
    inputs = {"x": _draw(device, rows, d), "weight": _draw(device, 8, f, d)}
    kernel = KERNELS["grouped_matmul"]
    call = lambda name: kernel.function()(  # noqa: E731
        **inputs, counts=counts, full=True, implementation=name
    )
    chosen = kernel.module("interface").choose_grouped_matmul(*inputs.values())
    return compared(device, "grouped_matmul", inputs, call, chosen.implementation)


def loss(device: Device, megabytes: int) -> Figures:
    """16,384 tokens of a vocabulary of 128,256."""
    import torch

    tokens, width, vocabulary = (8, 16, 293) if device.tiny else (2 * LENGTH, 2048, 128256)
    inputs = {"hidden": _draw(device, tokens, width)}
    inputs["weight"] = _draw(device, vocabulary, width, scale=width**-0.5)
    targets = torch.arange(tokens, device=device.kind) % vocabulary
    kernel = KERNELS["vocabulary_loss"]
    call = lambda name: kernel.function()(  # noqa: E731
        **inputs, targets=targets, chunk_bytes=megabytes << 20, implementation=name
    )
    chosen = kernel.module("interface").choose_linear_cross_entropy(inputs["hidden"])
    return compared(device, "vocabulary_loss", inputs, call, chosen.implementation)
