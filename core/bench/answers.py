"""Answers: a model's output for each item, generated here or read from records.

Records have a column response, completion, text or answer, and the item's id in `id`, `item_id`,
`prompt_id` or by the task's id template; rows that repeat an id are samples 0, 1, … of it. A column
`model` names the model. Reasoning is taken out of an answer; a text that ends in it is no answer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from sabia.core import notes
from sabia.core.bench.checks.instruction_checks import check_scores
from sabia.core.bench.conversation.served_reasoning import closings, reasoning_of
from sabia.core.bench.items import Item, Message, listed, render
from sabia.core.bench.kept_results import KeptResults
from sabia.core.bench.metrics import (
    NO_ANSWER,
    NO_VERDICT,
    Match,
    exact_matches,
    label_statistics,
    word_f1,
)
from sabia.core.bench.score_rows import Score, scores_of
from sabia.core.bench.task import METRICS_OF_LABELS, Task
from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.generate.calls import ChatRequest
from sabia.core.generate.chat import render as render_chat
from sabia.core.generate.chat_variables import server_variables
from sabia.core.generate.client import Client
from sabia.core.generate.reasoning import opened_by_prompt, split_reasoning
from sabia.core.generate.requests import Completion, Request
from sabia.core.generate.thinking import asked_budget, thinking_fields
from sabia.core.generate.turn_parser import parse_turn
from sabia.core.notes import progress
from sabia.core.options.eval import EvalOptions
from sabia.core.parallel.split_interface import SplitModel
from sabia.core.text.tokenize.tokenizer import Tokenizer

TEXT_COLUMNS = ("response", "completion", "output", "text", "answer")
ID_COLUMNS = ("id", "item_id", "prompt_id")
QUESTION_CHARACTERS = 500
UNCLOSED = "the text ends inside of the reasoning"
FILTERED = "the server's filter withheld it"


@dataclass(frozen=True)
class Answer:
    """One sample of one item. messages: the conversation it answers, if the records have it.

    text: without the reasoning. missing: why there is no answer, if there is none. message: as
    sampled, where the model could call tools. more: details, such as the calls that were made.
    """

    item_id: str
    sample: int
    text: str
    finish_reason: str = ""
    tokens: int = 0
    messages: tuple[Message, ...] = ()
    reasoning: str = ""
    missing: str = ""
    message: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)


def answer_of(
    item_id: str, sample: int, text: str, closing: str = "", reasoning: str = "", **more: Any
) -> Answer:
    """An answer from a sampled text; closing: of the reasoning that the prompt opened.

    reasoning: what a server has taken out of the text.
    """
    answer, inside = split_reasoning(text, closing)
    missing = UNCLOSED if answer is None or (reasoning and not answer.strip()) else ""
    reasoning = "\n\n".join(filter(None, (reasoning, inside)))
    return Answer(item_id, sample, answer or "", reasoning=reasoning, missing=missing, **more)


def sampling_of(task: Task, options: EvalOptions) -> tuple[int, float]:
    """(samples, temperature) for a task; raises UsageError for several greedy samples, which would
    be equal."""
    samples = options.samples or task.samples
    temperature = task.temperature if options.temperature is None else options.temperature
    if samples > 1 and temperature == 0:
        raise UsageError(
            f"{task.name}: {samples} samples at temperature 0 are all the same; "
            "give --temperature 1 or --samples 1"
        )
    return samples, temperature


def generate(
    engine: Callable[[], Any], context: int, tokenizer: Tokenizer, task: Task,
    items: Sequence[Item], options: EvalOptions, variables: Mapping[str, Any], kept: KeptResults,
    only: int | None = None, tools: Sequence[Mapping[str, Any]] = (),
    split: SplitModel | None = None,
) -> list[Answer]:  # fmt: skip
    """Answers by the local engine, in the order of the items; variables: of the chat template.

    only: this sample and no other. tools: what the model may call, whose calls are not made here.

    Answers that are kept are not generated again, and new ones are kept when they are finished; the
    engine, of a model of `context` positions, is opened if there are any. Equal prompts have one
    greedy answer. split: the processes that generate them together, of which the leading one keeps
    them.

    Random numbers are a function of seed, task, item and sample, so two models use the same ones.
    Prompts too long for the model are truncated on the left, with a warning.
    """
    samples, temperature = sampling_of(task, options)
    prompt_limit = context - task.max_new_tokens
    if prompt_limit < 1:
        raise UsageError(
            f"{task.name}: max_new_tokens {task.max_new_tokens} do not fit the model's context of "
            f"{context} (expected at most {max(context - 1, 0)}, in a copy of the task file)"
        )
    given = {**variables, "tools": [*tools]} if tools else variables
    encoded = [prompt_ids(item, tokenizer, given) for item in items]
    if cut := sum(len(ids) > prompt_limit for ids in encoded):
        notes.warn(
            f"{task.name}: {cut} of {len(items)} prompts cut on the left to {prompt_limit} tokens"
        )
    thinking = thinking_fields(options)
    requests = [
        Request(ids[-prompt_limit:], task.max_new_tokens, temperature, top_p=task.top_p,
                stop=task.stop, seed=options.seed, n=samples, id=f"{task.name}/{item.id}",
                only=None if only is None else (only,),
                thinking=asked_budget(thinking, tokenizer.decode(ids), tokenizer))
        for ids, item in zip(encoded, items, strict=True)
    ]  # fmt: skip
    # equal greedy requests are run once, under the name of the first
    sharing: dict[str, list[tuple[Request, str]]] = {}
    for request, item in zip(requests, items, strict=True):
        sharing.setdefault(kept.same(request), []).append((request, item.id))
    named = {asked[0][0].name: asked for asked in sharing.values()}
    closing = {
        item.id: opened_by_prompt(render_chat(item.messages, tokenizer, True, **given))
        for item in items
        if item.messages
    }
    order = {item.id: number for number, item in enumerate(items)}
    finished, left = list[Completion](), list[Request]()
    for request in (asked[0][0] for asked in sharing.values()):
        known = [kept.completion(request, sample) for sample in request.samples]
        finished += filter(None, known)
        if new := tuple(n for n, done in zip(request.samples, known, strict=True) if done is None):
            left.append(replace(request, only=new))
    if split:
        finished, left = split.agreed((finished, left))
    answers = []
    count = sum(len(request.samples) for request in requests)
    with progress(count, task.name, "answers") as bar:
        sampled = engine().stream(left) if left else ()
        for number, done in enumerate(chain(finished, sampled)):
            reason, asked = done.finish_reason, named[done.request_id]
            if number >= len(finished) and (split is None or split.leads):
                kept.keep_completion(asked[0][0], done)
            for _, name in asked:
                answer = answer_of(
                    name, done.sample, done.text, closing.get(name, ""), finish_reason=reason,
                    tokens=len(done.tokens),
                )  # fmt: skip
                if tools:
                    messages = items[order[name]].messages
                    message = parse_turn(done.text, messages, tokenizer, **given)
                    answer = _with_calls(answer, message)
                answers.append(answer)
            bar.advance(len(asked))
    return sorted(answers, key=lambda answer: (order[answer.item_id], answer.sample))


def _with_calls(answer: Answer, message: Mapping[str, Any]) -> Answer:
    """An answer whose message calls tools: its text is what it has besides the calls."""
    if not message.get("tool_calls"):
        return answer
    reasoning = str(message.get("reasoning_content") or answer.reasoning)
    text = str(message.get("content") or "")
    return replace(answer, text=text, reasoning=reasoning, missing="", message=message)


def prompt_ids(item: Item, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> list[int]:
    """Token ids of an item's prompt, with a generation prompt if it is a conversation."""
    if item.messages:
        return tokenizer.encode(render_chat(item.messages, tokenizer, True, **variables))
    return tokenizer.encode(item.text, bos=True)


