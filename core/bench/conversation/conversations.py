"""Conversations with a model: a user's turns, the model's own answers between them, and its calls.

All conversations of a sample go on together, one request each at a time. An answer is text: where a
message calls tools, their results follow it and the model is asked again, at most `max_steps` times
before each answer. A turn without an answer ends its conversation: the later ones have none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from sabia.core.bench.answers import Answer, joined
from sabia.core.bench.conversation.model_tools import ModelTools
from sabia.core.bench.items import Item
from sabia.core.bench.task import Task
from sabia.core.notes import progress

Ask = Callable[[Sequence[Item], int], Sequence[Answer]]  # prompts and the number of the sample


@dataclass
class _Conversation:
    """A conversation; items: one for each turn, or the only one."""

    items: list[Item]
    asked: list[str]
    messages: list[dict[str, Any]]
    answers: list[Answer] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0

    @classmethod
    def of(cls, items: Sequence[Item]) -> "_Conversation":
        first = items[0]
        *opening, user = first.as_messages[: len(first.messages) or 1]
        later = [item.messages[-1]["content"] for item in items[1:]]
        return cls([*items], [user["content"], *first.further, *later], [dict(m) for m in opening])

    @property
    def prompt(self) -> Item:
        """What the model is asked next; its id names turn and step."""
        turn = len(self.answers)
        own = self.items[min(turn, len(self.items) - 1)].id
        name = f"{own} turn {turn + 1}" if len(self.items) < len(self.asked) else own
        name += f" step {self.steps + 1}" if self.steps else ""
        return Item(name, messages=tuple(dict(message) for message in self.messages))


def hold(
    task: Task, items: Sequence[Item], samples: int, ask: Ask, tools: ModelTools | None = None
) -> list[Answer]:
    """The answers to the items, in their order and for each sample."""
    made: dict[str, list[Answer]] = {item.id: [] for item in items}
    groups = [[*group] for _, group in groupby(items, lambda item: item.conversation or item.id)]
    for sample in range(samples):
        conversations = [_Conversation.of(group) for group in groups]
        turns = max(len(one.asked) for one in conversations)
        with progress(turns, task.name, "turns") as bar:
            for turn in range(turns):
                due = [one for one in conversations if len(one.asked) > turn and _goes_on(one)]
                for one in due:
                    one.messages.append({"role": "user", "content": one.asked[turn]})
                _take_turn(task, due, sample, ask, tools)
                bar.advance()
        for one in conversations:
            for answer in _of_items(one, sample):
                made[answer.item_id].append(answer)
    return [answer for answers in made.values() for answer in answers]


def _goes_on(one: _Conversation) -> bool:
    return not one.answers or not one.answers[-1].missing


def _take_turn(
    task: Task, due: Sequence[_Conversation], sample: int, ask: Ask, tools: ModelTools | None
) -> None:
    """The answer of each conversation to its last message."""
    for one in due:
        one.calls, one.tokens, one.steps = [], 0, 0
    while due:
        going_on = []
        for one, answer in zip(due, ask([one.prompt for one in due], sample), strict=True):
            one.tokens += answer.tokens
            called = answer.message.get("tool_calls") if tools and not answer.missing else None
            if tools and called and one.steps < task.max_steps:
                one.steps += 1
                _call(one, answer, called, tools)
                going_on.append(one)
                continue
            if called and not answer.text.strip():
                answer = replace(answer, missing=f"no answer after {task.max_steps} steps of calls")
            before = tuple(dict(message) for message in one.messages)
            detail = {"calls": one.calls} if one.calls else {}
            one.answers.append(
                replace(answer, tokens=one.tokens, messages=before, more={**answer.more, **detail})
            )
            one.messages.append({"role": "assistant", "content": answer.text})
        due = going_on


def _call(
    one: _Conversation, answer: Answer, called: Sequence[Mapping[str, Any]], tools: ModelTools
) -> None:
    """Add a message with calls, and what they give."""
    calls = []
    for number, call in enumerate(called):
        name = call.get("id") or f"call_{one.steps}_{number}"
        calls.append({"id": name, "type": "function", "function": call.get("function")})
    one.messages.append({"role": "assistant", "content": answer.text, "tool_calls": calls})
    for call in calls:
        made, result = tools.answer(call)
        one.calls.append({"step": one.steps, **made, "result": result})
        function = call["function"] if isinstance(call["function"], Mapping) else {}
        one.messages.append(
            {"role": "tool", "tool_call_id": call["id"], "name": str(function.get("name")),
             "content": result}
        )  # fmt: skip


def _of_items(one: _Conversation, sample: int) -> list[Answer]:
    """The answers of a conversation by its items."""
    missing = one.answers[-1].missing
    if len(one.items) == 1 < len(one.asked):
        text = joined([answer.text for answer in one.answers])
        calls = [call for answer in one.answers for call in answer.more.get("calls", ())]
        last = one.answers[-1]
        reasoning = "\n\n".join(filter(None, (answer.reasoning for answer in one.answers)))
        whole = replace(
            last, item_id=one.items[0].id, sample=sample, text=text, reasoning=reasoning,
            tokens=sum(answer.tokens for answer in one.answers),
            messages=(), more={"calls": calls} if calls else {},
            missing=f"turn {len(one.answers)}: {missing}" if missing else "",
        )  # fmt: skip
        return [whole]
    answers = [
        replace(answer, item_id=item.id, sample=sample)
        for item, answer in zip(one.items, one.answers, strict=False)
    ]
    reason = f"turn {len(one.answers)} has no answer"
    return answers + [
        Answer(item.id, sample, "", missing=reason) for item in one.items[len(answers) :]
    ]
