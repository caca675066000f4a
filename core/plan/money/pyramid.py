"""The budget of a generation of models: many small runs, some middle ones, one large.

An item is so many runs of so many chip-hours each, paid at its own price, and of so many dollars
each that are not paid by the chip (API tokens, storage). Shares are of the money; a contingency is
a share on top of the sum of all items. How items are read from a file: pyramid_file.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sabia.core.plan.money.bills import HOUR_S, cost_usd
from sabia.core.plan.money.prices import Price

KINDS = ("training", "evaluation", "judge", "rollout", "storage", "other")


@dataclass(frozen=True)
class Item:
    """`runs` runs, the mean where the file gave a range, of chip-hours and dollars each.

    `price`: of a chip-hour, None where no chips are paid for. `provider`: who is paid.
    """

    name: str
    group: str
    kind: str
    runs: float
    runs_text: str
    chip_hours_each: float
    usd_each: float
    chip: str
    price: Price | None
    provider: str

    @property
    def chip_hours(self) -> float:
        """All runs of the item."""
        return self.runs * self.chip_hours_each

    @property
    def cost_usd(self) -> float:
        """All runs of the item: chips, and what is paid otherwise."""
        rate = self.price.usd_per_chip_hour if self.price else 0.0
        return cost_usd(self.chip_hours * HOUR_S, rate) + self.runs * self.usd_each


@dataclass(frozen=True)
class Total:
    """Chip-hours and dollars of some items."""

    chip_hours: float
    cost_usd: float


@dataclass(frozen=True)
class Pyramid:
    """All items, and what is put by on top of them."""

    items: tuple[Item, ...]
    contingency: float = 0.0

    @property
    def chip_hours(self) -> float:
        """All items."""
        return sum(item.chip_hours for item in self.items)

    @property
    def cost_usd(self) -> float:
        """All items, without what is put by."""
        return sum(item.cost_usd for item in self.items)

    @property
    def contingency_usd(self) -> float:
        """What is put by."""
        return self.contingency * self.cost_usd

    @property
    def prices(self) -> tuple[Price, ...]:
        """Every price of a chip-hour that is paid, once."""
        return tuple(dict.fromkeys(item.price for item in self.items if item.price))

    def share(self, usd: float) -> float:
        """Part of the money of all items."""
        return usd / self.cost_usd if self.cost_usd else 0.0

    def groups(self) -> dict[str, Total]:
        """Each group of more than one item."""
        names = [item.group for item in self.items]
        sums = self._sums(lambda item: item.group)
        return {name: total for name, total in sums.items() if name and names.count(name) > 1}

    def kinds(self) -> dict[str, Total]:
        """What is paid for: training, evaluation, judge …"""
        return self._sums(lambda item: item.kind)

    def providers(self) -> dict[str, Total]:
        """Who is paid."""
        return self._sums(lambda item: item.provider)

    def _sums(self, key: Callable[[Item], str]) -> dict[str, Total]:
        totals: dict[str, Total] = {}
        for item in self.items:
            before = totals.get(key(item), Total(0.0, 0.0))
            totals[key(item)] = Total(
                before.chip_hours + item.chip_hours, before.cost_usd + item.cost_usd
            )
        return totals