def ask(
    client: Client, task: Task, items: Sequence[Item], options: EvalOptions,
    only: int | None = None, tools: Sequence[Mapping[str, Any]] = (),
) -> list[Answer]:  # fmt: skip
    """Answers by an OpenAI-compatible endpoint; raises Failed if one failed.

    only: this sample and no other. tools: what the model may call, whose calls are not made here.
    A request that the server refuses, or whose answer its filter withholds, has no answer, nor has
    a reply that ends inside of reasoning (`served_reasoning`).
    """
    samples, temperature = sampling_of(task, options)
    numbers = range(samples) if only is None else (only,)
    cells = [(item, sample) for item in items for sample in numbers]
    extra = server_variables(options.chat) | thinking_fields(options)
    extra |= {"tools": [*tools]} if tools else {}
    requests = [
        ChatRequest(item.as_messages, task.max_new_tokens, temperature, task.top_p, options.seed,
                    task.stop, vote=sample, extra=extra)
        for item, sample in cells
    ]  # fmt: skip
    replies = client.wait([client.submit(request) for request in requests])
    inside = closings(replies, extra, lambda request: client.wait([client.submit(request)])[0])
    answers = []
    for (item, sample), reply, closing in zip(cells, replies, inside, strict=True):
        reason = reply.finish_reason or ""
        if reply.refused or reason == "content_filter":
            text, missing = reply.text or "", reply.error or FILTERED
            answers.append(Answer(item.id, sample, text, reason, missing=missing))
            continue
        if reply.text is None and not (tools and reply.message.get("tool_calls")):
            raise Failed(
                f"{task.name}, item {item.id}: no answer from the endpoint ({reply.error}); "
                "answers so far are cached: run again"
            )
        answer = answer_of(
            item.id, sample, reply.text or "", closing, reasoning_of(reply), finish_reason=reason,
            tokens=reply.usage.completion_tokens,
        )  # fmt: skip
        answers.append(_with_calls(answer, reply.message) if tools else answer)
    return answers


