"""The prompt that asks a language model about a document: a TOML file, as chat or plain text.

    name = "education"                 # of the score
    instruction = "How good is this text for teaching? ..."
    scale = [0, 5]                     # whole numbers; or: labels = ["prose", "advert", "code"]
    max_chars = 8000                   # of a document, from its beginning (default)
    [[examples]]
    text = "..."
    answer = 4

Examples are turns of the same chat. An answer is one of the scale's numbers or of the labels, and
nothing else: a reply with several answers, none, or a number in between counts as unknown.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError

MAX_CHARS = 8_000
ANSWER_TOKENS = 16
MAX_ANSWERS = 101
_OF_SCALE = r"\s*(?:/|out of|of)\s*{most}(?!\d)"


@dataclass(frozen=True)
class Prompt:
    """answers: their spellings in order; numeric: they are the numbers of a scale."""

    name: str
    instruction: str
    answers: tuple[str, ...]
    numeric: bool
    examples: tuple[tuple[str, str], ...] = ()
    max_chars: int = MAX_CHARS
    max_tokens: int = ANSWER_TOKENS

    @cached_property
    def digest(self) -> str:
        """A hash of everything that decides an answer."""
        fields = [self.name, self.instruction, self.answers, self.numeric, self.examples]
        text = json.dumps([*fields, self.max_chars, self.max_tokens])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def messages(self, text: str) -> list[dict[str, str]]:
        """The chat that asks about one document."""
        listed = ", ".join(self.answers)
        task = f"{self.instruction.strip()}\nAnswer with one of {listed} and nothing else."
        turns = [{"role": "system", "content": task}]
        for shown, answer in self.examples:
            turns += [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]
        return [*turns, {"role": "user", "content": text[: self.max_chars]}]

    def plain(self, text: str) -> str:
        """The same for a model without a chat template; the answer follows the last space."""
        system, *turns = self.messages(text)
        parts = [system["content"]]
        for turn in turns:
            label = "Text" if turn["role"] == "user" else "Answer"
            parts.append(f"{label}: {turn['content']}")
        return "\n\n".join([*parts, "Answer: "])

    def parse(self, reply: str) -> int | None:
        """The number of the answer that a reply names; None where it is not exactly one."""
        numbers = self._numbers_in(reply)
        if len(numbers) != 1:  # a model that reasons first writes its answer into the last line
            lines = [line for line in reply.splitlines() if line.strip()]
            numbers = self._numbers_in(lines[-1]) if lines else set()
        return numbers.pop() if len(numbers) == 1 else None

    def _numbers_in(self, text: str) -> set[int]:
        """The numbers of all answers in a text."""
        if self.numeric:  # '4 out of 5' is only a 4
            text = re.sub(_OF_SCALE.format(most=self.answers[-1]), "", text)
        number_of = {answer.casefold(): number for number, answer in enumerate(self.answers)}
        return {number_of[match.casefold()] for match in self._pattern.findall(text)}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest = sorted(map(re.escape, self.answers), key=len, reverse=True)
        words = f"({'|'.join(longest)})"
        if self.numeric:  # 4.5, -4 and 40 do not contain the answer 4
            return re.compile(rf"(?<![\w.,\-]){words}(?!\w|[.,]\d)")
        return re.compile(rf"(?<!\w){words}(?!\w)", re.IGNORECASE)


def load_prompt(path: str | Path) -> Prompt:
    """The prompt of a TOML file; raises UsageError for missing or unknown keys."""
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--ask: {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--ask: {path}: {error} (expected TOML)") from None
    known = {"name", "instruction", "scale", "labels", "examples", "max_chars", "max_tokens"}
    odd = sorted(set(table) - known)
    if odd:
        raise UsageError(f"--ask: {path}: {odd[0]!r} (expected {', '.join(sorted(known))})")
    try:
        return _prompt(table)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--ask: {path}: {error} (expected as in the manual page)") from None


def _prompt(table: Mapping[str, Any]) -> Prompt:
    name, instruction = str(table["name"]), str(table["instruction"])
    if not name.isidentifier():
        raise ValueError(f"name {name!r} is not a word of letters, digits and _")
    if ("scale" in table) == ("labels" in table):
        raise ValueError("expected either scale or labels")
    answers = _scale(table["scale"]) if "scale" in table else tuple(map(str, table["labels"]))
    if len({answer.casefold() for answer in answers}) < len(answers) or len(answers) < 2:
        raise ValueError(f"answers {answers}: expected two or more different ones")
    examples = tuple((str(row["text"]), str(row["answer"])) for row in table.get("examples", ()))
    odd = [answer for _, answer in examples if answer not in answers]
    if odd:
        raise ValueError(f"example's answer {odd[0]!r} is not one of {', '.join(answers)}")
    limits = [int(table.get("max_chars", MAX_CHARS)), int(table.get("max_tokens", ANSWER_TOKENS))]
    if min(limits) < 1:
        raise ValueError(f"max_chars, max_tokens {limits}: expected 1 or more")
    return Prompt(name, instruction, answers, "scale" in table, examples, *limits)


def _scale(given: Sequence[int]) -> tuple[str, ...]:
    low, high = (int(value) for value in given)
    if not 0 <= low < high or high - low >= MAX_ANSWERS or [low, high] != list(given):
        raise ValueError(f"scale {given}: expected two whole numbers, the lower one 0 or more")
    return tuple(str(number) for number in range(low, high + 1))
