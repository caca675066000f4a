"""Every kernel of the table against its reference on the device: values and all gradients.

The reference computes in fp32 (TF32 off) from the inputs as the kernel's dtype rounds them. Names
are `operation / implementation / framework / dtype / what is special`, so a failure names kernel
and shape. Pallas kernels are for TPU and do not run here; text kernels run on the CPU.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from attention_cases import Case as AttentionCase
from attention_cases import documents
from cases import Case, Comparison, Device, Figures, Skipped

from sabia.kernels.runtime.dispatch import KERNELS, Kernel, Unavailable

Arrays = dict[str, Any]
# largest allowed |a - b| / max |b| of values and of gradients
ALLOWED = {"float32": (2e-5, 1e-4), "bfloat16": (1e-2, 2e-2), "float16": (2e-3, 4e-3)}
BY_TPU = ("pallas",)
ONE_TOKEN = "one-token and empty documents"


@dataclass(frozen=True)
class Inputs:
    """One shape of an operation. floats: differentiable arrays; call: of arrays and the name of an
    implementation to a tuple of outputs. Weights of the gradient are drawn for each output."""

    name: str
    floats: Callable[[], Arrays]
    call: Callable[[Arrays, Any, str], tuple[Any, ...]]


def cases(device: Device) -> Iterator[Case]:
    """All shapes of all kernels that have implementations for torch or JAX."""
    for kernel in KERNELS.values():
        for framework in ("torch", "jax"):
            names = kernel.implementations.get(framework, ())
            for implementation in names:
                if implementation == "reference" or implementation in BY_TPU:
                    continue
                yield from _cases(device, kernel, framework, implementation)


def _cases(device: Device, kernel: Kernel, framework: str, implementation: str) -> Iterator[Case]:
    if kernel.operation == "quantize":  # the part `codes`
        return
    # Triton's interpreter has no bfloat16 arithmetic
    dtypes = ("float32", "float16" if device.tiny and implementation == "triton" else "bfloat16")
    for inputs in SHAPES[kernel.operation](device):
        for dtype in dtypes:
            words = (kernel.operation, implementation, framework, dtype, inputs.name)
            run = partial(compare, device, inputs, framework, implementation, dtype)
            yield Case(" / ".join(words), run)


def compare(
    device: Device, inputs: Inputs, framework: str, implementation: str, dtype: str
) -> Figures:
    """The differences of an implementation from the reference."""
    evaluate = _torch if framework == "torch" else _jax
    try:
        actual = evaluate(device, inputs, implementation, dtype)
    except Unavailable as reason:
        raise Skipped(str(reason)) from None
    expected = evaluate(device, inputs, "reference", dtype, wide=True)
    comparison = Comparison()
    for name, array in expected.items():
        allowed = ALLOWED[dtype][name.startswith("d ")]
        comparison.add(name, actual[name], array, allowed)
    return comparison.check()


def _torch(
    device: Device, inputs: Inputs, implementation: str, dtype: str, wide: bool = False
) -> dict[str, Any]:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    kind = getattr(torch, dtype)
    floats, rest = {}, {}
    for name, array in inputs.floats().items():
        tensor = torch.from_numpy(np.asarray(array)).to(device.kind)
        if tensor.is_floating_point():
            tensor = tensor.to(kind)
            floats[name] = (tensor.float() if wide else tensor).requires_grad_()
        else:
            rest[name] = tensor
    outputs = inputs.call(floats | rest, torch, implementation)
    draw = np.random.default_rng(1)
    weights = [torch.from_numpy(draw.standard_normal(o.shape)).to(o.dtype).to(o.device)
               for o in outputs]  # fmt: skip
    weights = [w.to(kind).to(o.dtype) for w, o in zip(weights, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, list(floats.values()), weights)
    return _named(outputs, dict(zip(floats, grads, strict=True)))


def _jax(
    device: Device, inputs: Inputs, implementation: str, dtype: str, wide: bool = False
) -> dict[str, Any]:
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise Skipped(f"JAX: {error}") from None
    if device.cuda and jax.default_backend() != "gpu":
        raise Skipped(f"JAX runs on {jax.default_backend()} (its GPU build is not installed)")
    floats, rest = {}, {}
    for name, array in inputs.floats().items():
        given = jnp.asarray(array)
        if jnp.issubdtype(given.dtype, jnp.floating):
            given = given.astype(dtype)
            floats[name] = given.astype(jnp.float32) if wide else given
        else:
            rest[name] = given
    with jax.default_matmul_precision("float32"):
        run = lambda floats: inputs.call(floats | rest, jnp, implementation)  # noqa: E731
        outputs, pull = jax.vjp(run, floats)
        draw = np.random.default_rng(1)
        weights = tuple(
            jnp.asarray(draw.standard_normal(o.shape)).astype(dtype).astype(o.dtype)
            for o in outputs
        )
        (grads,) = pull(weights)
    as_numpy = lambda x: np.asarray(x.astype(jnp.float32))  # noqa: E731
    return _named([as_numpy(o) for o in outputs], {n: as_numpy(g) for n, g in grads.items()})


def _named(outputs: Any, grads: Mapping[str, Any]) -> dict[str, Any]:
    named = {f"output {number}": output for number, output in enumerate(outputs)}
    return named | {f"d {name}": grad for name, grad in grads.items()}


# -- attention


def attention_shapes(device: Device) -> Iterator[Inputs]:
    """Head sizes, masks, caps, sinks, slices of a context-parallel row, short documents."""
    shape: dict[str, Any] = {"B": 1, "T": 21, "S": 21, "H": 2, "K": 1, "N": 16, "M": 16}
    if device.tiny:
        blocks = {"T": 37, "S": 37, "documents": False}
        yield _attention(AttentionCase("several blocks of keys", **shape | blocks))
    else:
        shape = {"B": 2, "T": 517, "S": 517, "H": 8, "K": 2, "N": 128, "M": 128}
        for size in (64, 80, 96, 128, 192, 256):
            shapes = {"N": size, "M": size}
            yield _attention(AttentionCase(f"heads of {size}", **shape | shapes, documents=False))
            yield _attention(AttentionCase(f"heads of {size}, documents", **shape | shapes))
        yield _attention(AttentionCase("latent: 192 and 128", **shape | {"N": 192, "K": 8}))
        long = {"B": 1, "T": 4096, "S": 4096, "H": 4, "K": 4}
        yield _attention(AttentionCase("a row of 4096", **shape | long))
    window, far = (5, 9) if device.tiny else (100, 300)
    kinds: dict[str, dict[str, Any]] = {
        "documents": {},
        "everything": {"window": far, "softcap": 2.0, "sinks": True, "scale": 0.3},
    }
    if not device.tiny:
        kinds |= {
            "window": {"window": window},
            "window without documents": {"window": window, "documents": False},
            "cap": {"softcap": 3.0},
            "sinks": {"sinks": True},
            "one query head a group": {"K": 8},
            "a multiple of blocks": {"T": 512, "S": 512},
            "one token": {"T": 1, "S": 1, "documents": False},
            "slice": {"T": 200, "start": 250, "window": far, "sinks": True},
        }
    for name, fields in kinds.items():
        yield _attention(AttentionCase(name, **shape | fields))
    yield _attention(AttentionCase(ONE_TOKEN, **shape | {"B": 3}))


def _attention(case: AttentionCase) -> Inputs:
    def floats() -> Arrays:
        arrays = case.arrays()
        if case.name == ONE_TOKEN:
            # documents of one token each; a row of padding; a row that is one document
            rows = np.stack([1 + np.arange(case.S), np.zeros(case.S), np.ones(case.S)])
            arrays["segments"] = rows.astype(np.int32)
        elif case.documents:
            arrays["segments"] = documents(np.random.default_rng(2), case.B, case.S)
        return {n: a for n, a in arrays.items() if a is not None and n != "grad"}

    def call(arrays: Arrays, library: Any, implementation: str) -> tuple[Any, ...]:
        kernel = KERNELS["attention"]
        mask = kernel.function("attention_mask")(
            arrays["q"], case.T, case.S,
            segments=arrays.get("segments"), start=case.start, window=case.window,
        )  # fmt: skip
        out = kernel.function()(
            arrays["q"], arrays["k"], arrays["v"], mask, scale=case.scale, softcap=case.softcap,
            sinks=arrays.get("sinks"), implementation=implementation,
        )  # fmt: skip
        return (out,)

    return Inputs(case.name, floats, call)


# -- the other operations


def _draw(**shapes: tuple[int, ...]) -> Callable[[], Arrays]:
    def floats() -> Arrays:
        draw = np.random.default_rng(3)
        return {n: draw.standard_normal(s).astype(np.float32) for n, s in shapes.items()}

    return floats


def grouped_shapes(device: Device) -> Iterator[Inputs]:
    """Groups that are even, empty, of one row; rows left over; odd widths."""
    counts = {"even": [8, 8, 8], "empty groups and rows left over": [0, 5, 0, 1, 11, 0]}
    sizes = [(24, 40)] if device.tiny else [(512, 1024), (264, 200), (130, 70)]
    if not device.tiny:
        counts = {
            "even": [256] * 8,
            "empty groups and rows left over": [0, 129, 0, 1, 700, 0, 3, 300],
            "one group": [0, 0, 1000, 0],
            "many groups of few rows": list(np.random.default_rng(0).integers(0, 9, 128)),
            "no rows in any group": [0] * 8,
        }
    for d, f in sizes:
        for name, groups in counts.items():
            rows = sum(groups) + (5 if "left over" in name or not sum(groups) else 0)
            yield _grouped(f"{name}, {d} × {f}", [int(n) for n in groups], rows, d, f)


def _grouped(name: str, groups: list[int], rows: int, d: int, f: int) -> Inputs:
    def floats() -> Arrays:
        arrays = _draw(x=(rows, d), weight=(len(groups), f, d))()
        return arrays | {"counts": np.array(groups, np.int32)}

    def call(arrays: Arrays, library: Any, implementation: str) -> tuple[Any, ...]:
        run = KERNELS["grouped_matmul"].function()
        given = (arrays["x"], arrays["weight"], arrays["counts"])
        return (run(*given, implementation=implementation),)

    return Inputs(name, floats, call)


def norm_shapes(device: Device) -> Iterator[Inputs]:
    """Widths, with and without a residual, factors w and 1 + w."""
    widths = (36,) if device.tiny else (36, 128, 1000, 2048, 7168, 16384)
    for width in widths:
        for add, plus_one in ((False, False), (True, False), (False, True), (True, True)):
            words = f"{width} wide{', residual' * add}{', 1 + w' * plus_one}"
            rows = 7 if device.tiny else 515
            yield _norm(words, (2, rows, width), add, plus_one)
    yield _norm("no rows", (0, widths[0]), False, False)


def _norm(name: str, shape: tuple[int, ...], add: bool, plus_one: bool) -> Inputs:
    def call(arrays: Arrays, library: Any, implementation: str) -> tuple[Any, ...]:
        found = KERNELS["rms_norm"].function()(
            arrays["x"], arrays["weight"], 1e-5, residual=arrays.get("residual"),
            plus_one=plus_one, implementation=implementation,
        )  # fmt: skip
        return found if add else (found,)

    more = {"residual": shape} if add else {}
    return Inputs(name, _draw(x=shape, weight=shape[-1:], **more), call)


def loss_shapes(device: Device) -> Iterator[Inputs]:
    """Vocabularies, a cap, ignored targets, chunks of tokens, no tokens."""
    sizes = [(13, 20, 293)]
    if not device.tiny:
        sizes = [(513, 256, 293), (1025, 512, 32001), (257, 1024, 128256)]
    for tokens, width, vocabulary in sizes:
        for cap in (None, 5.0):
            words = f"{tokens} tokens of {vocabulary}{', cap' if cap else ''}"
            yield _loss(words, tokens, width, vocabulary, cap)
    yield _loss("no tokens", 0, 16, 50, None)


def _loss(name: str, tokens: int, width: int, vocabulary: int, cap: float | None) -> Inputs:
    def floats() -> Arrays:
        arrays = _draw(hidden=(tokens, width), weight=(vocabulary, width))()
        arrays["weight"] *= width**-0.5
        targets = np.random.default_rng(4).integers(0, vocabulary, tokens)
        targets[::7] = -1
        targets[1::50] = vocabulary - 1
        return arrays | {"targets": targets}

    def call(arrays: Arrays, library: Any, implementation: str) -> tuple[Any, ...]:
        return KERNELS["vocabulary_loss"].function()(
            arrays["hidden"], arrays["weight"], arrays["targets"], softcap=cap,
            chunk_bytes=max(8 * vocabulary * 4, 4 << 20), implementation=implementation,
        )  # fmt: skip

    return Inputs(name, floats, call)


SHAPES: Mapping[str, Callable[[Device], Iterator[Inputs]]] = {
    "attention": attention_shapes,
    "grouped_matmul": grouped_shapes,
    "rms_norm": norm_shapes,
    "vocabulary_loss": loss_shapes,
}
