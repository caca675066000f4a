"""How far judges agree: shares of equal values and κ, from sums that can be added.

Values are verdicts as 0 and 1, or points as shares of the maximum. κ is 1 - D_o / D_e, where D_o is
the mean squared difference of two judges' values on the same answers and D_e that of any two
answers: Cohen's κ (1960) for verdicts, and Cohen's κ with quadratic weights (1968) for points,
which is Lin's concordance (1989). It is undefined if both judges always give one and the same
value.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

EQUAL = 1e-9  # values that differ by less are equal
LINES = 20  # items named on stderr
ALL = "all judges"  # the name of several judges together
Numbers = Mapping[str, float | None]  # by item; None: no verdict
Named = tuple[str, bool, Numbers]  # judge, whether it is an auditor, its values


class Pairs(NamedTuple):
    """Sums over pairs of values x and y of two judges."""

    number: float = 0
    agreed: float = 0
    x: float = 0
    y: float = 0
    squares: float = 0  # Σ x² + y²
    product: float = 0

    @classmethod
    def of(cls, x: float, y: float) -> "Pairs":
        """One pair."""
        return cls(1, abs(x - y) < EQUAL, x, y, x * x + y * y, x * y)

    def plus(self, other: "Pairs") -> "Pairs":
        """The sums over the pairs of both."""
        return Pairs(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def agreement(self) -> float | None:
        """The share of equal values; None without a pair."""
        return self.agreed / self.number if self.number else None

    @property
    def kappa(self) -> float | None:
        """κ; None where it is undefined."""
        if not self.number:
            return None
        observed = self.squares - 2 * self.product
        expected = self.squares - 2 * self.x * self.y / self.number
        return 1 - observed / expected if expected > EQUAL * self.number else None


def pairs_of(
    joint: Numbers, opinions: Sequence[Named]
) -> Iterator[tuple[str, str, str, bool, Pairs]]:
    """(item, judge, other judge, whether that is an auditor, the pair) of one answer.

    The judges that decide are compared with each other; an auditor with what they decided.
    """
    judges = [one for one in opinions if not one[1]]
    name = judges[0][0] if len(judges) == 1 else ALL
    audits = [((name, False, joint), one) for one in opinions if one[1]]
    for (one, _, first), (two, audit, second) in [*combinations(judges, 2), *audits]:
        for item in first.keys() & second.keys():
            x, y = first[item], second[item]
            if x is not None and y is not None:
                yield item, one, two, audit, Pairs.of(x, y)


def audited(joint: Numbers, opinions: Sequence[Named]) -> Pairs:
    """The sums over an answer's items of what was decided and what the auditor says."""
    total = Pairs()
    for *_, audit, pair in pairs_of(joint, opinions):
        total = total.plus(pair) if audit else total
    return total


class Agreement:
    """The sums of every two judges on every item."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, str, str, bool], Pairs] = {}

    def add(self, joint: Numbers, opinions: Sequence[Named]) -> None:
        """Count the values of one answer: what was decided, and what each judge says."""
        for item, one, two, audit, pair in pairs_of(joint, opinions):
            key = (item, one, two, audit)
            self.tables[key] = self.tables.get(key, Pairs()).plus(pair)

    def rows(self) -> list[dict[str, Any]]:
        """item, judges, audit, verdicts, agreement (a share) and kappa (None: undefined).

        Rows are sorted by item; those with item None are of all items together, where there are
        several.
        """
        total: dict[tuple[str, str, bool], Pairs] = {}
        for (_, one, two, audit), pairs in self.tables.items():
            key = (one, two, audit)
            total[key] = total.get(key, Pairs()).plus(pairs)
        rows = [
            _row(item, one, two, audit, pairs)
            for (item, one, two, audit), pairs in sorted(self.tables.items())
        ]
        if len({item for item, *_ in self.tables}) > 1:
            rows += [_row(None, *key, pairs) for key, pairs in sorted(total.items())]
        return rows

    def lines(self) -> Iterator[str]:
        """The rows as lines for stderr; of many items the first ones and all together."""
        rows = self.rows()
        items = [row for row in rows if row["item"] is not None]
        for row in [*items[:LINES], *rows[len(items) :]]:
            kappa = "undefined" if row["kappa"] is None else f"{row['kappa']:.2f}"
            name = "all items" if row["item"] is None else f"item {row['item']}"
            audit = " (auditor)" if row["audit"] else ""
            yield (
                f"{name}: {' and '.join(row['judges'])}{audit} agree on "
                f"{row['agreement']:.1%} of {row['verdicts']:,} verdicts (κ {kappa})"
            )


def _row(item: str | None, one: str, two: str, audit: bool, pairs: Pairs) -> dict[str, object]:
    row = {"item": item, "judges": [one, two], "audit": audit, "verdicts": int(pairs.number)}
    return row | {"agreement": pairs.agreement, "kappa": pairs.kappa}
