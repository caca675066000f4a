"""What model to train on these chips in this time (--chips and --deadline without a size)."""

from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import planner
from sabia.core.plan.compute import FLOPS_PER_PARAM_TOKEN
from sabia.core.plan.money.fitted import FittedLaw, fitted_law
from sabia.core.plan.money.prices import DAY_S, cost_usd
from sabia.core.plan.money.scaling import BESIROGLU, RATIOS, Budget, Pair
from sabia.core.plan.output.costs import interval_text, law_line
from sabia.core.plan.output.report import SCHEMA_VERSION, fields
from sabia.core.plan.output.table import Cell, span, table_of, words
from sabia.core.plan.request import build
from sabia.core.units import format_count

GUESSED = 1e9  # parameters of the run of which only cluster, prices and deadlines are used
ROUNDS = 3  # size and checkpoints depend on each other
NOT_HERE = (
    "active", "layers", "hidden", "lora", "lora_rank", "compare", "max_cost", "carbon", "offers",
    "serve_tokens", "convention", "search", "fixed_layout", "reserved", "production", "first_mfu",
    "carbon_intensity", "pue", "simulate", "base_format", "plot",
)  # fmt: skip


CELLS: dict[str, Cell] = {
    "DEADLINE": "{deadline_s:span}",
    "FLOP": "{train_flops:power}",
    "PARAMS": "{params:count1}",
    "TOKENS": "{tokens:count1}",
    "EACH": "{tokens_per_param:,.0f}",
    "LOSS": "{loss:.3f}",
    "COST": "{cost_usd:money}",
    "EPOCHS": "{epochs:.1f}",
    "STATE": "{state_bytes:bytes}",
    "": lambda row: "" if row["fits"] else "does not fit",
}
SUMS = ("DEADLINE", "FLOP", "PARAMS", "TOKENS", "EACH", "LOSS", "COST")
CURVE = ("EACH", "PARAMS", "TOKENS", "EPOCHS", "LOSS", "STATE", "")


@dataclass(frozen=True)
class Sized:
    """The best model of one deadline."""

    deadline_s: float
    work_s: float
    budget: Budget
    pair: Pair