def read_answers(
    task: Task, rows: Iterable[Mapping[str, Any]], name: str
) -> dict[str, list[Answer]]:
    """Answers by model; `name` is the model of rows without one."""
    answers: dict[str, list[Answer]] = {}
    seen: dict[tuple[str, str], int] = {}
    for number, row in enumerate(rows):
        model, item = str(row.get("model") or name), _item_id(task, row, number)
        column, messages = "turns", tuple[Message, ...]()
        texts: Sequence[tuple[str, Any]] = rows_of_turns(task, item, row)
        if not texts:
            named = [column for column in TEXT_COLUMNS if column in row]
            text = next((row[column] for column in named if row[column] is not None), None)
            if isinstance(text, list) and len(text) == 1:
                (text,) = text
            if not named:
                known = ", ".join(TEXT_COLUMNS)
                raise BadData(f"answers {name}, row {number}: no column of {known}")
            messages = tuple(
                {"role": m["role"], "content": m.get("content") or ""}
                for m in row.get("messages") or ()
            )
            column, texts = named[0], [(item, text)]
        for item, text in texts:
            sample = seen.get((model, item), 0)
            seen[model, item] = sample + 1
            made = Answer(item, sample, "", messages=messages, missing=f"{column} is null")
            if text is not None:
                made = answer_of(item, sample, str(text), messages=messages)
            answers.setdefault(model, []).append(made)
    return answers


