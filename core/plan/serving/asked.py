"""From settings to engines at full load; every gap that is filled is said in words."""

from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.request import Request
from sabia.core.plan.serving.traffic import Load, loads

DEFAULTS: dict[str, Any] = {
    "weights": "bf16", "cache": "bf16", "prompt_tokens": 1000.0, "output_tokens": 1000.0,
    "prompts": 64, "group": 16, "steps": 1000, "items": 10_000.0, "repeats": 1,
    "judge_calls": 0.0, "judge_prompt_tokens": 3000.0, "judge_output_tokens": 200.0,
}  # fmt: skip


class Asked:
    """Settings with their defaults; `assumed` collects those that were used."""

    def __init__(self, request: Request) -> None:
        """Read `request`; nothing is computed yet."""
        self.request, self.settings, self.assumed = request, request.settings, list[str]()

    def value(self, name: str) -> Any:
        """A setting, or its default, which is then told."""
        said = getattr(self.settings, name)
        if said is not None:
            return said
        default = DEFAULTS[name]
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
