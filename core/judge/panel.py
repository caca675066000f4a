"""Several judges: the combination of their verdicts, and an auditor that checks a share of them.

`majority`: an item is met if judges of more than half of the weight of those that have a verdict
say so; points are the weighted median of those that are given. `mean`: the score of a sample, or
its points, is the weighted mean of each judge's; there is none if one judge has none.

An auditor is asked about the answers whose hash is below a share, the same ones in every run. It
decides nothing: where its server fails, the run goes on without it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sabia.core import notes
from sabia.core.errors import Failed
from sabia.core.generate.client import ClientStats, Estimate
from sabia.core.generate.opened import print_estimate
from sabia.core.judge.agreement import Agreement
from sabia.core.judge.judge_file import JudgeServer
from sabia.core.judge.llm import AskedQuestion, Judge, Judgement, Question
from sabia.core.judge.verdict import Opinion, Verdict

TIE = 1e-9  # of weights
AUDIT_BYTES = 8  # of the hash that selects answers


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


def weighted_mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The weighted mean; None if one value is missing, or there is none."""
    pairs = zip(values, weights, strict=True)
    products = [value * weight for value, weight in pairs if value is not None]
    whole = products and len(products) == len(values)
    return sum(products) / sum(weights) if whole else None


def weighted_median(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The value with half of the weight on either side, or the middle of two; None without one."""
    pairs = zip(values, weights, strict=True)
    known = sorted((value, weight) for value, weight in pairs if value is not None)
    half, passed = sum(weight for _, weight in known) / 2, 0.0
    for number, (value, weight) in enumerate(known):
        passed += weight
        if abs(passed - half) < TIE:
            return (value + known[number + 1][0]) / 2
        if passed > half:
            return value
    return None


@dataclass(frozen=True)
class AskedPanel:
    """The calls of each judge about a question, and those of the auditor if it is asked."""

    judges: Sequence[AskedQuestion]
    audit: AskedQuestion | None


class Panel:
    """One judge or several that are asked about every question, and perhaps an auditor."""

    def __init__(
        self, judges: Sequence[tuple[JudgeServer, Judge]], mean: bool = False, audit: float = 0.0
    ) -> None:
        """audit: the share of the answers about which the auditor among `judges` is asked."""
        self.judges = [pair for pair in judges if not pair[0].audit]
        self.auditors = [pair for pair in judges if pair[0].audit]
        self.mean, self.audit, self.agreement = mean, audit, Agreement()

    @property
    def stats(self) -> ClientStats:
        """Counts of all calls so far."""
        first, *others = (judge.client.stats for _, judge in (*self.judges, *self.auditors))
        return sum(others, first)

    def audits(self, messages: Sequence[Mapping[str, Any]], response: str) -> bool:
        """Whether the auditor is asked about a response: a function of the texts."""
        text = json.dumps([[*messages], response], sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=AUDIT_BYTES)
        return int.from_bytes(digest.digest()) < self.audit * 2 ** (8 * AUDIT_BYTES)

    @contextmanager
    def auditing(self) -> Iterator[None]:
        """Go on without the auditor if its server fails; says so."""
        try:
            yield
        except Failed as error:
            for server, _ in self.auditors:
                notes.warn(f"auditor {server.name}: {error}; nothing more is audited")
            self.audit = 0.0

    def print_estimates(self, questions: Callable[[], Iterable[Question]]) -> list[Estimate]:
        """Print the most that all questions would cost, and return it for each judge."""
        return [
            print_estimate(
                judge.client,
                (
                    request
                    for one in questions()
                    if not server.audit or self.audits(one.messages, one.response)
                    for request in judge.requests(one)
                ),
            )
            for server, judge in (*self.judges, *self.auditors)
        ]

    def submit(self, question: Question) -> AskedPanel:
        """Start the calls of every judge about a question."""
        asked = [judge.submit(question) for _, judge in self.judges]
        audit: AskedQuestion | None = None
        if self.auditors and self.audits(question.messages, question.response):
            with self.auditing():
                audit = self.auditors[0][1].submit(question)
        return AskedPanel(asked, audit)

    def collect(self, asked: Sequence[AskedPanel | None]) -> list[list[Opinion]]:
        """Wait for the calls of `submit` (None: no question); the opinions on each."""
        opinions: list[list[Opinion]] = [[] for _ in asked]
        for number, (server, judge) in enumerate(self.judges):
            calls = [one.judges[number] if one else None for one in asked]
            _add(opinions, server, calls, judge.collect)
        for server, judge in self.auditors:
            with self.auditing():
                _add(opinions, server, [one.audit if one else None for one in asked], judge.collect)
        return opinions


def _add(
    opinions: Sequence[list[Opinion]],
    server: JudgeServer,
    calls: Sequence[AskedQuestion | None],
    collect: Callable[[Sequence[AskedQuestion]], list[Judgement]],
) -> None:
    """Add what a judge says of each question that it was asked."""
    judgements = iter(collect([call for call in calls if call is not None]))
    for of_case, call in zip(opinions, calls, strict=True):
        if call is not None:
            made = next(judgements)
            opinion = Opinion(server.name, server.weight, made.verdicts, server.audit, made.lookups)
            of_case.append(opinion)
