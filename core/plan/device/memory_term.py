"""One term of a device's memory: its name, its bytes and, for one layout, its formula in words."""

from collections.abc import Callable
from dataclasses import dataclass

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

    @classmethod
    def none(cls, name: str) -> "Term":
        """A term that is absent."""
        return cls(name, 0)


def billions(count: float) -> str:
    """8030261248 as 8.030B; small counts as 12.6M or 4096."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:.6g}"


def ways(*splits: tuple[str, Number]) -> str:
    """' / (tensor 8 x pipe 4)' of the splits that divide; empty where none does."""
    cut = [f"{name} {size:g}" for name, size in splits if size > 1]
    return f" / ({' x '.join(cut)})" if len(cut) > 1 else f" / {cut[0]}" if cut else ""
