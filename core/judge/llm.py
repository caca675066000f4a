"""A language model as judge, item by item, through any OpenAI-compatible server.

Each call asks about `items_per_call` items of one response; `votes` calls decide by majority. A
call that fails after all retries, an unreadable reply and a tie of votes leave items UNKNOWN. Every
verdict is paid for once: the client's cache holds every finished call.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sabia.core.generate.calls import ChatRequest
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
class _Call:
    question: int
    items: tuple[Item, ...]
    request: ChatRequest


class Judge:
    """Requests verdicts from a client."""

    def __init__(self, client: Client, options: RubricJudge | None = None) -> None:
        self.client, self.options = client, options or RubricJudge()

    def verdicts(self, questions: Sequence[Question]) -> list[dict[str, Verdict]]:
        """For each question, a verdict by item id (UNKNOWN if there is none).

        Raises the client's errors: server down, all requests refused, or a cost limit reached.
        """
        calls = [call for number, q in enumerate(questions) for call in self._calls(number, q)]
        responses = self.client.chat([call.request for call in calls])
        votes: list[dict[str, list[Verdict]]] = [{} for _ in questions]
        for call, response in zip(calls, responses, strict=True):
            item_verdicts = parse_verdicts(response.text or "", call.items)
            for item, verdict in item_verdicts.items():
                votes[call.question].setdefault(item, []).append(verdict)
        return [{item: majority(seen) for item, seen in vote.items()} for vote in votes]

    def _calls(self, number: int, question: Question) -> Iterator[_Call]:
        """The calls about a question; with several items in a call, their order is drawn again for
        each vote."""
        step = self.options.judge_items_per_call
        for vote in range(self.options.judge_votes):
            items = list(question.items)
            if step > 1:
                random.Random(f"{SEED} {vote} {question.response}").shuffle(items)
            for start in range(0, len(items), step):
                part = tuple(items[start : start + step])
                yield _Call(number, part, self._request(question, part, vote))

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
