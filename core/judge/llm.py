"""A language model as judge, item by item, through any OpenAI-compatible server.

Each call asks about `items_per_call` items of one response; `votes` calls decide by majority. A
call that fails after all retries, an unreadable reply and a tie of votes leave items UNKNOWN. Every
verdict is paid for once: the client's cache holds every call whose reply has all its verdicts.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from sabia.core.generate.calls import ChatRequest, ChatResponse
from sabia.core.generate.client import Client
from sabia.core.judge.prompt import VERSION, judge_messages, parse_verdicts, reply_schema
from sabia.core.judge.rubric import Item
from sabia.core.judge.verdict import Verdict
from sabia.core.options.model_calls import RubricJudge

SEED = 0  # of the order of items; part of the key of cached calls


@dataclass(frozen=True)
class Question:
    """One response to be judged on some items."""

    messages: Sequence[Mapping[str, Any]]
    response: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class AskedItems:
    """A call about some items of a question that has been started."""

    items: tuple[Item, ...]
    response: Future[ChatResponse]


class Judge:
    """Requests verdicts from a client."""

    def __init__(self, client: Client, options: RubricJudge | None = None) -> None:
        self.client, self.options = client, options or RubricJudge()

    def verdicts(self, questions: Sequence[Question]) -> list[dict[str, Verdict]]:
        """For each question, a verdict by item id (UNKNOWN if there is none).

        Raises the client's errors: server down, all requests refused, or a cost limit reached.
        """
        return self.collect([self.submit(question) for question in questions])

    def submit(self, question: Question) -> list[AskedItems]:
        """Start the calls about a question; with several items in a call, their order is drawn
        again for each vote."""
        step = self.options.judge_items_per_call
        calls = []
        for vote in range(self.options.judge_votes):
            items = list(question.items)
            if step > 1:
                random.Random(f"{SEED} {vote} {question.response}").shuffle(items)
            for start in range(0, len(items), step):
                part = tuple(items[start : start + step])
                request = self._request(question, part, vote)
                calls.append(AskedItems(part, self.client.submit(request, partial(has_all, part))))
        return calls

    def collect(self, asked: Sequence[Sequence[AskedItems]]) -> list[dict[str, Verdict]]:
        """Wait for the calls of `submit`; returns what `verdicts` does."""
        responses = iter(self.client.answers([call.response for calls in asked for call in calls]))
        return [self._verdicts(calls, responses) for calls in asked]

    @staticmethod
    def _verdicts(
        calls: Sequence[AskedItems], responses: Iterator[ChatResponse]
    ) -> dict[str, Verdict]:
        votes: dict[str, list[Verdict]] = {}
        for call in calls:
            text = next(responses).text or ""
            for item, verdict in parse_verdicts(text, call.items).items():
                votes.setdefault(item, []).append(verdict)
        return {item: majority(verdicts) for item, verdicts in votes.items()}

    def _request(self, question: Question, items: tuple[Item, ...], vote: int) -> ChatRequest:
        secret = f"{VERSION} {SEED}"
        return ChatRequest(
            judge_messages(question.messages, question.response, items, secret),
            max_tokens=self.options.judge_tokens,
            temperature=0.0 if self.options.judge_votes == 1 else 1.0,
            seed=SEED,
            response_format=_response_format(self.options.judge_format, items),
            vote=vote,
        )


def has_all(items: Sequence[Item], reply: str) -> bool:
    """Whether a reply has a verdict on every item."""
    return Verdict.UNKNOWN not in parse_verdicts(reply, items).values()


def _response_format(name: str, items: tuple[Item, ...]) -> dict[str, Any] | None:
    if name == "json-object":
        return {"type": "json_object"}
    if name == "json-schema":
        schema = {"name": "verdicts", "strict": True, "schema": reply_schema(items)}
        return {"type": "json_schema", "json_schema": schema}
    return None


def majority(votes: Sequence[Verdict]) -> Verdict:
    """The verdict of more than half of the votes that have one; UNKNOWN on a tie or without any."""
    counts = Counter(vote for vote in votes if vote is not Verdict.UNKNOWN)
    met, unmet = counts[Verdict.MET], counts[Verdict.UNMET]
    return Verdict.of(None if met == unmet else met > unmet)
