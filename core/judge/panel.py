"""Several judges: their file, the combination of their verdicts, and how far they agree.

The file of --judge has a table for each judge:

    [strict]
    url = "http://localhost:8000/v1"   # or a list: servers that share the calls
    model = "NAME"
    weight = 2.0                       # default 1
    prompt = 0.5                       # US dollars per million tokens, optional
    completion = 2.0
    api-key-env = "STRICT_KEY"         # default: --api-key-env

`majority`: an item is met if judges of more than half of the weight of those that have a verdict
say so. `mean`: the score of a sample is the weighted mean of each judge's score; there is none if
one judge has none. κ is Cohen's (1960): (p_o - p_e) / (1 - p_e) of two judges' verdicts.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.files import unreadable
from sabia.core.generate.budget import Price
from sabia.core.generate.client import ClientStats
from sabia.core.judge.llm import AskedItems, Judge, Question
from sabia.core.judge.verdict import Verdict

KEYS = ("url", "model", "weight", "prompt", "completion", "api-key-env")
TIE = 1e-9  # of weights
Verdicts = Mapping[str, Verdict]  # by item id


@dataclass(frozen=True)
class JudgeServer:
    """One judge of a file; api_key_env '': that of the command."""

    name: str
    urls: tuple[str, ...]
    model: str
    weight: float = 1.0
    price: Price | None = None
    api_key_env: str = ""


def load_judges(path: str | Path) -> list[JudgeServer]:
    """The judges of a file; raises UsageError if it is not such a file."""
    try:
        tables = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise unreadable("--judge", path, error) from error
    except ValueError as error:
        raise UsageError(f"--judge: {path}: {error} (expected TOML)") from error
    try:
        judges = [_judge(name, table) for name, table in tables.items()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"--judge: {path}: {error} (expected [NAME] tables with url, model, and optionally "
            f"{', '.join(KEYS[2:])})"
        ) from error
    models = [judge.model for judge in judges]
    if not judges or len(set(models)) < len(models):
        raise UsageError(f"--judge: {path}: models {models} (expected one or more, all different)")
    return judges


def _judge(name: str, table: Mapping[str, Any]) -> JudgeServer:
    if odd := sorted(table.keys() - set(KEYS)):
        raise ValueError(f"{name}: no key {odd[0]!r}")
    if missing := [key for key in KEYS[:2] if not table.get(key)]:
        raise ValueError(f"{name}: {missing[0]} is missing")
    url, weight, price = table["url"], float(table.get("weight", 1.0)), None
    if not weight > 0:
        raise ValueError(f"{name}: weight {weight:g} is not above 0")
    if {"prompt", "completion"} & table.keys():
        price = Price(float(table["prompt"]), float(table["completion"]))
    urls = (url,) if isinstance(url, str) else tuple(map(str, url))
    key = str(table.get("api-key-env", ""))
    return JudgeServer(name, urls, str(table["model"]), weight, price, key)


@dataclass(frozen=True)
class Opinion:
    """The verdicts of one judge on a sample."""

    judge: str
    weight: float
    verdicts: Verdicts


def weighted_majority(opinions: Sequence[Opinion]) -> dict[str, Verdict]:
    """For each item the verdict with more weight; UNKNOWN on a tie or without any verdict."""
    balance: dict[str, float] = {}
    for opinion in opinions:
        for item, verdict in opinion.verdicts.items():
            sign = {Verdict.MET: 1, Verdict.UNMET: -1}.get(verdict, 0)
            balance[item] = balance.get(item, 0.0) + sign * opinion.weight
    return {
        item: Verdict.of(None if abs(sum_) < TIE else sum_ > 0) for item, sum_ in balance.items()
    }


class Agreement:
    """Counts of the verdicts of each two judges on each item, where both have one."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, str, str], Counter[tuple[Verdict, Verdict]]] = {}

    def add(self, opinions: Sequence[Opinion]) -> None:
        """Count the opinions on one sample."""
        for one, two in combinations(opinions, 2):
            for item in one.verdicts.keys() & two.verdicts.keys():
                pair = (one.verdicts[item], two.verdicts[item])
                if Verdict.UNKNOWN not in pair:
                    key = (item, one.judge, two.judge)
                    self.tables.setdefault(key, Counter())[pair] += 1

    def rows(self) -> Iterator[dict[str, Any]]:
        """item, judges, verdicts, agreement (a share) and kappa (None: undefined), by item."""
        for (item, one, two), table in sorted(self.tables.items()):
            count = table.total()
            agreed = sum(n for (a, b), n in table.items() if a is b) / count
            met = [
                sum(n for pair, n in table.items() if pair[judge] is Verdict.MET) / count
                for judge in (0, 1)
            ]
            expected = met[0] * met[1] + (1 - met[0]) * (1 - met[1])
            kappa = (agreed - expected) / (1 - expected) if expected < 1 else None
            row = {"item": item, "judges": [one, two], "verdicts": count}
            yield row | {"agreement": agreed, "kappa": kappa}

    def lines(self) -> Iterator[str]:
        """The rows as lines for stderr."""
        for row in self.rows():
            kappa = "undefined" if row["kappa"] is None else f"{row['kappa']:.2f}"
            yield (
                f"item {row['item']}: {' and '.join(row['judges'])} agree on "
                f"{row['agreement']:.1%} of {row['verdicts']:,} verdicts (κ {kappa})"
            )


class Panel:
    """One judge or several that are asked about every question."""

    def __init__(self, judges: Sequence[tuple[JudgeServer, Judge]], mean: bool = False) -> None:
        self.judges, self.mean, self.agreement = list(judges), mean, Agreement()

    @classmethod
    def of(cls, judge: Judge) -> "Panel":
        """A panel of one judge."""
        return cls([(JudgeServer("judge", (), ""), judge)])

    @property
    def stats(self) -> ClientStats:
        """Counts of all calls so far."""
        first, *others = (judge.client.stats for _, judge in self.judges)
        return sum(others, first)

    def submit(self, question: Question) -> list[Sequence[AskedItems]]:
        """Start the calls of every judge about a question."""
        return [judge.submit(question) for _, judge in self.judges]

    def collect(self, asked: Sequence[Sequence[Sequence[AskedItems]]]) -> list[list[Opinion]]:
        """Wait for the calls of `submit` (empty: no question); each judge's opinion of each."""
        opinions: list[list[Opinion]] = [[] for _ in asked]
        for number, (server, judge) in enumerate(self.judges):
            verdicts = judge.collect([calls[number] if calls else [] for calls in asked])
            for of_case, by_item in zip(opinions, verdicts, strict=True):
                of_case.append(Opinion(server.name, server.weight, by_item))
        for one in opinions:
            self.agreement.add(one)
        return opinions
