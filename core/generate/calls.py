"""Requests to a model and what came of them: bodies, content keys, replies, kinds of failure.

The content key is the SHA-256 of the canonical JSON of what decides an answer: the kind of endpoint
and the body (model, messages, sampling, schema), with the vote index that tells wanted repeats
apart. Neither the server's address nor the key to it is part of it, so replicas share one cache.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from sabia.core.errors import Failed

RETRIED = frozenset({408, 409, 425, 429})
OVERLOAD = frozenset({429, 502, 503, 504, 529})
MESSAGE_CHARS = 300
BYTES_PER_TOKEN = 3.5  # of estimates before a call; what is charged comes from the reply


@dataclass(frozen=True)
class Usage:
    """Tokens of one call or of many."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True)
class ChatRequest:
    """One chat completion. `vote` numbers wanted repeats of the same question; `extra` is put into
    the body as it is (tools, logprobs, chat_template_kwargs, …)."""

    messages: Sequence[Mapping[str, Any]]
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    response_format: Mapping[str, Any] | None = None
    vote: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body; repeats differ by their seed, so that a server may cache too."""
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


@dataclass(frozen=True)
class ChatResponse:
    """What came of a request: `text` and `finish_reason`, or `error` (one line) and no text."""

    key: str
    text: str | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    model: str | None = None
    cached: bool = False
    error: str | None = None
    refused: bool = False  # the error is the server's refusal of this very request
    message: Mapping[str, Any] = field(default_factory=dict)  # tool_calls, reasoning_content, …


class Retryable(Exception):
    """An attempt that another may mend. `wait_s` is what the server asked for; `overload`: fewer
    calls at once would help; `unreachable`: there was no server."""

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
    """A request the server will not take however often it is sent (400, 401, 403, 404, 422, …)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def for_all(self) -> bool:
        """Whether every other request would meet the same (key, rights, address)."""
        return self.status not in (400, 413, 422)


def content_key(kind: str, body: Mapping[str, Any], vote: int = 0) -> str:
    """SHA-256 of the canonical JSON of a call, 64 hex digits."""
    content = {"kind": kind, "body": body, "vote": vote}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def parse_reply(raw: bytes) -> dict[str, Any]:
    """The reply's object; raises Retryable where it is cut short or has no choices."""
    try:
        reply = json.loads(raw)
    except ValueError as error:
        raise Retryable(f"reply is not JSON ({len(raw)} bytes: {raw[:40]!r})") from error
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Retryable(f"reply has no choices: {raw[:80]!r}")
    if not isinstance(choices[0].get("message"), dict):
        raise Retryable(f"reply has no message: {raw[:80]!r}")
    return reply


def to_response(
    key: str, reply: Mapping[str, Any], request: ChatRequest, cached: bool
) -> ChatResponse:
    """A reply as ChatResponse; usage is estimated from bytes where the server gives none."""
    choice = reply["choices"][0]
    message = choice["message"]
    text = message.get("content")
    text = text if isinstance(text, str) else ""
    return ChatResponse(
        key=key,
        text=text,
        finish_reason=choice.get("finish_reason"),
        usage=_usage(reply, request, text),
        model=reply.get("model"),
        cached=cached,
        message=message,
    )


def _usage(reply: Mapping[str, Any], request: ChatRequest, text: str) -> Usage:
    said = reply.get("usage")
    if isinstance(said, dict) and isinstance(said.get("prompt_tokens"), int):
        return Usage(said["prompt_tokens"], said.get("completion_tokens") or 0)
    return Usage(request.estimate().prompt_tokens, int(len(text.encode()) / BYTES_PER_TOKEN) + 1)


def check_status(status: int, headers: Mapping[str, str], raw: bytes, url: str) -> None:
    """Raises Retryable or Refused for anything but a 200."""
    if status == 200:
        return
    message = f"{url}: HTTP {status}: {server_message(raw)}"
    if status in RETRIED or status >= 500:
        raise Retryable(message, wait_s(headers), overload=status in OVERLOAD)
    raise Refused(message, status)


def server_message(raw: bytes) -> str:
    """What the server says went wrong, as one line."""
    text = raw.decode("utf-8", "replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    for _ in range(2):
        if isinstance(said, dict):
            named = (said[name] for name in ("error", "message", "detail") if said.get(name))
            said = next(named, said)
    line = " ".join((said if isinstance(said, str) else json.dumps(said)).split())
    return line[:MESSAGE_CHARS] or "no message"


def wait_s(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds the server asks to wait: retry-after-ms, Retry-After in seconds or as an HTTP date
    (RFC 9110 section 10.2.3); None where it asks for nothing readable."""
    folded = {name.lower(): value for name, value in headers.items()}
    milliseconds = _number(folded.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    said = folded.get("retry-after")
    seconds = _number(said)
    if said is None or seconds is not None:
        return seconds
    try:
        until = parsedate_to_datetime(said).timestamp()
    except ValueError:
        return None
    return max(0.0, until - (time.time() if now is None else now))


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < float("inf") else None