class SizeAnswer:
    """Best sizes by deadline, and the curve of the longest one. Raises UsageError, Infeasible."""

    def __init__(self, settings: PlanOptions, today: date) -> None:
        for name in settings.set_values(*NOT_HERE):
            flag = settings.table[name].flag
            raise UsageError(f"{flag}: needs the size of the model (expected --params)")
        self.settings = settings
        unset = dict.fromkeys(("tokens", "tokens_per_param", "data", "fit"))
        guess = settings.changed(params=GUESSED, **unset)
        self.request = build(guess, priced=False, today=today)
        self.fitted: FittedLaw | None = fitted_law(settings)
        self.rows = tuple(self._sized(deadline_s) for deadline_s in self.request.deadlines_s)

    @property
    def chips(self) -> int:
        """The number of chips."""
        return int(self.request.cluster.chips or 0)

    @property
    def longest(self) -> Sized:
        """The row of the longest deadline."""
        return max(self.rows, key=lambda row: row.deadline_s)

    def _sized(self, deadline_s: float) -> Sized:
        cluster = self.request.cluster
        law = self.fitted.law if self.fitted else BESIROGLU
        work_s = deadline_s
        for _ in range(ROUNDS if cluster.stops else 1):
            flops = self.chips * cluster.flops_per_chip_s * work_s
            budget = Budget(flops, law, self.settings.data, self._most_params())
            pair = self._chosen(budget)
            if not cluster.stops:
                break
            work_s = self._work_within(deadline_s, pair)
        return Sized(deadline_s, work_s, budget, pair)

    def _chosen(self, budget: Budget) -> Pair:
        """The pair of the options, or the best one."""
        if self.settings.tokens is not None:
            params = budget.flops / FLOPS_PER_PARAM_TOKEN / self.settings.tokens
            return Pair(params, self.settings.tokens)
        ratio = self.settings.tokens_per_param
        return budget.best() if ratio is None else budget.pair(ratio)

    def _most_params(self) -> float:
        """Parameters whose state, with the activations of one sequence, the chips hold."""
        run, cluster = self.request.run, self.request.cluster
        free = self.chips * cluster.hbm_bytes - run.live_bytes(run.sequence)
        return max(free, 0) / run.recipe.bytes_per_param

    def _work_within(self, deadline_s: float, pair: Pair) -> float:
        """Seconds of work whose expected end, with interruptions, is the deadline."""
        run = replace(self.request.run, params=pair.params, active_params=pair.params)
        low, high = 0.0, deadline_s
        for _ in range(50):
            middle = (low + high) / 2
            late = planner.end_on(run, self.request.cluster, self.chips, middle)[0] > deadline_s
            low, high = (low, middle) if late else (middle, high)
        if not low > 0:
            raise Infeasible("--preempt: the run makes no progress between interruptions")
        return low

    def text(self) -> str:
        """The tables."""
        cluster, prices = self.request.cluster, self.request.cluster.prices
        longest, chip = self.longest, cluster.chip.name.upper()
        known = {"COST": prices, "EPOCHS": longest.budget.unique}
        sums, curve = ({head: CELLS[head] for head in heads if known.get(head, True)}
                       for heads in (SUMS, CURVE))  # fmt: skip
        lines = [
            words("question", chips=self.chips, chip=chip, mfu=cluster.mfu),
            law_line(self.fitted),
            *table_of(sums, self.flat_rows()),
            f"sizes for {span(longest.deadline_s)}, by tokens per parameter",
            *table_of(curve, self.curve()),
            self._verdict(longest),
            self._next(longest),
        ]
        return "\n".join(line for line in lines if line)

    def _verdict(self, row: Sized) -> str:
        pair, budget = row.pair, row.budget
        limit = "" if pair.params <= budget.most_params else ", which the chips do not hold"
        if budget.pair(pair.tokens_per_param * 0.9).params > budget.most_params and not limit:
            limit = ", the largest that the chips hold"
        loss = f"{budget.loss(pair):.3f}"
        if self.fitted:
            loss += interval_text(self.fitted.loss_interval(pair.params, pair.tokens))
            sizes = self.fitted.interval(lambda law: budget.best(law).params)
            if self.settings.tokens is None and self.settings.tokens_per_param is None:
                limit += f" ({format_count(sizes[0])} to {format_count(sizes[1])})"
        half = budget.loss(budget.pair(4 * pair.tokens_per_param))
        days, given = row.deadline_s / DAY_S, {"pair": pair, "limit": limit, "loss": loss}
        return words("size_verdict", given, days=days, half=half)

    def _next(self, row: Sized) -> str:
        flag = "machine" if self.settings.machine else "chip"
        chip = self.settings.machine or self.request.cluster.chip.name
        given = {"pair": row.pair, "flag": flag, "chip": chip, "chips": self.chips}
        return words("size_next", given, days=row.deadline_s * 1.1 / DAY_S)

    def flat_rows(self) -> list[dict[str, Any]]:
        """A record per deadline."""
        rates = [price.usd_per_chip_hour for price in self.request.cluster.prices]
        return [
            {
                **fields(row, "deadline_s work_s"),
                **fields(self, "chips chip=request.cluster.chip.name request.cluster.mfu"),
                **self._figures(row, row.pair),
                "cost_usd": cost_usd(self.chips * row.deadline_s, min(rates)) if rates else None,
            }
            for row in self.rows
        ]

    def _figures(self, row: Sized, pair: Pair) -> dict[str, object]:
        sizes = pair.params, pair.tokens
        low, high = self.fitted.loss_interval(*sizes) if self.fitted else (None, None)
        unique = row.budget.unique
        return {
            **fields(pair, "train_flops params tokens tokens_per_param"),
            "epochs": pair.tokens / unique if unique else None,
            "loss": row.budget.loss(pair),
            "loss_low": low,
            "loss_high": high,
            "state_bytes": pair.params * self.request.run.recipe.bytes_per_param,
            "fits": pair.params <= row.budget.most_params,
        }

    def report(self) -> dict[str, object]:
        """The JSON object."""
        longest = self.longest
        return {
            "schema_version": SCHEMA_VERSION,
            "inputs": self.settings.set_values(),
            "law": longest.budget.law.name,
            "rows": self.flat_rows(),
            "curve": self.curve(),
        }

    def curve(self) -> list[dict[str, Any]]:
        """A record per size for the longest deadline, by tokens per parameter."""
        longest = self.longest
        return [self._figures(longest, longest.budget.pair(ratio)) for ratio in RATIOS]
