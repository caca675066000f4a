"""Replies of the OpenAI API: samples → JSON objects, whole or in pieces."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from sabia.core.generate.call_formats import REASONING
from sabia.core.generate.requests import Ranked
from sabia.core.generate.thinking import FORCED
from sabia.core.generate.turn_parser import parse_turn
from sabia.core.model.routing import ROUTED_EXPERTS
from sabia.core.serve.protocol import Asked
from sabia.core.serve.text_stream import TextStream
from sabia.core.serve.token_texts import TokenTexts
from sabia.core.serve.worker import Done, Progress
from sabia.core.text.tokenize.tokenizer import Tokenizer

TOOL_CALLS = "tool_calls"
Json = dict[str, Any]


class Reply:
    """The reply to one call: `whole` of all samples, or `piece`s as their tokens are drawn."""

    def __init__(self, asked: Asked, model: str, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        self.asked, self.tokenizer, self.texts = asked, tokenizer, texts
        kind = "chatcmpl" if asked.turn else "cmpl"
        self._object = "chat.completion" if asked.turn else "text_completion"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()),
                      "model": model}  # fmt: skip
        self._streams: dict[int, TextStream] = {}  # by choice
        self._started: set[int] = set()
        self._listed: dict[int, int] = {}  # tokens of a choice that were given
        self._offset: dict[int, int] = {}  # of the next of them in a list of log-probabilities
        self._drawn = 0
        self._samples = {sample: number for number, sample in enumerate(asked.requests[0].samples)}

    def whole(self, done: Sequence[Done]) -> Json:
        """The reply with all samples, whose order does not matter."""
        choices = [self._choice(one) for one in sorted(done, key=self._number)]
        self._drawn = sum(len(one.ended.completion.tokens) for one in done)
        return {**self._head, "object": self._object, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Tokens of the prompts, and of the samples so far."""
        prompt = sum(len(request.prompt) for request in self.asked.requests)
        drawn = 0 if self.asked.only_echo else self._drawn
        return {"prompt_tokens": prompt, "completion_tokens": drawn,
                "total_tokens": prompt + drawn}  # fmt: skip

    def piece(self, event: Progress | Done) -> Json | None:
        """The next object of a stream; None if the event adds no text yet."""
        number = self._number(event)
        choice = self._last(event, number) if isinstance(event, Done) else self._next(event, number)
        return None if choice is None else self.chunk([choice])

    def chunk(self, choices: Sequence[Json], **more: object) -> Json:
        """An object of a stream. Where its last one has the usage, that of the others is null."""
        more = {"usage": None, **more} if self.asked.stream_usage else more
        name = "chat.completion.chunk" if self.asked.turn else self._object
        return {**self._head, "object": name, "choices": list(choices), **more}

    @property
    def in_pieces(self) -> bool:
        """Whether text can be given before a sample ends: not where it must be read whole first,
        for tool calls or reasoning, and not after an echo."""
        turn, template = self.asked.turn, self.tokenizer.chat_template or ""
        if turn is None:
            return not self.asked.echo
        return turn.tools is None and not any(mark in template for mark, _, _ in REASONING)

    def _number(self, event: Progress | Done) -> int:
        sample = event.sample if isinstance(event, Progress) else event.ended.completion.sample
        return event.prompt * len(self._samples) + self._samples[sample]

    def _next(self, event: Progress, number: int) -> Json | None:
        """A choice with the new text of a sample in flight."""
        if number not in self._streams:
            self._streams[number] = TextStream(
                self.tokenizer.decode, self.asked.requests[0].stop, self.texts.is_byte
            )
        self._drawn += len(event.tokens)
        text = self._streams[number].push(event.tokens)
        logs = self._more_logprobs(number, event.tokens, event.logprobs, event.ranked)
        self._listed[number] = self._listed.get(number, 0) + len(event.tokens)
        if not text and logs is None:
            return None
        return self._piece(
            number, {"content": text}, text, logs, None, event.tokens, event.versions
        )

    def _last(self, done: Done, number: int) -> Json:
        """A choice with the rest of a sample that has ended."""
        whole, listed = self._choice(done), self._listed.get(number, 0)
        made = done.ended.completion
        self._drawn += len(made.tokens) - listed
        if number not in self._streams:
            message = {k: v for k, v in whole.get("message", {}).items() if k != "role"}
            for index, call in enumerate(message.get(TOOL_CALLS, ())):
                call["index"] = index
            text, logs = whole.get("text", ""), whole["logprobs"]
        else:
            text = self._streams[number].finish(made.text)
            message = {"content": text}
            logs = self._more_logprobs(
                number, made.tokens[listed:], made.raw_logprobs[listed:],
                done.ended.ranked[listed:],
            )  # fmt: skip
        piece = self._piece(number, message, text, logs, whole["finish_reason"],
                            made.tokens[listed:], done.ended.versions[listed:])  # fmt: skip
        return {**piece, **self._forced(done)}

    def _more_logprobs(
        self, number: int, tokens: Sequence[int], logprobs: Sequence[float],
        ranked: Sequence[Ranked],
    ) -> Json | None:  # fmt: skip
        """Log-probabilities of the next tokens of a choice."""
        offset = self._offset.get(number, 0)
        self._offset[number] = offset + sum(len(self.tokenizer.decode([t])) for t in tokens)
        return self._logprobs(tokens, logprobs, ranked, offset)

    def _piece(
        self, number: int, message: Json, text: str, logs: Json | None, reason: str | None,
        tokens: Sequence[int], versions: Sequence[int],
    ) -> Json:  # fmt: skip
        role = {} if number in self._started else {"role": "assistant"}
        self._started.add(number)
        content = {"delta": {**role, **message}} if self.asked.turn else {"text": text}
        ids = {}
        if self.asked.token_ids:
            ids = {"token_ids": list(tokens), "weight_versions": list(versions)}
        return {"index": number, **content, "logprobs": logs, "finish_reason": reason, **ids}

    def _choice(self, done: Done) -> Json:
        made, turn = done.ended.completion, self.asked.turn
        request = self.asked.requests[done.prompt]
        reason = made.finish_reason
        content: Json
        if turn is not None:
            message = parse_turn(
                made.text, turn.messages, self.tokenizer, turn.tools, **turn.variables
            )
            if TOOL_CALLS in message:
                message[TOOL_CALLS] = [_called(call) for call in message[TOOL_CALLS]]
                reason = TOOL_CALLS
            content = {"message": message}
            logs = self._logprobs(made.tokens, made.raw_logprobs, done.ended.ranked, 0)
        else:
            before = self._prompt_text(done.prompt) if self.asked.echo else ""
            text = "" if self.asked.only_echo else made.text
            content = {"text": before + text}
            logs = self._completion_logprobs(done, len(before))
        ids = {}
        if self.asked.token_ids:
            drawn = [] if self.asked.only_echo else made.tokens
            ids = {"token_ids": drawn, "prompt_token_ids": list(request.prompt),
                   "weight_versions": list(done.ended.versions[: len(drawn)]),
                   "drawn_logprobs": list(made.logprobs[: len(drawn)])}  # fmt: skip
        return {"index": self._number(done), **content, "logprobs": logs, "finish_reason": reason,
                **ids, **self._forced(done), **self._experts(done)}  # fmt: skip

    def _experts(self, done: Done) -> Json:
        """The experts of each token, if they were asked for."""
        if not self.asked.requests[done.prompt].routed_experts:
            return {}
        packed = done.ended.completion.routed_experts
        return {ROUTED_EXPERTS: base64.b64encode(packed).decode()}

    def _forced(self, done: Done) -> Json:
        """The places of tokens that were not sampled, if ids or a budget of reasoning were asked
        for."""
        if not (self.asked.token_ids or self.asked.requests[done.prompt].thinking):
            return {}
        return {FORCED: list(done.ended.completion.forced)}

    def _prompt_text(self, prompt: int) -> str:
        text = self.asked.texts[prompt]
        return self.tokenizer.decode(self.asked.requests[prompt].prompt) if text is None else text

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], ranked: Sequence[Ranked],
        offset: int,
    ) -> Json | None:  # fmt: skip
        """Log-probabilities of drawn tokens in the form of the endpoint; None if not asked for."""
        if self.asked.alternatives is None:
            return None
        if self.asked.turn is None:
            return self._listing(tokens, logprobs, ranked, self._offsets(tokens, offset))
        ranked = ranked or [()] * len(tokens)
        entries = zip(tokens, logprobs, ranked, strict=True)
        return {"content": [
            {**self._entry(token, p), "top_logprobs": [self._entry(*one) for one in others]}
            for token, p, others in entries
        ]}  # fmt: skip

    def _entry(self, token: int, logprob: float) -> Json:
        code = self.texts.bytes(token)
        return {"token": self.texts.name(token), "logprob": logprob,
                "bytes": None if code is None else list(code)}  # fmt: skip

    def _completion_logprobs(self, done: Done, offset: int) -> Json | None:
        """Those of the prompt, with echo, and of the sample; offset: characters of the prompt."""
        made, echo = done.ended.completion, done.ended.echo
        logs = self._logprobs(made.tokens, made.raw_logprobs, done.ended.ranked, offset)
        if logs is None or echo is None:
            return logs
        prompt, text = self.asked.requests[done.prompt].prompt, self.asked.texts[done.prompt]
        if text is None:
            offsets = self._offsets(prompt, 0)
        else:
            offsets = [start for start, _ in self.tokenizer.encode_with_offsets(text)[1]]
        ranked: Sequence[Ranked] = [(), *echo.ranked] if echo.ranked else ()
        first = self._listing(prompt, [None, *echo.logprobs], ranked, offsets)
        if self.asked.only_echo:
            return first
        return {name: [*first[name], *logs[name]] for name in first}

    def _listing(
        self, tokens: Sequence[int], logprobs: Sequence[float | None], ranked: Sequence[Ranked],
        offsets: Sequence[int],
    ) -> Json:  # fmt: skip
        """The lists of a plain completion; a token is among its own alternatives."""
        texts = [self.texts.name(token) for token in tokens]
        top = list[Json | None]()
        pairs = zip(texts, logprobs, ranked or [()] * len(tokens), strict=True)
        for text, p, others in pairs:
            given = {self.texts.name(token): q for token, q in others}
            top.append(None if p is None else {**given, text: p})
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": top,
                "text_offset": list(offsets)}  # fmt: skip

    def _offsets(self, tokens: Iterable[int], start: int) -> list[int]:
        """Where each token begins, by the characters that it decodes to alone."""
        offsets = []
        for token in tokens:
            offsets.append(start)
            start += len(self.tokenizer.decode([token]))
        return offsets


def _called(call: Json) -> Json:
    """A tool call with an id, its arguments as JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
            "function": {"name": function["name"], "arguments": arguments}}  # fmt: skip


def error_body(message: str, status: int, parameter: str = "", code: str = "") -> Json:
    """The body of an error."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": parameter or None,
                      "code": code or None}}  # fmt: skip