def rows_of_turns(task: Task, name: str, row: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """(id, text) of the answers in a record: texts of all turns in `turns`, or in the first of its
    `choices`, as benchmarks in the form of MT-Bench keep them; none if it has neither."""
    turns = row.get("turns")
    if turns is None and (choices := row.get("choices")):
        turns = choices[0].get("turns")
    if not task.turns or turns is None:
        return []
    texts = [_text_of(turn) for turn in turns]
    if task.graded == "conversation":
        known = [text for text in texts if text is not None]
        return [(name, joined(known) if len(known) == len(texts) else None)]
    return [(f"{name}/{number}", text) for number, text in enumerate(texts, 1)]


def _text_of(turn: object) -> str | None:
    """The text of a turn, or of an object that holds it."""
    if isinstance(turn, Mapping):
        turn = turn.get("content", turn.get("response"))
    return None if turn is None else str(turn)


def joined(answers: Sequence[str]) -> str:
    """The answers of a conversation as one text, numbered where there are several."""
    if len(answers) == 1:
        return answers[0]
    return "\n\n".join(f"[{number}]\n{text}" for number, text in enumerate(answers, 1))


def with_earlier(pairs: Sequence[tuple[Item, Answer]]) -> list[tuple[Item, Answer]]:
    """The pairs, where answers to turns get the conversation that they stand in."""
    texts = {(item.id, answer.sample): answer for item, answer in pairs}
    made = []
    for item, answer in pairs:
        if item.conversation and not answer.messages and not answer.missing:
            messages, turn = list[Message](), 0
            for message in item.messages:
                before = texts.get((f"{item.conversation}/{turn}", answer.sample))
                if message["role"] == "user":
                    if before and not before.missing:
                        messages.append({"role": "assistant", "content": before.text})
                    turn += 1
                messages.append(message)
            answer = replace(answer, messages=tuple(messages))
        made.append((item, answer))
    return made


def _item_id(task: Task, row: Mapping[str, Any], number: int) -> str:
    if "{" in task.id:
        with suppress(BadData):  # a record that has the id, and not what it is made of
            return render(task.id, row)
    for name in (task.id, *ID_COLUMNS):
        if row.get(name) is not None:
            return str(row[name])
    raise BadData(f"answers, row {number}: no id (expected a column {task.id} or item_id)")


def matched(
    task: Task, items: Sequence[Item], answers: Sequence[Answer], model: str
) -> list[tuple[Item, Answer]]:
    """Items with their answers, of which those without one are missing. Raises BadData if no id
    matches."""
    by_id = {item.id: item for item in items}
    pairs = [(by_id[answer.item_id], answer) for answer in answers if answer.item_id in by_id]
    if not pairs:
        raise BadData(f"{task.name}: no answer of {model} has the id of an item")
    if unknown := len(answers) - len(pairs):
        notes.warn(f"{task.name}: {unknown} answers of {model} belong to no item")
    answered = {answer.item_id for _, answer in pairs}
    nothing = [item for item in items if item.id not in answered]
    pairs += [(item, Answer(item.id, 0, "", missing="no record of it")) for item in nothing]
    if nothing:
        notes.warn(f"{task.name}: {model} has no answer to {len(nothing)} of {len(items)} items")
    return with_earlier(pairs) if task.turns else pairs


def detail_of(item: Item, answer: Answer, more: Mapping[str, Any]) -> dict[str, object]:
    """The details of an answer for the report; the first sample includes the question."""
    detail: dict[str, Any] = {"response": answer.text, **more}
    if answer.reasoning:
        detail["reasoning"] = answer.reasoning
    detail |= answer.more
    if answer.missing:
        detail[NO_ANSWER] = answer.missing
    if answer.finish_reason:
        detail |= {"finish_reason": answer.finish_reason, "tokens": answer.tokens}
    if answer.sample == 0:
        detail["question"] = item.question[-QUESTION_CHARACTERS:]
    return detail


def _references(task: Task, item: Item) -> list[str]:
    """The right answers to an item. BadData."""
    if not task.references:
        return [str(item.answer)]
    return [str(text) for text in listed(task.references, item.fields)]


def _best(matches: Sequence[Match]) -> Match:
    """The match with the best score; one without a verdict unless another is right."""
    return max(matches, key=lambda one: (one.score == 1, one.score is None))


def score_exact(task: Task, model: str, pairs: Sequence[tuple[Item, Answer]]) -> list[Score]:
    """Score rows of exact_match."""
    rows: list[Score] = []
    if task.checks:
        for item, answer in pairs:
            values, more = check_scores(str(item.answer), answer.text)
            detail = detail_of(item, answer, more)
            rows += scores_of(model, task.name, item.id, answer.sample, values, detail)
        return rows
    wanted = [_references(task, item) for item, _ in pairs]
    every = [(answer.text, text) for (_, answer), texts in zip(pairs, wanted, strict=True)
             for text in texts]  # fmt: skip
    matches = iter(exact_matches(task, every))
    for (item, answer), texts in zip(pairs, wanted, strict=True):
        match = _best([next(matches) for _ in texts])
        details = {"extracted": match.extracted, "answer": item.answer}
        details |= {"reason": match.reason} if match.reason else {}
        detail = detail_of(item, answer, details)
        values = {NO_VERDICT: 1.0} if match.score is None else {"exact_match": match.score}
        if match.score is not None and task.metric == "f1":
            values["f1"] = max(word_f1(task, match.extracted, text) for text in texts)
        if match.score is not None and task.metric in METRICS_OF_LABELS:
            values |= label_statistics(task, match.extracted, str(item.answer))
        rows += scores_of(model, task.name, item.id, answer.sample, values, detail)
    return rows
