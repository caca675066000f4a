"""What the terms of a device's memory have in common: the case they price, name, bytes, formula."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.memory_stage import Stage
from sabia.core.plan.device.setting import Setting
from sabia.core.plan.elementwise import Number


@dataclass(frozen=True)
class Term:
    """`bytes` on one device; an array in a search. formula: makes the text of `how` on demand."""

    name: str
    bytes: Number
    formula: Callable[[], str] = lambda: ""

    @property
    def how(self) -> str:
        """The formula with its numbers, for `--explain`."""
        return self.formula()


@dataclass(frozen=True)
class LayerFigures:
    """Of one layer on one device, before zero splits anything.

    kept: bytes a token that the policy keeps of each kind; extra: of all layers beside the model's;
    again: most bytes a token that come back in one layer's backward pass; elements: of the largest
    layer.
    """

    kept: Mapping[LayerKind, Number]
    extra: Number
    again: Number
    elements: Number


@dataclass(frozen=True)
class Case(Setting):
    """One device of one stage: all that a term depends on."""

    stage: Stage
    layers: LayerFigures


def billions(count: float) -> str:
    """8030261248 as 8.03B; small counts as 12.6M or 4096."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:.6g}"


def ways(*splits: tuple[str, Number]) -> str:
    """' / (tensor 8 x pipe 4)' of the splits that divide; empty where none does."""
    cut = [f"{name} {size:g}" for name, size in splits if size > 1]
    return f" / ({' x '.join(cut)})" if len(cut) > 1 else f" / {cut[0]}" if cut else ""
