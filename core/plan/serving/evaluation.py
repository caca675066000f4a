"""Cost of an evaluation: answers to the items of a suite, and a judge's calls on them.

Answers and verdicts come from own chips (a replica at full load, traffic.py) or from an API with a
price per million tokens. A rubric judge makes one call for each criterion of an answer
(`judge_calls`), each with the answer and the rubric in its prompt, and generates a verdict.

`table_cost` computes the same from a table of a budget file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.assumed import assumed_architecture
from sabia.core.plan.serving.decode import Replica
from sabia.core.plan.serving.traffic import MILLION, Load, cheapest, full_load, loads
from sabia.core.units import parse_count, parse_money

# keys of a table besides the fields of Suite: for the model, and with prefix for the judge
SOURCE_KEYS = ("params", "active", "weights", "usd_per_million")
NEEDED = ("items", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Suite:
    """Items that are answered `repeats` times, and a judge's calls on each answer (0: none)."""

    items: float
    prompt_tokens: float
    output_tokens: float
    repeats: float = 1
    judge_calls: float = 0
    judge_prompt_tokens: float = 0
    judge_output_tokens: float = 0

    @property
    def answers(self) -> float:
        """Number of answers."""
        return self.items * self.repeats

    @property
    def verdicts(self) -> float:
        """Number of calls of the judge."""
        return self.answers * self.judge_calls


@dataclass(frozen=True)
class Bill:
    """Work of the model or of the judge: own chip-seconds, or dollars of an API."""

    name: str
    calls: float
    input_tokens: float
    output_tokens: float
    chip_s: float = 0.0
    api_usd: float = 0.0
    load: Load | None = None

    def cost_usd(self, usd_per_chip_hour: float) -> float:
        """Cost of chips and API."""
        return self.chip_s / 3600 * usd_per_chip_hour + self.api_usd


@dataclass(frozen=True)
class Evaluation:
    """One run of a suite: answers, and verdicts where there is a judge."""

    bills: tuple[Bill, ...]

    @property
    def chip_hours(self) -> float:
        """Chip-hours of answers and verdicts on own chips."""
        return sum(bill.chip_s for bill in self.bills) / 3600

    @property
    def api_usd(self) -> float:
        """Cost of APIs."""
        return sum(bill.api_usd for bill in self.bills)

    def cost_usd(self, usd_per_chip_hour: float) -> float:
        """Total cost."""
        return sum(bill.cost_usd(usd_per_chip_hour) for bill in self.bills)


ApiPrice = tuple[float, float]  # US dollars for a million tokens read, and written
Source = Replica | ApiPrice


def evaluate(suite: Suite, model: Source, judge: Source | None = None) -> Evaluation:
    """Cost of one run of `suite`. Raises UsageError where it has a judge's calls but no judge."""
    bills = [_bill("answers", suite.answers, suite.prompt_tokens, suite.output_tokens, model)]
    if suite.verdicts:
        if judge is None:
            raise UsageError("evaluation: judge_calls without a judge (expected its size or price)")
        sizes = suite.judge_prompt_tokens, suite.judge_output_tokens
        bills.append(_bill("verdicts", suite.verdicts, *sizes, judge))
    return Evaluation(tuple(bills))


def _bill(name: str, calls: float, prompt: float, output: float, source: Source) -> Bill:
    tokens = calls * prompt, calls * output
    if isinstance(source, Replica):
        load = full_load(source, prompt, output)
        return Bill(name, calls, *tokens, chip_s=calls * load.request_chip_s, load=load)
    usd = sum(size * price for size, price in zip(tokens, source, strict=True)) / MILLION
    return Bill(name, calls, *tokens, api_usd=usd)


def table_cost(table: Mapping[str, Any], chip: Chip, label: str) -> Evaluation:
    """One run of the suite that a TOML table describes, on `chip` or by API prices.

    items, prompt_tokens, output_tokens; repeats; the model's params and active (BF16 weights
    unless `weights` is given) or usd_per_million = [input, output]; judge_calls with
    judge_prompt_tokens, judge_output_tokens and judge_params, judge_active or
    judge_usd_per_million. Raises BadData, UsageError, Infeasible.
    """
    sizes = Suite.__dataclass_fields__.keys()
    keys = sizes | {f"{side}{key}" for side in ("", "judge_") for key in SOURCE_KEYS}
    unknown, missing = sorted(table.keys() - keys), [key for key in NEEDED if key not in table]
    if unknown or missing:
        words = f"has unknown {unknown[0]}" if unknown else f"lacks {missing[0]}"
        raise BadData(f"{label}: evaluation {words} (expected {', '.join(sorted(keys))})")
    given = {key: parse_count(table[key], f"{label} {key}") for key in sizes if key in table}
    suite = Suite(**given)
    judge = _source(table, "judge_", chip, suite, label) if suite.judge_calls else None
    return evaluate(suite, _source(table, "", chip, suite, label), judge)


def _source(table: Mapping[str, Any], side: str, chip: Chip, suite: Suite, label: str) -> Source:
    """The model, or the judge where `side` is 'judge_', by size or by price."""
    price, size = table.get(f"{side}usd_per_million"), table.get(f"{side}params")
    if (price is None) == (size is None):
        names = f"{side}params or {side}usd_per_million"
        raise BadData(f"{label}: evaluation needs {names} (expected one of them)")
    if size is None:
        return api_price(price, f"{label} {side}usd_per_million")
    params = parse_count(size, f"{label} {side}params")
    active = parse_count(table.get(f"{side}active", params), f"{label} {side}active")
    tokens = suite.prompt_tokens, suite.output_tokens
    if side:
        tokens = suite.judge_prompt_tokens, suite.judge_output_tokens
    weights = str(table.get(f"{side}weights", PlanOptions.assumed("weights")))
    return own_chips((params, active), chip, tokens, weights)


def own_chips(
    sizes: tuple[float, float], chip: Chip, tokens: tuple[float, float], weights: str
) -> Replica:
    """The cheapest replica of a model of (all, active) parameters for (prompt, output) tokens."""
    return cheapest(loads(assumed_architecture(*sizes), chip, *tokens, weights=weights)).replica


def api_price(prices: object, label: str) -> ApiPrice:
    """[input, output] in dollars for a million tokens. Raises UsageError."""
    if not isinstance(prices, list) or len(prices) != 2:
        raise UsageError(f"{label}: {prices!r} (expected two prices, input and output)")
    read, written = (parse_money(usd, label) for usd in prices)
    return read, written
