"""Requests of the OpenAI API: JSON bodies → requests to the engine.

A parameter that has no effect here is refused by name, except where the value asks for nothing
(`"repetition_penalty": 1`) or names only the caller (`user`). `top_k`, `min_p`, `stop_token_ids`,
`ignore_eos`, `chat_template_kwargs`, `return_token_ids` and `structured_outputs` are those of vLLM,
and so is `request_id`, which with `seed` decides the random numbers of a plain completion.
`thinking_budget` and `thinking_overflow` are our own.
Source: https://platform.openai.com/docs/api-reference (chat/create, completions/create).
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, TypeVar

from sabia.core.errors import SabiaError, UsageError
from sabia.core.generate.chat import render
from sabia.core.generate.requests import Request
from sabia.core.generate.template_engine import reads_date
from sabia.core.generate.thinking import BUDGET, OVERFLOW, ThinkingBudget, asked_budget
from sabia.core.grammar.guide import Guide
from sabia.core.options.chat_template import DATE
from sabia.core.serve.response_format import ResponseFormats
from sabia.core.text.tokenize.tokenizer import Tokenizer

MOST_ALTERNATIVES = 20  # of a token, in log-probabilities
COMPLETION_TOKENS = 16  # default of max_tokens in completions
CALLER = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
# parameters that are accepted with these values only, which ask for nothing
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,), "tool_choice": ("auto",), "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"), "store": (False,), "suffix": ("",),
    "modalities": (["text"],),
}  # fmt: skip
# numbers of a request to the engine, with their defaults
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0}  # fmt: skip
NO_MODEL, TOO_LONG = "model_not_found", "context_length_exceeded"  # codes of errors
TEXT = {"type": "text"}  # the response_format that asks for nothing
T = TypeVar("T")


class Rejected(Exception):
    """A request that is answered with an error. status: of HTTP; parameter: that is wrong; code: of
    the API, '' for none."""

    def __init__(
        self, message: str, parameter: str = "", status: int = 400, code: str = ""
    ) -> None:
        super().__init__(message)
        self.parameter, self.status, self.code = parameter, status, code


@dataclass(frozen=True)
class Limits:
    """context: tokens of prompt and completion. samples: of one prompt. prompts: of a request."""

    context: int
    samples: int
    prompts: int
    vocabulary: int
    adapters: Sequence[str] = ()  # by their names in requests
    experts: bool = False  # whether the model has any


@dataclass(frozen=True)
class Turn:
    """The conversation that a chat completion continues."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a client asks for. requests: one a prompt, with the text of each (None: it was given as
    ids). alternatives: number of the likeliest tokens to list for each token, None for no
    log-probabilities. turn: None for a plain completion."""

    requests: Sequence[Request]
    texts: Sequence[str | None]
    turn: Turn | None
    alternatives: int | None
    stream: bool
    stream_usage: bool
    token_ids: bool
    echo: bool = False
    only_echo: bool = False  # max_tokens 0

    @property
    def choices(self) -> int:
        """Samples of all prompts."""
        return sum(len(request.samples) for request in self.requests)


class Body:
    """The parameters of a request, each of which must be taken once."""

    def __init__(self, raw: bytes) -> None:
        try:
            values = json.loads(raw, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise Rejected(f"the body is not JSON ({error})") from None
        if not isinstance(values, dict):
            raise Rejected("the body is not a JSON object")
        self.left = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str, kind: type[T], default: T) -> T:
        """The value of a parameter; raises Rejected for another type."""
        value = self.left.pop(name, default)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not abs(value) <= sys.float_info.max:
                raise Rejected(f"{name}: {_short(value)} (expected a finite number)", name)
            return float(value)  # type: ignore[return-value]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Rejected(f"{name}: {_short(value)} (expected {_names[kind]})", name)
        return value

    def needs(self, name: str) -> None:
        """Raise Rejected if a parameter is missing."""
        if name not in self.left:
            raise Rejected(f"{name}: is missing", name)

    def end(self) -> None:
        """Raise Rejected for parameters that were not taken."""
        for name, value in self.left.items():
            if name in CALLER or value in NEUTRAL.get(name, ()):
                continue
            if name not in NEUTRAL:
                raise Rejected(f"{name}: unknown parameter", name)
            only = " or ".join(json.dumps(one) for one in NEUTRAL[name])
            raise Rejected(f"{name}: {_short(value)} is not supported (expected {only})", name)


def _no_number(text: str) -> None:
    """Refuse what Python's JSON has beside numbers: NaN and infinities."""
    raise ValueError(f"{text} is no number")


