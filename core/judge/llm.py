"""A language model as judge, item by item, through any OpenAI-compatible server.

Each call asks about `items_per_call` items of one response; `votes` calls decide by majority. A
call that fails after all retries, an unreadable reply and a tie of votes leave items UNKNOWN. An
item that depends on others is asked about once they are met by this judge's own verdicts. Every
verdict is paid for once: the client's cache holds every call whose reply has all its verdicts.
"""

import contextlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sabia.core.errors import Failed, Unavailable
from sabia.core.generate.calls import ChatRequest, ChatResponse
from sabia.core.generate.client import Client, Reader
from sabia.core.judge.lookup import Consultation, LookupTable
from sabia.core.judge.prompt import VERSION, judge_messages, parse_verdicts, reply_schema
from sabia.core.judge.rubric import Item, Rubric
from sabia.core.judge.verdict import Verdict
from sabia.core.options.model_calls import RubricJudge

NO_TOOLS = (
    "the judge's `lookup` needs a server with tool calls (vLLM: --enable-auto-tool-choice; "
    "llama.cpp: --jinja), or remove it from the judge's table"
)
REFUSES_TOOLS = re.compile(r"(?i)\btools?\b|HTTP (?:400|422)\b")
SEED = 0  # of the order of items; part of the key of cached calls


@dataclass(frozen=True)
class Question:
    """One response to be judged on the items of a rubric that are for a judge.

    verified: the verdicts on the other items.
    """

    messages: Sequence[Mapping[str, Any]]
    response: str
    rubric: Rubric
    verified: Mapping[str, Verdict] = field(default_factory=dict)

    def ready(self, verdicts: Mapping[str, Verdict]) -> tuple[Item, ...]:
        """The items without a verdict whose conditions are met."""
        settled = self.rubric.settle({**self.verified, **verdicts})
        return tuple(
            item
            for item in self.rubric.items
            if item.kind == "llm"
            and item.id not in verdicts
            and all(settled[name] is Verdict.MET for name in item.depends_on)
        )


@dataclass(frozen=True)
class AskedCall:
    """A call that has been started; lookups: those that its model has made; items: of a question
    that it is about."""

    response: Future[ChatResponse]
    lookups: Sequence[Mapping[str, Any]] = ()
    items: tuple[Item, ...] = ()


@dataclass(frozen=True)
class AskedQuestion:
    """A question and its calls that have been started."""

    question: Question
    calls: Sequence[AskedCall]


@dataclass(frozen=True)
class Judgement:
    """Verdicts by item id on the items that were asked about, and the lookups that were made."""

    verdicts: Mapping[str, Verdict]
    lookups: Sequence[Mapping[str, Any]] = ()


class Judge:
    """Requests verdicts from a client, whose model may look things up in a table."""

    def __init__(
        self, client: Client, options: RubricJudge | None = None, table: LookupTable | None = None
    ) -> None:
        self.client, self.options, self.table = client, options or RubricJudge(), table

    def submit(self, question: Question) -> AskedQuestion:
        """Start the calls about the items of a question that have no condition."""
        return self._asked(question, {})

    def collect(self, asked: Sequence[AskedQuestion]) -> list[Judgement]:
        """Wait for the calls of `submit`, and make those about items whose conditions are met; for
        each question, a verdict by id of the items asked about (UNKNOWN without one).

        Raises the client's errors: server down, all requests refused, or a cost limit reached.
        """
        verdicts: list[dict[str, Verdict]] = [{} for _ in asked]
        lookups: list[list[Mapping[str, Any]]] = [[] for _ in asked]
        wait = self.client.answers
        while any(one.calls for one in asked):
            futures = [call.response for one in asked for call in one.calls]
            with self._explained():
                responses = iter(wait(futures))
            wait = self.client.wait  # one refused call among the later ones does not end the run
            for one, own, made in zip(asked, verdicts, lookups, strict=True):
                own |= self._verdicts(one.calls, responses)
                for call in one.calls:
                    ids = [item.id for item in call.items]
                    made += [{"items": ids, **lookup} for lookup in call.lookups]
            asked = [
                self._asked(one.question, own) if one.calls else one
                for one, own in zip(asked, verdicts, strict=True)
            ]
        return [Judgement(*pair) for pair in zip(verdicts, lookups, strict=True)]

    def ask(self, request: ChatRequest, reader: Reader, items: tuple[Item, ...] = ()) -> AskedCall:
        """Start a call about items, with the tool of the table if there is one."""
        if self.table is None:
            return AskedCall(self.client.submit(request, reader), items=items)
        consultation = Consultation(self.table, request)
        with self._explained():
            future = self.client.submit(consultation.request, reader, consultation.follow)
        return AskedCall(future, consultation.made, items)

    def responses(self, calls: Sequence[AskedCall]) -> list[ChatResponse]:
        """Wait for calls of `ask`."""
        with self._explained():
            return self.client.answers([call.response for call in calls])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in the error of a server that refuses requests with tools what it lacks."""
        try:
            yield
        except Failed as error:
            text = str(error)
            if self.table is None or NO_TOOLS in text or not REFUSES_TOOLS.search(text):
                raise
            kind = Unavailable if isinstance(error, Unavailable) else Failed
            raise kind(f"{text}; {NO_TOOLS}") from error

    def _asked(self, question: Question, verdicts: Mapping[str, Verdict]) -> AskedQuestion:
        """The calls about the items that are ready."""
        parts = self._parts(question, question.ready(verdicts))
        calls = [self.ask(one, partial(has_all, part), part) for part, one in parts]
        return AskedQuestion(question, calls)

    def requests(self, question: Question) -> Iterator[ChatRequest]:
        """The calls about a question if all conditions of items are met, without lookups."""
        items = tuple(item for item in question.rubric.items if item.kind == "llm")
        return (request for _, request in self._parts(question, items))

    def _parts(
        self, question: Question, ready: tuple[Item, ...]
    ) -> Iterator[tuple[tuple[Item, ...], ChatRequest]]:
        """Items and the call about them; with several items in a call, their order is drawn again
        for each vote."""
        step = self.options.judge_items_per_call
        for vote in range(self.options.judge_votes if ready else 0):
            items = list(ready)
            if step > 1:
                random.Random(f"{SEED} {vote} {question.response}").shuffle(items)
            for start in range(0, len(items), step):
                part = tuple(items[start : start + step])
                yield part, self._request(question, part, vote)

    @staticmethod
    def _verdicts(
        calls: Sequence[AskedCall], responses: Iterator[ChatResponse]
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
