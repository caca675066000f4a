"""Sums as records: conversations to imitate, prompts to practise on, held-out sets to be judged by.

Training records use only shown sums, evaluation sets only held-out ones. In a share of the
demonstrations one digit of the answer, chosen at random, is replaced by a random digit (a tenth of
those replacements change nothing), so that imitation stops short of perfection and reinforcement
has something to add.
"""

import random
from collections.abc import Iterator
from typing import Any

from sabia.examples.little_web import sums

Record = dict[str, Any]


def demonstrations(count: int, corrupt: float, seed: int) -> Iterator[Record]:
    """`count` chat records `37+58=` → `095`; meta says whether the answer was tampered with."""
    choice = random.Random(f"{seed}/sft")
    for index, (a, b) in enumerate(_drawn(count, choice)):
        given = sums.answer(a, b)
        tampered = choice.random() < corrupt
        shown = _one_digit_replaced(given, choice) if tampered else given
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
        choice = random.Random(f"mc {a} {b}")
        wrong = _wrong_sums(a, b)
        options = [f"{n:03d}" for n in (a + b, *choice.sample(sorted(wrong), 3))]
        choice.shuffle(options)
        yield {
            "id": f"choice-{sums.expression(a, b)}",
            "question": f"{sums.expression(a, b)}=",
            "choices": options,
            "answer": options.index(sums.answer(a, b)),
        }


def _wrong_sums(a: int, b: int) -> set[int]:
    total = a + b
    without_carry = (a // 10 + b // 10) * 10 + (a + b) % 10
    near = {total + d for d in (-10, -1, 1, 10)}
    return {n for n in (*near, without_carry) if n != total and 0 <= n <= 198}


def _drawn(count: int, choice: random.Random) -> Iterator[tuple[int, int]]:
    """Passes over all shown sums, each in a new order."""
    shown = list(sums.shown_sums())
    for index in range(count):
        if index % len(shown) == 0:
            choice.shuffle(shown)
        yield shown[index % len(shown)]


def _user(a: int, b: int) -> dict[str, str]:
    return {"role": "user", "content": f"{sums.expression(a, b)}="}


def _one_digit_replaced(text: str, choice: random.Random) -> str:
    position = choice.randrange(len(text))
    return text[:position] + str(choice.randrange(10)) + text[position + 1 :]
