"""Requests to a model and their results: bodies, content keys, replies, kinds of failure.

The content key is the SHA-256 of the canonical JSON of everything that determines a reply: the kind
of endpoint and the body (model, messages, sampling, schema), with the vote index that distinguishes
intended repeats. The server's address and the API key are not part of it, so replicas share one
cache.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

from sabia.core.errors import Failed
from sabia.core.generate.thinking import BUDGET, FORCED

RETRIED = frozenset({408, 409, 425, 429})
OVERLOAD = frozenset({429, 502, 503, 504, 529})
MESSAGE_CHARS = 300
# in the message, code or metadata of a refusal for the text of the request; such a 403 is sent by
# OpenRouter ("requires moderation and your input was flagged")
_MODERATION = re.compile(rb"moderat|flagged|content[ _-]?(filter|policy|management)", re.I)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
Reader = Callable[[str], bool]  # whether the text of a reply can be read
BYTES_PER_TOKEN = 3.5  # for estimates before a call; the amount charged comes from the reply


@dataclass(frozen=True)
class Usage:
    """Tokens of one call or of many."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def __sub__(self, other: Usage) -> Usage:
        completion_tokens = self.completion_tokens - other.completion_tokens
        return Usage(self.prompt_tokens - other.prompt_tokens, completion_tokens)

    def __add__(self, other: Usage) -> Usage:
        completion_tokens = self.completion_tokens + other.completion_tokens
        return Usage(self.prompt_tokens + other.prompt_tokens, completion_tokens)


@dataclass(frozen=True)
class ChatRequest:
    """One chat completion. `vote` numbers intended repeats of the same question; `extra` is added
    to the body unchanged (tools, logprobs, chat_template_kwargs, …)."""

    path: ClassVar[str] = "/chat/completions"
    messages: Sequence[Mapping[str, Any]]
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    response_format: Mapping[str, Any] | None = None
    vote: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, model: str) -> dict[str, object]:
        """The JSON body; repeats differ by their seed, so that a server may cache as well."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [dict(message) for message in self.messages],
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        seed = self.seed if not self.vote else (self.seed or 0) + self.vote
        optional = {
            "max_tokens": self.max_tokens,
            "seed": seed,
            "stop": list(self.stop) or None,
            "response_format": self.response_format,
        }
        body.update({name: value for name, value in optional.items() if value is not None})
        return {**body, **self.extra}

    def key(self, model: str) -> str:
        """Content key, 64 hex digits."""
        return content_key("chat", self.body(model), self.vote)

    def estimate(self) -> Usage:
        """Tokens of prompt (from its bytes) and completion (`max_tokens`, else as the prompt)."""
        text = json.dumps([dict(m) for m in self.messages], ensure_ascii=False)
        prompt = int(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN) + 1
        return Usage(prompt, self.max_tokens or prompt)

    def parse(self, raw: bytes) -> dict[str, Any]:
        """The parsed reply; raises Retryable if it is truncated or has no message, Refused if the
        server has ignored a budget of reasoning."""
        reply = _parsed(raw)
        if not isinstance(reply["choices"][0].get("message"), dict):
            raise Retryable(f"reply has no message: {raw[:80]!r}")
        if BUDGET in self.extra and FORCED not in reply["choices"][0]:
            raise Refused(f"the server ignores {BUDGET} (expected sabia serve)", 501)
        return reply


@dataclass(frozen=True)
class EchoRequest:
    """The log-probabilities of the tokens of a prompt, by a completion that repeats it."""

    path: ClassVar[str] = "/completions"
    prompt: str

    def body(self, model: str) -> dict[str, object]:
        """The JSON body."""
        asked = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        return {"model": model, "prompt": self.prompt, **asked}

    def key(self, model: str) -> str:
        """Content key, 64 hex digits."""
        return content_key("echo", self.body(model))

    def estimate(self) -> Usage:
        """Tokens of the prompt (from its bytes) and the one that must be generated."""
        return Usage(int(len(self.prompt.encode("utf-8", "replace")) / BYTES_PER_TOKEN) + 1, 1)

    def parse(self, raw: bytes) -> dict[str, Any]:
        """The parsed reply; raises Refused if it is not the prompt with its log-probabilities."""
        reply = _parsed(raw)
        try:
            given = echoed(reply["choices"][0], self.prompt)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused(f"no log-probabilities in the reply ({error!r})", 422) from error
        if not self.accepts(given):
            raise Refused("the server ignores echo or logprobs", 422)
        return reply

    def accepts(self, given: EchoedTokens) -> bool:
        """Whether the reply covers the prompt with log-probabilities."""
        offsets = [offset for offset, _ in given]
        return bool(given) and offsets[0] == 0 and sorted(offsets) == offsets


# (offset of a token in characters, its log-probability; None for the first)
EchoedTokens = Sequence[tuple[int, float | None]]


def echoed(choice: Mapping[str, Any], prompt: str) -> EchoedTokens:
    """The tokens of a prompt in the completion that repeats it. Raises KeyError, TypeError, or
    ValueError where the completion has other text."""
    if not choice["text"].startswith(prompt):
        raise ValueError("the reply does not begin with the prompt: the server ignores echo")
    logs = choice["logprobs"]
    pairs = zip(logs["text_offset"], logs["token_logprobs"], strict=True)
    return [(offset, p) for offset, p in pairs if offset < len(prompt)]


@dataclass(frozen=True)
class ChatResponse:
    """The result of a request: `text` and `finish_reason`, or `error` (one line) and no text."""

    key: str
    text: str | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    model: str | None = None
    cached: bool = False
    error: str | None = None
    refused: bool = False  # the server refused this request
    # tool_calls, reasoning_content, …; of a completion all of it
    message: Mapping[str, Any] = field(default_factory=dict)


ModelRequest = ChatRequest | EchoRequest


class Retryable(Exception):
    """A failed attempt that may succeed when repeated. `wait_s`: the wait that the server asked
    for; `overload`: fewer concurrent calls would help; `unreachable`: no server answered."""

    def __init__(
        self,
        message: str,
        wait_s: float | None = None,
        overload: bool = False,
        unreachable: bool = False,
    ) -> None:
        super().__init__(message)
        self.wait_s, self.overload, self.unreachable = wait_s, overload, unreachable


class Refused(Failed):
    """A request that the server refuses permanently (400, 401, 403, 404, 422, …). moderated: for
    what its text says."""

    def __init__(self, message: str, status: int, moderated: bool = False) -> None:
        super().__init__(message)
        self.status, self.moderated = status, moderated

    @property
    def for_all(self) -> bool:
        """True if every other request would be refused as well (key, permissions, address)."""
        return self.status not in (400, 413, 422) and not self.moderated


def content_key(kind: str, body: Mapping[str, Any], vote: int = 0) -> str:
    """SHA-256 of the canonical JSON of a call, 64 hex digits."""
    content = {"kind": kind, "body": body, "vote": vote}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _parsed(raw: bytes) -> dict[str, Any]:
    """The parsed reply; raises Retryable if it is truncated or has no choices."""
    try:
        reply = json.loads(raw)
    except ValueError as error:
        raise Retryable(f"reply is not JSON ({len(raw)} bytes: {raw[:40]!r})") from error
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Retryable(f"reply has no choices: {raw[:80]!r}")
    return reply


def to_response(
    key: str, reply: Mapping[str, Any], request: ModelRequest, cached: bool
) -> ChatResponse:
    """A reply as ChatResponse; usage is estimated from bytes if the server reports none."""
    choice, text = reply["choices"][0], text_of(reply)
    return ChatResponse(
        key=key,
        text=text,
        finish_reason=choice.get("finish_reason"),
        usage=_usage(reply, request, text),
        model=reply.get("model"),
        cached=cached,
        message=choice.get("message", choice),
    )


def text_of(reply: Mapping[str, Any]) -> str:
    """The text of a reply; '' without any."""
    choice = reply["choices"][0]
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    return text if isinstance(text, str) else ""


def is_read(reply: Mapping[str, Any], request: ModelRequest, reader: Reader | None) -> bool:
    """Whether a reply is accepted: its reader accepts the text, or it calls a tool that it may."""
    extra = request.extra if isinstance(request, ChatRequest) else {}
    may_call = extra.get("tools") and extra.get("tool_choice") != "none"
    if may_call and reply["choices"][0]["message"].get("tool_calls"):
        return True
    return reader is None or reader(text_of(reply))


def _usage(reply: Mapping[str, Any], request: ModelRequest, text: str) -> Usage:
    usage = reply.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
        return Usage(usage["prompt_tokens"], usage.get("completion_tokens") or 0)
    return Usage(request.estimate().prompt_tokens, int(len(text.encode()) / BYTES_PER_TOKEN) + 1)


def check_status(status: int, headers: Mapping[str, str], raw: bytes, url: str) -> None:
    """Raises Retryable or Refused for anything but a 200."""
    if status == 200:
        return
    message = f"{url}: HTTP {status}: {server_message(raw)}"
    if status in RETRIED or status >= 500:
        raise Retryable(message, wait_s(headers), overload=status in OVERLOAD)
    raise Refused(message, status, status in (400, 403) and bool(_MODERATION.search(raw)))


def server_message(raw: bytes) -> str:
    """The server's error message, as one line."""
    text = raw.decode("utf-8", "replace")
    try:
        message = json.loads(text)
    except ValueError:
        message = text
    for _ in range(2):
        if isinstance(message, dict):
            named = (message[name] for name in ("error", "message", "detail") if message.get(name))
            message = next(named, message)
    line = " ".join((message if isinstance(message, str) else json.dumps(message)).split())
    return line[:MESSAGE_CHARS] or "no message"


