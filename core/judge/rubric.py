"""Rubrics: the items by which an answer is graded, and the score computed from their verdicts.

A rubric is {"id", "version", "items": [{"id", "text", "weight", "kind", "reference",
"depends_on"}]}; a list of items is accepted too. A negative weight is a penalty for an unwanted
property. kind is `llm` (a judge reads the text) or a verifier of `sabia.core.judge.verifiers`.
  score = clip( Σ weight·met / Σ of the positive weights, 0, 1 )
as in HealthBench (arXiv 2505.08775), over the items with a verdict. If more than `max_unknown` of
the positive weight has no verdict, or a penalty has none, there is no score.

`depends_on` names items (one id or a list) that must be met for this one to count. If one of them
is unmet, this item is unmet without being asked about: it earns nothing and costs nothing, and the
divisor stays, so that the scores of answers to one prompt can be compared and failing a condition
never pays. If none is unmet and one is unknown, it is unknown.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.judge.verdict import Grade, Verdict
from sabia.core.judge.verifiers import VERIFIERS

KINDS = ("llm", *VERIFIERS)


@dataclass(frozen=True)
class Item:
    """One criterion."""

    id: str
    text: str = ""
    weight: float = 1.0
    kind: str = "llm"
    reference: str = ""
    depends_on: tuple[str, ...] = ()

    def settled(self, verdicts: Mapping[str, Verdict]) -> Verdict | None:
        """The verdict that follows from those on the items it depends on; None: it counts."""
        needed = {verdicts.get(name, Verdict.UNKNOWN) for name in self.depends_on}
        return next((v for v in (Verdict.UNMET, Verdict.UNKNOWN) if v in needed), None)


@dataclass(frozen=True)
class Rubric:
    """Criteria with their weights; `id` is a hash of the items if none is given."""

    id: str
    items: tuple[Item, ...]
    version: str = "1"

    @property
    def needs_judge(self) -> bool:
        """True if an item is graded by a language model."""
        return any(item.kind == "llm" for item in self.items)

    @cached_property
    def ordered(self) -> tuple[Item, ...]:
        """The items, each behind those that it depends on. Raises UsageError for a cycle."""
        by_id = {item.id: item for item in self.items}
        try:
            order = TopologicalSorter({item.id: item.depends_on for item in self.items})
            return tuple(by_id[name] for name in order.static_order())
        except CycleError as error:
            cycle = " → ".join(error.args[1])
            raise UsageError(
                f"rubric {self.id}: items depend on each other: {cycle} (expected no cycle)"
            ) from error

    def settle(self, verdicts: Mapping[str, Verdict]) -> dict[str, Verdict]:
        """A verdict on every item, where those that it depends on have been considered."""
        settled: dict[str, Verdict] = {}
        for item in self.ordered:
            own = verdicts.get(item.id, Verdict.UNKNOWN)
            settled[item.id] = item.settled(settled) or own
        return settled

    def score(self, verdicts: Mapping[str, Verdict], max_unknown: float = 0.0) -> float | None:
        """The score in [0, 1] of verdicts by item id (a missing id is unknown), or None."""
        verdicts = self.settle(verdicts)
        known = [i for i in self.items if verdicts.get(i.id, Verdict.UNKNOWN) != Verdict.UNKNOWN]
        missing = [item for item in self.items if item not in known]
        positive = sum(max(item.weight, 0.0) for item in known)
        unknown = sum(max(item.weight, 0.0) for item in missing)
        penalty_open = any(item.weight < 0 for item in missing) and max_unknown <= 0
        if penalty_open or positive <= 0 or unknown > max_unknown * (positive + unknown):
            return None
        points = sum(item.weight for item in known if verdicts[item.id] == Verdict.MET)
        return min(max(points / positive, 0.0), 1.0)

    def grade(self, verdicts: Mapping[str, Verdict], max_unknown: float = 0.0) -> Grade:
        """The score with its verdicts, in the rubric's order."""
        settled = self.settle(verdicts)
        ordered = tuple((item.id, settled[item.id], item.weight) for item in self.items)
        return Grade(self.score(settled, max_unknown), ordered)


def parse_rubric(value: str | list[Any] | Mapping[str, Any]) -> Rubric:
    """A rubric from its JSON or the parsed object.

    Raises BadData for an invalid rubric: no items, repeated ids, an unknown kind, a weight that is
    not a number, no item with a positive weight, or an item that depends on none of its items;
    UsageError for items that depend on each other.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadData(f"rubric is not JSON: {value!r:.80} ({error})") from error
    head = {"items": value} if isinstance(value, list) else value
    if not isinstance(head, Mapping) or not isinstance(head.get("items"), list | tuple):
        raise BadData(f"not a rubric: {value!r:.80} (expected an object with a list of items)")
    items = tuple(_item(item, number) for number, item in enumerate(head["items"], 1))
    ids = [item.id for item in items]
    if len(set(ids)) != len(ids):
        raise BadData(f"rubric items repeat an id: {', '.join(ids)} (expected distinct ids)")
    if not any(item.weight > 0 for item in items):
        raise BadData("rubric has no item with a positive weight (the score divides by their sum)")
    for item in items:
        if unknown := [name for name in item.depends_on if name not in ids]:
            known = ", ".join(ids)
            raise BadData(f"rubric item {item.id} depends on {unknown[0]!r} (expected of {known})")
    # without the field where it is empty: ids of rubrics of earlier versions
    plain = [{k: v for k, v in vars(item).items() if k != "depends_on" or v} for item in items]
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
    name = head.get("id") or hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    rubric = Rubric(str(name), items, str(head.get("version", "1")))
    _ = rubric.ordered
    return rubric


def _item(value: object, number: int) -> Item:
    if not isinstance(value, Mapping):
        raise BadData(f"rubric item {number} is {value!r:.60} (expected an object)")
    weight = value.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise BadData(f"rubric item {number}: weight {weight!r} (expected a number)")
    kind = value.get("kind") or "llm"
    if kind not in KINDS:
        raise BadData(f"rubric item {number}: kind {kind!r} (expected one of {', '.join(KINDS)})")
    reference = value.get("reference")
    if kind == "json" and reference is not None and not isinstance(reference, str):
        reference = json.dumps(reference)
    name, text = str(value.get("id") or number), str(value.get("text") or "")
    needed = value.get("depends_on") or ()
    if not isinstance(needed, str | list | tuple):
        raise BadData(f"rubric item {name}: depends_on {needed!r:.60} (expected ids of items)")
    needed = (needed,) if isinstance(needed, str) else tuple(map(str, needed))
    reference = "" if reference is None else str(reference)
    item = Item(name, text, float(weight), kind, reference, needed)
    if kind == "llm" and not item.text:
        raise BadData(f"rubric item {item.id}: no text (expected the criterion for the judge)")
    return item
