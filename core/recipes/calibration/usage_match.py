"""Records chosen so that language, domain, form and length are distributed as in a sample of use.

A record has one value of each trait: the language of its text, its `source`, its form (document;
chat, with or without tools, with several turns), and its length in tokens, between powers of two.
Records are taken one by one, each of those whose traits are furthest below their share in the use;
so the distributions of all traits come as near as the records at hand allow. The distance of two
distributions is the total variation, half the sum of the differences of all shares: 0 where they
are equal, 1 where they have nothing in common.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sabia.core.generate.message_forms import text_of
from sabia.core.text.classify.language import names_of

CANDIDATES = 20  # records to choose from for each that is taken
USAGE_RECORDS = 4096  # at most so many of the sample of use are read
WORTH_NAMING = 0.01  # shares of the use below this are not missed
LEAST_OF_SHARE = 0.25  # a value is missed where it has less than this of its share
TRAITS = ("language", "source", "form", "length")
_TEXT_CHARACTERS = 4000  # of a record, to tell its language
Traits = tuple[str, ...]


@dataclass(frozen=True)
class Match:
    """Of each trait, the shares in the use and in the chosen records, and their distance."""

    usage: dict[str, dict[str, float]]
    chosen: dict[str, dict[str, float]]
    distance: dict[str, float]

    def missing(self) -> list[tuple[str, str, float, float]]:
        """(trait, value, share in the use, share in the chosen records) of what has too little."""
        return [
            (trait, value, share, own)
            for trait, shares in self.usage.items()
            for value, share in shares.items()
            if share >= WORTH_NAMING
            and (own := self.chosen[trait].get(value, 0)) < LEAST_OF_SHARE * share
        ]


def traits(
    rows: Sequence[Mapping[str, Any]], kind: str, lengths: Sequence[int], texts: Sequence[str]
) -> list[Traits]:
    """The traits of records of a kind, with so many tokens and these texts."""
    languages = names_of([text[:_TEXT_CHARACTERS] for text in texts])
    return [
        (language, str(row.get("source") or ""), _form(row, kind), length_range(length))
        for row, language, length in zip(rows, languages, lengths, strict=True)
    ]


def text_in(row: Mapping[str, Any], kind: str) -> str:
    """The text of a chat or document."""
    if kind == "document":
        return str(row["text"])
    return "\n".join(text_of(message) for message in row["messages"])


def length_range(tokens: int) -> str:
    """`257-512 tokens`."""
    end = 64
    while end < tokens:
        end *= 2
    return f"{end // 2 + 1 if end > 64 else 1}-{end} tokens"


def chosen_numbers(
    usage: Sequence[Traits], candidates: Sequence[Traits], count: int, seed: int
) -> list[int]:
    """The numbers of at most `count` candidates; the same for the same seed."""
    wanted, used = _shares(usage), _compared_traits(usage, candidates)
    cells: dict[Traits, list[int]] = {}
    for number, one in enumerate(candidates):
        cells.setdefault(one, []).append(number)
    draw = random.Random(seed)
    for numbers in cells.values():
        draw.shuffle(numbers)
    taken = [Counter[str]() for _ in TRAITS]
    chosen = list[int]()
    while cells and len(chosen) < count:

        def below(cell: Traits, size: int = len(chosen) + 1) -> float:
            """How many records its values lack, over all traits."""
            return sum(
                wanted[trait].get(cell[i], 0) * size - taken[i][cell[i]]
                for i, trait in enumerate(TRAITS)
                if trait in used
            )

        best = max(cells, key=below)
        chosen.append(cells[best].pop())
        if not cells[best]:
            del cells[best]
        for counter, value in zip(taken, best, strict=True):
            counter[value] += 1
    return chosen


def compared(usage: Sequence[Traits], chosen: Sequence[Traits]) -> Match:
    """Both distributions of the traits that can be compared."""
    used = _compared_traits(usage, chosen)
    ours, theirs = ({t: s for t, s in _shares(rows).items() if t in used}
                    for rows in (chosen, usage))  # fmt: skip
    distance = {
        trait: sum(abs(ours[trait].get(value, 0) - theirs[trait].get(value, 0))
                   for value in ours[trait].keys() | theirs[trait].keys()) / 2
        for trait in used
    }  # fmt: skip
    return Match(theirs, ours, distance)


def _compared_traits(usage: Iterable[Traits], others: Iterable[Traits]) -> list[str]:
    """All but the source where the two name none in common."""
    sources = [{one[TRAITS.index("source")] for one in rows} - {""} for rows in (usage, others)]
    return [trait for trait in TRAITS if trait != "source" or sources[0] & sources[1]]


def _shares(rows: Sequence[Traits]) -> dict[str, dict[str, float]]:
    counts = {trait: Counter(row[i] for row in rows) for i, trait in enumerate(TRAITS)}
    return {
        trait: {value: n / len(rows) for value, n in sorted(counter.items())}
        for trait, counter in counts.items()
    }


def _form(row: Mapping[str, Any], kind: str) -> str:
    if kind != "chat":
        return "document"
    roles = Counter(message["role"] for message in row["messages"])
    tools = bool(row.get("tools")) or "tool" in roles
    turns = "several turns" if roles["user"] > 1 else "one turn"
    return f"chat, {turns}{', tools' if tools else ''}"
