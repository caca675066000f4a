"""Models of every family on the device against the CPU in fp32: losses, gradients, training.

Weights of three moments of a run on the CPU are loaded on the device, so differences do not add up.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np
import small_models
from cases import Case, Comparison, Device, Failed, Figures, Skipped
from cpu_process import References

# precision → allowed difference of a loss, relative; and of all gradients together, by 2-norms.
# fp32: other orders of sums. bf16: 8 bits of each activation.
# The low precisions are compared with the same rounding on the CPU: a value on the border between
# two codes may be rounded to the other one. Changes of 2⁻⁹ of the norms' weights, of the size of
# BF16 rounding, changed losses by up to 8e-4 on a CPU.
LOSS = {"fp32": 1e-5, "bf16": 5e-3, "fp8": 5e-3, "fp8-block": 5e-3, "nvfp4": 1e-2}
# of few documents (a classifier), or where routers may choose other experts
LOSS_OF_FEW = LOSS | {"bf16": 2e-2, "fp8": 2e-2, "fp8-block": 2e-2, "nvfp4": 2e-2}
GRADIENT = 1e-4  # of each tensor, in fp32
# of all tensors together in other precisions, after some steps: rounding changes up to 0.11 of them
# (measured on a CPU; at the first step up to 0.57), a wrong scale or a missing product nearly all
GRADIENTS = 0.3
COMPILED = ("llama", "mixtral")


def cases(device: Device) -> Iterator[Case]:
    """Per family: fp32, bf16, the curves; of some also low precisions and torch.compile."""
    steps = 4 if device.tiny else 20
    work = _Models(device, steps)
    try:
        for name in small_models.FAMILIES:
            low = small_models.LOW_PRECISIONS if name in small_models.LOW_PRECISION_MODELS else ()
            for precision in ("fp32", "bf16", *low):
                yield work.case(name, precision)
            yield Case(f"{name} / curves", lambda name=name: work.curves(name))
        for name in COMPILED:  # last, because it takes longest
            for precision in ("fp32", "bf16"):
                yield work.case(name, precision, compiled=True)
    finally:
        work.references.close()


class _Models:
    """The comparisons, and the arrays of the family that is compared now."""

    def __init__(self, device: Device, steps: int) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self.device, self.tiny, self.steps = device, device.tiny, steps
        given = (device.scratch, small_models.FAMILIES, int(self.tiny), steps)
        self.references = References(small_models.__file__, *given)
        self._loaded: tuple[str, Mapping[str, np.ndarray]] = "", {}

    def case(self, name: str, precision: str, compiled: bool = False) -> Case:
        """The comparison of one family in one precision."""
        title = f"{name} / {precision}" + " / compiled" * compiled
        return Case(title, lambda: self.compare(name, precision, compiled))

    def arrays(self, name: str) -> Mapping[str, np.ndarray]:
        """What the CPU computed for a family."""
        if self._loaded[0] != name:
            self._loaded = name, self.references.get(name)
        return self._loaded[1]

    def compare(self, name: str, precision: str, compiled: bool) -> Figures:
        """Loss and gradients from equal weights at three steps."""
        if compiled and self.tiny:
            raise Skipped("without a GPU: compiling takes minutes")
        arrays = self.arrays(name)
        stepper, spec = small_models.stepper_of(name, self.tiny, precision, compiled)
        losses, gradients = Comparison(), Comparison()
        allowed = (LOSS_OF_FEW if name in (*small_models.MOE, "modernbert") else LOSS)[precision]
        for point in small_models.points(self.steps):
            small_models.load_params(stepper, below(arrays, f"{point}/param/"))
            data = small_models.batch(spec, point, self.tiny)
            head = f"{point}/{'fp32' if precision == 'bf16' else precision}"
            found, expected = stepper.gradients(data), below(arrays, f"{head}/gradient/")
            loss = stepper.evaluate(data).loss
            losses.add(f"loss after {point} steps", loss, arrays[f"{head}/loss"], allowed)
            if set(found) != set(expected):
                raise Failed(f"gradients of {sorted(set(found) ^ set(expected))} on one side only")
            pairs = {tensor: (found[tensor], expected[tensor]) for tensor in found}
            bound = GRADIENT
            if precision != "fp32":
                pairs = {"all tensors": (flat(found), flat(expected))}
                bound = GRADIENTS if point and not self.tiny else math.inf
            for tensor, pair in pairs.items():
                gradients.add_norm(f"gradient of {tensor} after {point} steps", *pair, bound)
        worst = gradients.figures()
        more = {"gradient_difference": worst["difference"], "gradient_of": worst["of"]}
        Comparison(losses.rows + gradients.rows).check(losses.figures() | more)
        return losses.figures() | more

    def curves(self, name: str) -> Figures:
        """The losses of a training run from the same start, on the CPU and here."""
        curves = {"cpu_fp32": [float(x) for x in self.arrays(name)["curve"]]}
        for precision in ("fp32", "bf16"):
            stepper, spec = small_models.stepper_of(name, self.tiny, precision)
            curves[precision] = list(small_models.curve(stepper, spec, self.steps, self.tiny))
        figures: Figures = {key: [round(x, 4) for x in losses] for key, losses in curves.items()}
        for precision in ("fp32", "bf16"):
            pairs = zip(curves[precision], curves["cpu_fp32"], strict=True)
            figures[f"{precision}_difference"] = max(abs(a / b - 1) for a, b in pairs)
        for key, losses in curves.items():
            falls = losses[-1] < losses[0] or self.tiny  # of a few tokens nothing is learnt
            if not (falls and all(map(math.isfinite, losses))):
                raise Failed(f"the loss does not fall: {key}", figures)
        return figures


def below(arrays: Mapping[str, np.ndarray], head: str) -> dict[str, np.ndarray]:
    """Arrays whose names begin with `head`, by the rest of the name."""
    return {key[len(head) :]: value for key, value in arrays.items() if key.startswith(head)}


def flat(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """All arrays as one vector, in the order of their names."""
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])
