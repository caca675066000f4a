"""What calls of an evaluation would cost at most, before any is made (`--dry-run`).

Tokens of a prompt are estimated by its bytes, an answer that is not known has all its tokens, and a
reply all that it may have. What the cache holds is not subtracted.
"""

from collections.abc import Mapping, Sequence

from sabia.core.bench.answers import Answer
from sabia.core.bench.items import Item, Message, value
from sabia.core.bench.judging import PointsQuestion, key_text, points_messages, rubric_of
from sabia.core.bench.rubrics.graded_samples import question_about
from sabia.core.bench.rubrics.pairwise import Comparison, criteria_text
from sabia.core.bench.task import Task
from sabia.core.generate.budget import Budget, Price
from sabia.core.generate.calls import ChatRequest, EchoRequest, Usage
from sabia.core.judge.judge_file import JudgeServer
from sabia.core.judge.opened_judges import judge_servers
from sabia.core.judge.prompt import judge_messages
from sabia.core.options.eval import EvalOptions
from sabia.core.units import format_money


def criteria_of(task: Task, items: Sequence[Item]) -> dict[str, str]:
    """The criteria of a task of pairs by item, of the items that have some."""
    by_item = {}
    for item in items:
        if task.rubric in item.fields or "{" in task.rubric:
            by_item[item.id] = criteria_text(value(task.rubric, item.fields))
    return by_item


def judged_calls(
    task: Task, items: Sequence[Item], options: EvalOptions, sets: int
) -> tuple[int, Usage]:
    """(calls, tokens) of one judge for so many sets of answers."""
    prompts: list[tuple[int, Usage]] = []  # of an item, with answers of no length
    if task.scoring == "pairs":
        criteria, empty = criteria_of(task, items), Answer("", 0, "")
        for item in items:
            pair = Comparison(item, ("", empty), ("", empty), criteria.get(item.id, ""))
            prompts.append((1, _usage(pair.messages(False))))
        times, answers = sets * (sets - 1), 2  # each pair in both orders
    else:
        prompts = [_of_item(task, item, options) for item in items]
        times, answers = sets, 1
    calls = times * sum(count for count, _ in prompts)
    asked = times * sum(usage.prompt_tokens * count for count, usage in prompts)
    return calls, Usage(asked + calls * answers * task.max_new_tokens, calls * options.judge_tokens)


def _of_item(task: Task, item: Item, options: EvalOptions) -> tuple[int, Usage]:
    messages = item.as_messages
    if task.kind == "exact_match":  # a sample that --best-of has graded
        return 1, _usage(points_messages(question_about(item, Answer("", 0, ""))))
    if task.scoring == "points":
        key = key_text(value(task.rubric, item.fields))
        most = float(value(task.maximum, item.fields))
        return 1, _usage(points_messages(PointsQuestion(messages, "", key, most)))
    rubric = rubric_of(value(task.rubric, item.fields))
    criteria = tuple(one for one in rubric.items if one.kind == "llm")
    calls = -(-len(criteria) // options.judge_items_per_call)
    if not calls:
        return 0, Usage()
    whole = _usage(judge_messages(messages, "", criteria, ""))
    bare = _usage(judge_messages(messages, "", criteria[:1], ""))
    # the criteria are divided among the calls, the rest is in each
    tokens = bare.prompt_tokens + (whole.prompt_tokens - bare.prompt_tokens) // calls
    return calls * options.judge_votes, Usage(tokens, 1)


def _usage(messages: Sequence[Message]) -> Usage:
    """What asking a judge once takes at most; of the reply one token counts."""
    return ChatRequest(messages, max_tokens=1).estimate()


def answer_figure(
    task: Task, items: Sequence[Item], samples: int, model: str, prices: Mapping[str, Price]
) -> str:
    """The calls, tokens and dollars of an endpoint's answers, or of its scores of texts."""
    calls = prompts = replies = 0
    for item in items:
        if task.generates:
            turns = 1 + len(item.further)
            one = ChatRequest(item.as_messages, max_tokens=task.max_new_tokens).estimate()
            # later turns hold the answers before them
            before = task.max_new_tokens * turns * (turns - 1) // 2
            calls += samples * turns
            prompts += samples * (turns * one.prompt_tokens + before)
            replies += samples * turns * task.max_new_tokens
        else:
            texts = [context + text for context, text in item.pairs]
            texts = texts or [item.text + task.delimiter + choice for choice in item.choices]
            calls, replies = calls + len(texts), replies + len(texts)
            prompts += sum(EchoRequest(text).estimate().prompt_tokens for text in texts)
    return _figure(calls, Usage(prompts, replies), model, prices, "--prices")


def judge_figures(
    task: Task, items: Sequence[Item], options: EvalOptions, sets: int, budget: Budget
) -> dict[str, str]:
    """A line of each judge: its calls, tokens and dollars, for so many sets of answers."""
    calls, usage = judged_calls(task, items, options, sets)
    figures = {}
    for server in judge_servers(options) or [JudgeServer("judge", (), "")]:
        share = options.audit_judge if server.audit else 1.0
        used = Usage(round(usage.prompt_tokens * share), round(usage.completion_tokens * share))
        own = {server.model: server.price} if server.price else {}
        figures[f"{task.name} judged by {server.name}"] = _figure(
            round(calls * share), used, server.model, {**budget.prices, **own},
            "--prices or --judge",
        )  # fmt: skip
    return figures


def _figure(calls: int, used: Usage, model: str, prices: Mapping[str, Price], places: str) -> str:
    dollars = f"dollars unknown (no price of {model or 'a judge'} in {places})"
    if price := prices.get(model):
        dollars = f"{format_money(price.cost_usd(used))} at most"
    return (
        f"{calls:,} calls at most, {used.prompt_tokens:,} and {used.completion_tokens:,} tokens of "
        f"prompts and replies, {dollars}"
    )
