"""Pages with worked problems, demonstrations and held-out problems for rewrite_claim.sh.

A problem is the last digit of a sum of several digits: each digit changes the answer, and all ten
answers are equally frequent, so that it cannot be guessed from a part of the problem. A page states
the answer first and then the steps, as many web pages do; a demonstration is a conversation whose
answer has the steps first. No problem is drawn twice. The same seed gives the same files:
pages.jsonl, few.jsonl and many.jsonl (few.jsonl is its beginning), held-out.jsonl.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUESTIONS = (
    "What is the last digit of {sum}?",
    "Find the last digit of {sum}: which one is it?",
    "Which digit does {sum} end in?",
)


@dataclass(frozen=True)
class Problem:
    """A question, the steps that solve it, and the answer, a digit."""

    question: str
    steps: str
    answer: int

    @property
    def conclusion(self) -> str:
        """The sentence that states the answer."""
        return f"The answer is {self.answer}."


def solved(question: str, digits: tuple[int, ...]) -> Problem:
    """The problem of these digits with one step for each digit but the first."""
    kept, steps = digits[0], []
    for number, digit in enumerate(digits[1:], 1):
        word = "First" if number == 1 else "Finally" if number == len(digits) - 1 else "Then"
        total = kept + digit
        steps.append(f"{word} {kept}+{digit}={total}, keep {total % 10}.")
        kept = total % 10
    return Problem(question.format(sum="+".join(map(str, digits))), " ".join(steps), kept)


def problems(rng: random.Random, length: int) -> Iterator[Problem]:
    """Problems of so many digits without end, no digits twice."""
    used: set[tuple[int, ...]] = set()
    while True:
        digits = tuple(rng.randrange(10) for _ in range(length))
        if digits not in used:
            used.add(digits)
            yield solved(rng.choice(QUESTIONS), digits)


def demonstration(problem: Problem) -> dict[str, Any]:
    """A conversation record."""
    answer = f"{problem.steps} {problem.conclusion}"
    return {
        "messages": [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": answer},
        ]
    }


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write the files of a seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--digits", type=int, default=5, help="of a problem")
    parser.add_argument("--pages", type=int, required=True)
    parser.add_argument("--few", type=int, required=True, help="demonstrations")
    parser.add_argument("--many", type=int, required=True, help="demonstrations")
    parser.add_argument("--held-out", type=int, required=True, help="problems")
    given = parser.parse_args()
    if (wanted := given.pages + given.many + given.held_out) > 10**given.digits // 2:
        parser.error(f"{wanted} problems (expected at most half of the 10^{given.digits})")
    drawn = problems(random.Random(given.seed), given.digits)
    held_out = [next(drawn) for _ in range(given.held_out)]
    shown = [demonstration(next(drawn)) for _ in range(given.many)]
    pages = [next(drawn) for _ in range(given.pages)]
    items = ({"question": p.question, "answer": str(p.answer)} for p in held_out)
    write(given.folder / "held-out.jsonl", items)
    write(given.folder / "few.jsonl", shown[: given.few])
    write(given.folder / "many.jsonl", shown)
    texts = ({"text": f"{p.question} {p.conclusion} {p.steps}"} for p in pages)
    write(given.folder / "pages.jsonl", texts)


if __name__ == "__main__":
    main()
