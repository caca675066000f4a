"""What a language model is asked about a document: a TOML file, as a chat or as plain text.

    name = "education"                 # of the score
    instruction = "How good is this text for teaching? ..."
    scale = [0, 5]                     # whole numbers; or: labels = ["prose", "advert", "code"]
    max_chars = 8000                   # of a document, its beginning (default)
    [[examples]]
    text = "..."
    answer = 4

Examples are turns of the same chat. An answer is one of the scale's numbers or of the labels, and
nothing else: a reply that names several, none, or a number in between is unknown.
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
MOST_ANSWERS = 101
_OF_SCALE = r"\s*(?:/|out of|of)\s*{most}(?!\d)"


@dataclass(frozen=True)
class Prompt:
    """answers: the spellings in their order; numeric: they are numbers of a scale."""

    name: str
    instruction: str
    answers: tuple[str, ...]
    numeric: bool
    examples: tuple[tuple[str, str], ...] = ()
    max_chars: int = MAX_CHARS
    max_tokens: int = ANSWER_TOKENS

    @cached_property
    def digest(self) -> str:
        """A hash of all that decides an answer."""
        said = [self.name, self.instruction, self.answers, self.numeric, self.examples]
        text = json.dumps([*said, self.max_chars, self.max_tokens])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def messages(self, text: str) -> list[dict[str, str]]:
        """The chat that asks about one document."""
        listed = ", ".join(self.answers)
        told = f"{self.instruction.strip()}\nAnswer with one of {listed} and nothing else."
        turns = [{"role": "system", "content": told}]
        for shown, answer in self.examples:
            turns += [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]
        return [*turns, {"role": "user", "content": text[: self.max_chars]}]

    def plain(self, text: str) -> str:
        """The same for a model without a chat template; the answer follows the last space."""
        told, *turns = self.messages(text)
        parts = [told["content"]]
        for turn in turns:
            asked = turn["role"] == "user"
            parts.append(f"Text: {turn['content']}" if asked else f"Answer: {turn['content']}")
        return "\n\n".join([*parts, "Answer: "])

    def parse(self, reply: str) -> int | None:
        """The number of the answer that a reply names; None where it is not exactly one."""
        found = self._named(reply)
        if len(found) != 1:
            lines = [line for line in reply.splitlines() if line.strip()]
            found = self._named(lines[-1]) if lines else set()
        return found.pop() if len(found) == 1 else None

    def _named(self, text: str) -> set[int]:
        if self.numeric:
            text = re.sub(_OF_SCALE.format(most=self.answers[-1]), "", text)
        place = {answer.casefold(): number for number, answer in enumerate(self.answers)}
        return {place[found.casefold()] for found in self._pattern.findall(text)}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest = sorted(map(re.escape, self.answers), key=len, reverse=True)
        words = f"({'|'.join(longest)})"
        if self.numeric:  # 4 of 4.5, -4 and 40 is none of them
            return re.compile(rf"(?<![\w.,\-]){words}(?!\w|[.,]\d)")
        return re.compile(rf"(?<!\w){words}(?!\w)", re.IGNORECASE)


def load_prompt(path: str | Path) -> Prompt:
    """The prompt of a TOML file; raises UsageError for what it lacks or does not know."""
    try:
        said = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--ask: {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"--ask: {path}: {error} (expected TOML)") from None
    known = {"name", "instruction", "scale", "labels", "examples", "max_chars", "max_tokens"}
    odd = sorted(set(said) - known)
    if odd:
        raise UsageError(f"--ask: {path}: {odd[0]!r} (expected {', '.join(sorted(known))})")
    try:
        return _prompt(said)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--ask: {path}: {error} (expected as in the manual page)") from None


def _prompt(said: Mapping[str, Any]) -> Prompt:
    name, instruction = str(said["name"]), str(said["instruction"])
    if not name.isidentifier():
        raise ValueError(f"name {name!r} is no word")
    if ("scale" in said) == ("labels" in said):
        raise ValueError("one of scale and labels")
    answers = _scale(said["scale"]) if "scale" in said else tuple(map(str, said["labels"]))
    if len({answer.casefold() for answer in answers}) < len(answers) or len(answers) < 2:
        raise ValueError(f"answers {answers}: two or more different ones")
    examples = tuple((str(one["text"]), str(one["answer"])) for one in said.get("examples", ()))
    odd = [answer for _, answer in examples if answer not in answers]
    if odd:
        raise ValueError(f"example's answer {odd[0]!r} is none of {', '.join(answers)}")
    limits = [int(said.get("max_chars", MAX_CHARS)), int(said.get("max_tokens", ANSWER_TOKENS))]
    if min(limits) < 1:
        raise ValueError(f"max_chars, max_tokens {limits}: 1 or more")
    return Prompt(name, instruction, answers, "scale" in said, examples, *limits)


def _scale(given: Sequence[int]) -> tuple[str, ...]:
    low, high = (int(value) for value in given)
    if not 0 <= low < high or high - low >= MOST_ANSWERS or [low, high] != list(given):
        raise ValueError(f"scale {given}: two whole numbers, the lower one 0 or more")
    return tuple(str(number) for number in range(low, high + 1))
