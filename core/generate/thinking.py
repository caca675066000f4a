"""A budget of reasoning: at its end the sample ends, or gets the tokens that close the reasoning.

Those tokens are not sampled; a completion names their places, and a trainer must not learn them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.generate.call_formats import REASONING
from sabia.core.generate.reasoning import opened_by_prompt
from sabia.core.options.chat_template import Reasoning
from sabia.core.text.tokenize.tokenizer import Tokenizer

BUDGET, OVERFLOW = "thinking_budget", "thinking_overflow"  # fields of a request
FORCED = "forced_tokens"  # field of a choice: places of tokens that were not sampled
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class ThinkingBudget:
    """At most `tokens` of a sample before its reasoning is closed by the text `closing`.

    opening: the text that begins the reasoning; '' if the prompt has begun it. A sample that begins
    otherwise does not reason. forced: token ids that are appended at the end of the budget; none
    where the sample ends there.
    """

    tokens: int
    opening: str
    closing: str
    forced: tuple[int, ...]


def thinking_budget(tokens: int, prompt: str, tokenizer: Tokenizer, closes: bool) -> ThinkingBudget:
    """The budget of samples of a rendered prompt. closes: force the closing text at its end.

    Raises UsageError where the chat template has no reasoning.
    """
    if tokens < 1:
        raise UsageError(f"thinking budget: {tokens} tokens (expected 1 or more)")
    opening, closing = "", opened_by_prompt(prompt)
    if not closing:
        template = tokenizer.chat_template or ""
        marks = [(begin, end) for begin, end, _ in REASONING if begin in template]
        if not marks:
            raise UsageError("thinking budget: the model's chat template has no reasoning")
        opening, closing = marks[0]
    forced = tuple(tokenizer.encode(closing)) if closes else ()
    return ThinkingBudget(tokens, opening, closing, forced)


def thinking_fields(options: Reasoning) -> dict[str, object]:
    """The fields of a request that ask for the budget of the options, as `sabia serve` reads them;
    none without one."""
    if options.thinking_budget is None:
        return {}
    return {BUDGET: options.thinking_budget, OVERFLOW: options.thinking_overflow}


def asked_budget(
    fields: Mapping[str, Any], prompt: str, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """The budget that fields of a request ask for; see `thinking_budget`."""
    if BUDGET not in fields:
        return None
    return thinking_budget(fields[BUDGET], prompt, tokenizer, fields[OVERFLOW] == "close")


@dataclass
class Thought:
    """The reasoning of one sample so far. pending: tokens to append; places: of those that were;
    over: the sample ends here."""

    budget: ThinkingBudget
    pending: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    over: bool = False
    open: bool = True
    seen: int = 0

    def take(self, tokens: Sequence[int], decode: Decode) -> None:
        """All tokens of the sample, of which at most the last is new."""
        if len(tokens) == self.seen:
            return
        self.seen = len(tokens)
        if self.pending:
            self.pending.pop(0)
            self.places.append(len(tokens) - 1)
            self.open = bool(self.pending)
            return
        if not self.open:
            return
        budget = self.budget
        begins = len(tokens) <= 2 * len(budget.opening.encode())  # of at least a byte each
        if budget.opening and begins:
            text = decode(tokens).lstrip().removesuffix("\ufffd")
            if not (text.startswith(budget.opening) or budget.opening.startswith(text)):
                self.open = False
                return
        if budget.closing in decode(tokens[-len(budget.closing.encode()) - 4 :]):
            self.open = False
        elif len(tokens) >= budget.tokens:
            self.pending, self.over = list(budget.forced), not budget.forced