_names: Mapping[type, str] = {
    str: "a string", int: "an integer", float: "a number", bool: "true or false",
    dict: "an object", list: "an array",
}  # fmt: skip


def parse_chat(
    raw: bytes, model: str, tokenizer: Tokenizer, limits: Limits, formats: ResponseFormats
) -> Asked:
    """The body of /v1/chat/completions. Raises Rejected."""
    body = Body(raw)
    adapter = _adapter(body, model, limits)
    body.needs("messages")
    tools = _tools(body.take("tools", list, []))
    if body.left.get("tool_choice") == "none":
        body.left.pop("tool_choice")
        tools = []
    if tools and body.left.get("response_format", TEXT) != TEXT:
        raise Rejected("response_format: is not supported beside tools", "response_format")
    variables = body.take("chat_template_kwargs", dict, {})
    if reads_date(tokenizer):
        variables = {DATE: datetime.now(UTC).date().isoformat(), **variables}
    turn = Turn(_messages(body.take("messages", list, [])), tools or None, variables)
    try:
        text = render(turn.messages, tokenizer, True, turn.tools, **turn.variables)
    except (SabiaError, TypeError) as error:
        raise Rejected(f"messages: {error}", "messages") from None
    prompt = _encoded(tokenizer, text, "messages")
    wanted = body.take("logprobs", bool, False)
    alternatives = body.take("top_logprobs", int, 0)
    if alternatives and not wanted:
        raise Rejected("top_logprobs: needs logprobs: true", "top_logprobs")
    name = "max_completion_tokens" if "max_completion_tokens" in body.left else "max_tokens"
    if name in body.left and body.left.keys() >= {"max_tokens", "max_completion_tokens"}:
        raise Rejected("max_tokens: is not supported beside max_completion_tokens", "max_tokens")
    left = limits.context - len(prompt)
    if left < 1:
        raise Rejected(
            f"messages: {len(prompt)} tokens do not fit the context of {limits.context} tokens "
            "with a completion", "messages", code=TOO_LONG,
        )  # fmt: skip
    most = body.take(name, int, left)
    if most < 1:
        raise Rejected(f"{name}: {most} (expected 1 or more)", name)
    thinking = _thinking(body, [text], tokenizer)
    guide = _guide(body, "response_format", lambda form: formats.of_chat(form, text))
    guide = guide or _guide(body, "structured_outputs", formats.of_structure)
    return _asked(
        body, [prompt], [text], turn, _alternatives(alternatives) if wanted else None, most, limits,
        tokenizer.stop_ids, guide, adapter, thinking=thinking,
    )  # fmt: skip


