"""From options to engines at full load; every gap that is filled is said in words."""

from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.request import Request
from sabia.core.plan.serving.traffic import Load, loads


class Asked:
    """Options, and what is assumed where they are left out; `assumed` tells what of it was used."""

    def __init__(self, request: Request) -> None:
        """Read `request`; nothing is computed yet."""
        self.request, self.settings, self.assumed = request, request.settings, list[str]()

    def value(self, name: str) -> Any:
        """The value of an option, or what is assumed, which is then told."""
        default = self.settings.value(name)
        if getattr(self.settings, name) is not None:
            return default
        words = f"{default:,g}" if isinstance(default, int | float) else default
        line = f"{name.replace('_', ' ')} {words}"
        if line not in self.assumed:
            self.assumed.append(line)
        return default

    @property
    def usd_per_chip_hour(self) -> float:
        """The first price of the chip. Raises UsageError where there is none."""
        prices = self.request.cluster.prices
        if not prices:
            name = self.request.cluster.chip.name
            raise UsageError(f"--price: no price of {name} to reckon with; give one, as --price 2")
        return prices[0].usd_per_chip_hour


def asked_loads(asked: Asked, memory_share: float | None = None) -> list[Load]:
    """The replicas that can serve what was asked; those of --replica-chips where it is given.

    memory_share: of a chip for generation, unless --utilisation says so.
    """
    settings, chip = asked.settings, asked.request.cluster.chip
    prompt, output = asked.value("prompt_tokens"), asked.value("output_tokens")
    common = {"weights": asked.value("weights"), "cache": asked.value("cache")}
    most = settings.replica_chips or settings.generation_chips or asked.request.cluster.chips
    found = loads(
        asked.request.architecture, chip, prompt, output, **common, most_chips=most,
        batch=settings.batch, memory_share=settings.utilisation or memory_share,
    )  # fmt: skip
    wanted = settings.replica_chips
    chosen = [load for load in found if load.replica.chips == wanted] if wanted else found
    if not chosen:
        sizes = ", ".join(str(load.replica.chips) for load in found)
        raise UsageError(f"--replica-chips: {wanted} (expected a power of two; {sizes} hold it)")
    return chosen