def limit_reset_s(headers: Mapping[str, str], next_call: Usage = Usage()) -> float | None:
    """Seconds until the reset of an x-ratelimit that leaves no request, or fewer tokens than the
    next call may need; None if there is none (or no readable one)."""
    folded = {name.lower(): value for name, value in headers.items()}
    waits = []
    for kind, needed in (("requests", 1), ("tokens", next_call.total_tokens)):
        left = _number(folded.get(f"x-ratelimit-remaining-{kind}"))
        reset = _duration_s(folded.get(f"x-ratelimit-reset-{kind}", ""))
        if left is not None and left < max(needed, 1) and reset is not None:
            waits.append(reset)
    return max(waits, default=None)


def _duration_s(text: str) -> float | None:
    """'6m0s', '1.5s', '120ms' or a number of seconds as seconds; None for other texts."""
    parts = _DURATION_PART.findall(text)
    if parts and "".join(map("".join, parts)) == text:
        return sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    return _number(text)


def wait_s(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds the server asks to wait: retry-after-ms, Retry-After in seconds or as an HTTP date
    (RFC 9110 section 10.2.3), or until the reset of an x-ratelimit that is used up; None if there
    is no readable value."""
    folded = {name.lower(): value for name, value in headers.items()}
    milliseconds = _number(folded.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    retry_after = folded.get("retry-after")
    if retry_after is None:
        return limit_reset_s(headers)
    if (seconds := _number(retry_after)) is not None:
        return seconds
    try:
        until = parsedate_to_datetime(retry_after).timestamp()
    except ValueError:
        return None
    return max(0.0, until - (time.time() if now is None else now))


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < float("inf") else None