def parse_completion(
    raw: bytes, model: str, tokenizer: Tokenizer, limits: Limits, formats: ResponseFormats
) -> Asked:
    """The body of /v1/completions. Raises Rejected."""
    body = Body(raw)
    adapter = _adapter(body, model, limits)
    body.needs("prompt")
    texts, prompts = list[str | None](), list[list[int]]()
    given = _prompts(body.left.pop("prompt"))
    if len(given) > limits.prompts:
        raise Rejected(
            f"prompt: {len(given)} prompts (expected at most {limits.prompts})", "prompt"
        )
    for prompt in given:
        texts.append(prompt if isinstance(prompt, str) else None)
        ids = _encoded(tokenizer, prompt, "prompt") if isinstance(prompt, str) else prompt
        prompts.append(ids)
    count = body.take("logprobs", int, -1)
    echo = body.take("echo", bool, False)
    most = body.take("max_tokens", int, COMPLETION_TOKENS)
    if most < 0 or (most == 0 and not echo):
        raise Rejected(f"max_tokens: {most} (expected 1 or more, or 0 with echo)", "max_tokens")
    if (best := body.take("best_of", int, 1)) > 1 and best != body.left.get("n", 1):
        raise Rejected(f"best_of: {best} is not supported (expected n)", "best_of")
    alternatives = None if count == -1 else _alternatives(count)
    opened = [tokenizer.decode(prompt) for prompt in prompts] if BUDGET in body.left else []
    thinking = _thinking(body, opened, tokenizer)
    guide = _guide(body, "structured_outputs", formats.of_structure)
    name = body.take("request_id", str, "")
    if name and len(prompts) > 1:
        raise Rejected(f"request_id: with {len(prompts)} prompts (expected one)", "request_id")
    asked = _asked(
        body, prompts, texts, None, alternatives, most, limits, tokenizer.stop_ids, guide, adapter,
        echo, thinking,
    )  # fmt: skip
    return replace(asked, requests=[replace(request, id=name) for request in asked.requests])


