"""GPTQ of a layer of the 1B and of the 8B shape: time, memory, and error beside round-to-nearest.

A case `layer` quantizes a model of one layer by the recipe w4 (attention and MLP in 4 bits), with
all that `quantize` does: calibration passes, Hessians, rounding, the layer's new outputs. A case
`matrix` times the parts for one matrix, whose inputs are correlated and of unequal size.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from cases import Case, Device, Failed, Figures
from trainers import peak, reset_peak, synchronize
from workloads import RandomParameters, shape_spec

CALIBRATION = (16, 2048)  # rows and tokens of a row; users take 128 rows
TINY_CALIBRATION = (4, 32)
VOCABULARY = 1024  # embedding and head are not what is measured
MATRICES = (("1B", "up"), ("1B", "down"), ("8B", "up"), ("8B", "down"))


def cases(device: Device) -> Iterator[Case]:
    """Whole layers first."""
    for shape in ("1B", "8B"):
        yield Case(f"{shape} / layer", lambda shape=shape: layer(shape, device))
    for shape, name in MATRICES:
        yield Case(f"{shape} / matrix {name}",
                   lambda shape=shape, name=name: matrix(shape, name, device))  # fmt: skip


def layer(shape: str, device: Device) -> Figures:
    """Seconds and peak of one layer, and the output error of each of its matrices.

    Raises Failed where GPTQ is no better than rounding to nearest.
    """
    from sabia.core.parallel.build_ops import load_ops
    from sabia.core.quant.hessians import batches
    from sabia.core.quant.quantize import quantize
    from sabia.core.quant.recipe import BUILT_IN, Recipe

    spec = shape_spec(shape, device, 1, vocab_size=VOCABULARY, num_hidden_layers=1)
    rows, length = TINY_CALIBRATION if device.tiny else CALIBRATION
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (rows, length)).tolist()
    recipe = Recipe("w4", BUILT_IN["w4"] | {"head": "bf16"})
    parameters = RandomParameters(spec, device)
    reset_peak(device)
    synchronize(device)
    start = time.perf_counter()
    result = quantize(spec, parameters, recipe, load_ops("torch"), batches(ids))
    synchronize(device)
    figures: Figures = {"seconds_per_layer": time.perf_counter() - start, **peak(device),
                        "tokens": rows * length, "matrices": len(result.rows)}  # fmt: skip
    errors = {row["module"]: (row["output_error"], row["output_error_rtn"]) for row in result.rows}
    return _judged(errors, figures)


def _judged(errors: dict[str, tuple[float, float]], figures: Figures) -> Figures:
    """The figures with the errors of all matrices and the largest ratio of GPTQ's to nearest's."""
    figures["errors"] = {name: [round(e, 5) for e in pair] for name, pair in errors.items()}
    figures["error_ratio"] = max(ours / nearest for ours, nearest in errors.values())
    worse = [name for name, (ours, nearest) in errors.items() if not ours < nearest]
    if worse:
        raise Failed(f"no smaller error than round-to-nearest: {', '.join(worse)}", figures)
    return figures


def matrix(shape: str, name: str, device: Device) -> Figures:
    """Seconds of the Hessian, of GPTQ and within it of the scales, for one matrix."""
    import torch

    from sabia.core.numerics.scales import choose_scales, decode, encode
    from sabia.core.numerics.schemes import SCHEMES
    from sabia.core.quant.gptq import GptqConfig, gptq, output_norm

    spec = shape_spec(shape, device, 1)
    source = RandomParameters(spec, device)
    chosen = next(n for n in source if n.endswith(f"mlp.{name}") and source[n].ndim == 2)
    weight = source[chosen]
    scheme = SCHEMES["w4a16"].with_group(128 if weight.shape[1] % 128 == 0 else 32)
    config = GptqConfig(scheme)
    reset_peak(device)
    clock = _Clock(device)
    with torch.inference_mode():
        hessian = _hessian(weight.shape[1], device, clock)
        codes, scales = gptq(weight, hessian, config, name)
        clock.mark("gptq_s")
        nearest_scales = choose_scales(weight, scheme, config.scale)
        clock.mark("scales_s")
        nearest = encode(weight, nearest_scales, scheme)
        clock.mark("nearest_s")
        pairs = ((codes, scales), (nearest, nearest_scales))
        decoded, size = (decode(*pair, scheme) for pair in pairs), output_norm(weight, hessian)
        errors = [output_norm(one - weight, hessian) / size for one in decoded]
        clock.mark("errors_s")
    figures: Figures = {"shape": list(weight.shape), **clock.seconds, **peak(device)}
    return _judged({name: (errors[0], errors[1])}, figures)


class _Clock:
    """Seconds between marks, once the device has done its work."""

    def __init__(self, device: Device) -> None:
        self.device, self.seconds, self.since = device, Figures(), 0.0
        synchronize(device)
        self.since = time.perf_counter()

    def mark(self, name: str) -> None:
        """End the part `name`, and begin the next."""
        synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] = now - self.since
        self.since = now


def _hessian(width: int, device: Device, clock: _Clock) -> Any:
    """H[width, width] of random inputs: sums of few directions, with channels of unequal size."""
    import torch

    from sabia.core.quant.hessians import Hessians

    rows, length = TINY_CALIBRATION if device.tiny else CALIBRATION
    generator = torch.Generator(device.kind)
    generator.manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=device.kind)

    directions = normal(width // 4, width)
    channels = normal(width).exp()
    inputs = []
    for _ in range(rows // 4):
        mixed = normal(4, length, width // 4) @ directions / (width // 4) ** 0.5
        inputs.append((mixed + 0.3 * normal(4, length, width)) * channels)
    clock.mark("inputs_s")
    hessians = Hessians()
    for x in inputs:
        hessians.begin(torch.ones(4, length, dtype=torch.bool))
        hessians.add(x, ["x"])
    hessian = hessians.of("x")
    clock.mark("hessian_s")
    return hessian
