"""Sums as records: chat records for sft, prompts for grpo, held-out sets for evaluation.

Training records use only shown sums, evaluation sets only held-out ones. In a share of the
demonstrations one digit of the answer, chosen at random, is replaced by a random digit (a tenth of
those replacements change nothing), so that imitation does not reach full accuracy and reinforcement
learning can improve on it.
"""

import random
from collections.abc import Iterator
from typing import Any

from sabia.examples.little_web import sums

Record = dict[str, Any]


def demonstrations(count: int, corrupt: float, seed: int) -> Iterator[Record]:
    """`count` chat records `37+58=` → `095`; `meta` tells whether the answer was tampered with."""
    choice = random.Random(f"{seed}/sft")
    for index, (a, b) in enumerate(_drawn(count, choice)):
        given = sums.answer(a, b)
        tampered, shown = choice.random() < corrupt, given
        if tampered:
            position = choice.randrange(len(given))
            shown = given[:position] + str(choice.randrange(10)) + given[position + 1 :]
        yield {
            "id": f"sft-{seed}-{index}",
            "messages": [_user(a, b), {"role": "assistant", "content": shown}],
            "meta": {"answer": given, "tampered": tampered},
        }


def prompts(count: int, seed: int) -> Iterator[Record]:
    """`count` prompt records of shown sums with their true answer, in random order."""
    choice = random.Random(f"{seed}/prompts")
    for index, (a, b) in enumerate(_drawn(count, choice)):
        yield {
            "id": f"prompt-{seed}-{index}",
            "messages": [_user(a, b)],
            "answer": sums.answer(a, b),
            "meta": {"verifier": "exact"},
        }


def exact_match_items(count: int | None = None) -> Iterator[Record]:
    """Prompt records of held-out sums (all 2,501 when no count is given)."""
    for a, b in sums.held_out_sums()[:count]:
        yield {
            "id": f"held-out-{sums.expression(a, b)}",
            "messages": [_user(a, b)],
            "answer": sums.answer(a, b),
            "meta": {"task": "sums", "verifier": "exact"},
        }


def multiple_choice_items(count: int | None = None) -> Iterator[Record]:
    """Held-out sums with four options; wrong ones miss a carry, shift ten or shift one."""
    for a, b in sums.held_out_sums()[:count]:
        choice, total = random.Random(f"mc {a} {b}"), a + b
        without_carry = (a // 10 + b // 10) * 10 + total % 10
        near = (total - 10, total - 1, total + 1, total + 10, without_carry)
        wrong = {n for n in near if n != total and 0 <= n <= 198}
        options = [f"{n:03d}" for n in (total, *choice.sample(sorted(wrong), 3))]
        choice.shuffle(options)
        yield {
            "id": f"choice-{sums.expression(a, b)}",
            "question": f"{sums.expression(a, b)}=",
            "choices": options,
            "answer": options.index(sums.answer(a, b)),
        }


def _drawn(count: int, choice: random.Random) -> Iterator[tuple[int, int]]:
    """Passes over all shown sums, each in a new order."""
    shown = list(sums.shown_sums())
    for index in range(count):
        if index % len(shown) == 0:
            choice.shuffle(shown)
        yield shown[index % len(shown)]


def _user(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{sums.expression(a, b)}="}