def _asked(
    body: Body, prompts: Sequence[list[int]], texts: Sequence[str | None], turn: Turn | None,
    alternatives: int | None, most: int, limits: Limits, ends: tuple[int, ...],
    guide: Guide | None, adapter: str, echo: bool = False,
    thinking: Sequence[ThinkingBudget | None] = (),
) -> Asked:  # fmt: skip
    """What both bodies share, checked."""
    count = body.take("n", int, 1)
    if not 1 <= count <= limits.samples:
        raise Rejected(f"n: {count} (expected 1 to {limits.samples})", "n")
    stop = body.left.pop("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise Rejected("stop: expected a string or an array of strings", "stop")
    ends = () if body.take("ignore_eos", bool, False) else ends
    ends = (*ends, *_ids(body.take("stop_token_ids", list, []), "stop_token_ids"))
    seed = body.take("seed", int, int.from_bytes(os.urandom(7), "little"))
    stream = body.take("stream", bool, False)
    options = body.take("stream_options", dict, {})
    if options and not stream:
        raise Rejected("stream_options: needs stream: true", "stream_options")
    stream_usage = options.get("include_usage", False) is True
    top_k = max(body.take("top_k", int, 0), 0)  # -1 as in vLLM: off
    sampling: Any = {name: body.take(name, float, default) for name, default in SAMPLING.items()}
    bias = _logit_bias(body.take("logit_bias", dict, {}))
    token_ids = body.take("return_token_ids", bool, False)
    experts = body.take("return_routed_experts", bool, False)
    if experts and (stream or not limits.experts):
        raise Rejected(
            f"return_routed_experts: is not supported {'with stream' if stream else 'here'} "
            "(expected a model with experts, and no stream)", "return_routed_experts",
        )  # fmt: skip
    body.end()
    requests = [
        Request(
            prompt, max(most, 1), top_k=top_k, seed=seed, stop=tuple(stop), stop_ids=ends, n=count,
            top_logprobs=alternatives or 0, echo=echo and alternatives is not None,
            logit_bias=bias, guide=guide, adapter=adapter, thinking=budget, routed_experts=experts,
            **sampling,
        )
        for prompt, budget in zip_longest(prompts, thinking)
    ]  # fmt: skip
    for request in requests:
        try:
            request.check(limits.vocabulary, limits.context)
        except UsageError as error:
            too_long = len(request.prompt) + request.max_new_tokens > limits.context
            message, code = str(error).removeprefix("generate: "), TOO_LONG if too_long else ""
            raise Rejected(message, code=code) from None
    return Asked(
        requests, texts, turn, alternatives, stream, stream_usage, token_ids, echo, most == 0
    )


def _guide(
    body: Body, name: str, read: Callable[[Mapping[str, Any]], Guide | None]
) -> Guide | None:
    """What the samples are bound to by a parameter."""
    wanted = body.take(name, dict, {})
    try:
        return read(wanted) if wanted else None
    except UsageError as error:
        raise Rejected(f"{name}: {error}", name) from None


def _thinking(
    body: Body, prompts: Sequence[str], tokenizer: Tokenizer
) -> Sequence[ThinkingBudget | None]:
    """The budgets of reasoning after rendered conversations; () for none."""
    at_end = body.take(OVERFLOW, str, "close")
    if at_end not in ("close", "length"):
        raise Rejected(f"{OVERFLOW}: {_short(at_end)} (expected close or length)", OVERFLOW)
    if BUDGET not in body.left:
        return ()
    if "structured_outputs" in body.left:
        raise Rejected(f"{BUDGET}: is not supported beside structured_outputs", BUDGET)
    fields = {BUDGET: body.take(BUDGET, int, 0), OVERFLOW: at_end}
    try:
        return [asked_budget(fields, prompt, tokenizer) for prompt in prompts]
    except UsageError as error:
        raise Rejected(str(error), BUDGET) from None


def _logit_bias(values: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Pairs of an object from token ids, as text, to numbers."""
    try:
        return tuple((int(token), float(bias)) for token, bias in values.items())
    except (TypeError, ValueError):
        raise Rejected("logit_bias: expected numbers by token id", "logit_bias") from None


def _adapter(body: Body, model: str, limits: Limits) -> str:
    """The adapter that a request names as its model; '' for the model itself."""
    body.needs("model")
    name = body.take("model", str, "")
    if name != model and name not in limits.adapters:
        expected = " or ".join([model, *limits.adapters])
        message = f"model: {_short(name)} is not served (expected {expected})"
        raise Rejected(message, "model", 404, NO_MODEL)
    return "" if name == model else name


def _tools(values: list[Any]) -> list[dict[str, Any]]:
    """Functions with a name and a schema of their arguments."""
    for number, tool in enumerate(values):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise Rejected(f"tools: tool {number} is no function", "tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise Rejected(f"tools: tool {number} has no name", "tools")
        if not isinstance(function.get("parameters") or {}, dict):
            raise Rejected(f"tools: the parameters of tool {number} are no object", "tools")
    return values


def _messages(values: list[Any]) -> list[dict[str, Any]]:
    """Messages whose content is text or nothing."""
    messages = []
    for number, message in enumerate(values):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Rejected(f"messages: message {number} has no role", "messages")
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            texts = [text for text in parts if isinstance(text, str)]
            if len(texts) < len(content):
                raise Rejected(f"messages: message {number} has parts that are no text", "messages")
            content = "".join(texts)
        if content is not None and not isinstance(content, str):
            raise Rejected(f"messages: the content of message {number} is no text", "messages")
        messages.append({**message, "content": content} if "content" in message else message)
    if not messages:
        raise Rejected("messages: is empty", "messages")
    return messages


def _prompts(value: object) -> list[str | list[int]]:
    """A prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise Rejected("prompt: expected a string, token ids, or an array of them", "prompt")
    if all(isinstance(one, str) for one in value):
        return list(value)
    if all(isinstance(one, list) for one in value):
        return [_ids(one, "prompt") for one in value]
    return [_ids(value, "prompt")]


def _ids(value: list[Any], name: str) -> list[int]:
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise Rejected(f"{name}: expected token ids", name)
    return value


def _encoded(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    try:
        text.encode()
    except UnicodeError:
        raise Rejected(f"{name}: the text has an unpaired surrogate", name) from None
    return tokenizer.encode(text)


def _alternatives(count: int) -> int:
    if not 0 <= count <= MOST_ALTERNATIVES:
        raise Rejected(f"logprobs: {count} alternatives (expected 0 to {MOST_ALTERNATIVES})")
    return count


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
