"""Rewriting by a model: the prompt, documents in pieces, and the two doors to a model.

A long document is rewritten piece by piece, cut at blank lines. A writer takes prompts and gives
answers in order; finished answers are in a content-addressed cache before they are used, under a
key of model, prompt and sampling, so a run that was killed pays for none of them again. The
endpoint writer keeps many calls in flight; the local one generates in groups.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sabia.core import stop
from sabia.core.errors import UsageError
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import ChatRequest, content_key
from sabia.core.generate.chat import render
from sabia.core.generate.client import Client
from sabia.core.generate.requests import Request

if TYPE_CHECKING:
    from sabia.core.generate.engine import Engine

PROMPTS = {
    "reason-first": """\
You put a text in another order. Where it states an answer or a conclusion before the reasoning \
that leads to it, write the reasoning first and the answer last: first the problem, then the steps \
in order of increasing detail, then the result. Do so for every exercise on its own.
Keep the language of the text, every number, name and formula, and all that is said; add no fact \
and no remark of your own. A passage that is already in order stays as it is, word for word.
Answer with the text alone.""",
}
PIECE_CHARS = 6_000
CHARS_PER_TOKEN = 2.0  # of the longest answer to expect; digits and rare words are short tokens
ROOM_TOKENS = 64
BLANK_LINES = re.compile(r"(\n[ \t]*\n\s*)")
GROUP = 64


@dataclass(frozen=True)
class Answer:
    """A model's text, or an error in one line and no text."""

    text: str | None
    finish_reason: str | None
    model: str | None
    error: str = ""


def prompt_hash(recipe: str) -> str:
    """128-bit hash of the recipe's instructions, 32 hex digits."""
    return hashlib.blake2b(PROMPTS[recipe].encode(), digest_size=16).hexdigest()


def messages(recipe: str, text: str) -> list[dict[str, str]]:
    """The conversation that asks for one piece."""
    return [
        {"role": "system", "content": PROMPTS[recipe]},
        {"role": "user", "content": text},
    ]


def pieces_of(text: str, most_chars: int = PIECE_CHARS) -> list[str]:
    """Parts at odd places are blank lines between pieces, at even places pieces of about
    `most_chars` (more only where a paragraph alone is longer); joined they are the text."""
    parts = BLANK_LINES.split(text)
    found = [parts[0]]
    for gap, paragraph in zip(parts[1::2], parts[2::2], strict=True):
        if len(found[-1]) + len(gap) + len(paragraph) <= most_chars:
            found[-1] += gap + paragraph
        else:
            found += [gap, paragraph]
    return found


def answer_tokens(text: str) -> int:
    """Room for the rewritten piece."""
    return int(len(text) / CHARS_PER_TOKEN) + ROOM_TOKENS


class EndpointWriter:
    """Asks an OpenAI-compatible server."""

    def __init__(self, client: Client, recipe: str, temperature: float, seed: int) -> None:
        self.client, self.recipe = client, recipe
        self.temperature, self.seed = temperature, seed

    def request(self, text: str) -> ChatRequest:
        """The request for one piece."""
        return ChatRequest(
            messages(self.recipe, text),
            max_tokens=answer_tokens(text),
            temperature=self.temperature,
            seed=self.seed if self.temperature > 0 else None,
        )

    def submit(self, texts: Sequence[str]) -> Callable[[], list[Answer]]:
        """Starts rewriting; the call of the result waits for the answers, in order."""
        futures = [self.client.submit(self.request(text)) for text in texts]

        def collect() -> list[Answer]:
            return [
                Answer(r.text, r.finish_reason, r.model or self.client.model, r.error or "")
                for r in self.client.wait(futures)
            ]

        return collect

    def close(self) -> None:
        self.client.close()


class LocalWriter:
    """Generates with a local engine; `fingerprint` names the model in the cache."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        fingerprint: str,
        cache: CallCache,
        recipe: str,
        temperature: float,
        seed: int,
    ) -> None:
        if not engine.tokenizer.chat_template:
            raise UsageError(f"--engine local: {name} has no chat template (expected a chat model)")
        self.engine, self.name, self.cache, self.recipe = engine, name, cache, recipe
        self.sampling = {"temperature": temperature, "seed": seed if temperature > 0 else 0}
        self.fingerprint = fingerprint

    def submit(self, texts: Sequence[str]) -> Callable[[], list[Answer]]:
        return lambda: self._collect(texts)

    def close(self) -> None:
        self.cache.close()

    def _collect(self, texts: Sequence[str]) -> list[Answer]:
        asked = [self._body(text) for text in texts]
        keys = [content_key("local", body) for body in asked]
        known = {key: kept for key in keys if (kept := self.cache.get(key)) is not None}
        todo = [(k, b) for k, b in dict(zip(keys, asked, strict=True)).items() if k not in known]
        for start in range(0, len(todo), GROUP):
            stop.check()
            made = self._generate(todo[start : start + GROUP])
            self.cache.append((key, reply) for key, reply in made.items() if "text" in reply)
            known |= made
        return [self._answer(known[key]) for key in keys]

    def _body(self, text: str) -> dict[str, Any]:
        return {
            "model": self.fingerprint,
            "messages": messages(self.recipe, text),
            "max_tokens": answer_tokens(text),
            **self.sampling,
        }

    def _generate(self, todo: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """Replies by key; one that does not fit the model's context is an error."""
        requests, replies = [], {}
        context, tokenizer = self.engine.spec.max_positions, self.engine.tokenizer
        for key, body in todo:
            prompt = tokenizer.encode(render(body["messages"], tokenizer, True))
            room = min(body["max_tokens"], context - len(prompt))
            if room < ROOM_TOKENS:
                error = f"does not fit the model's context ({len(prompt)} of {context} tokens)"
                replies[key] = {"error": error}
            else:
                settings = {"temperature": body["temperature"], "seed": body["seed"]}
                requests.append(Request(prompt, room, id=key, **settings))
        for done in self.engine.generate(requests) if requests else []:
            replies[done.request_id] = {"text": done.text, "finish_reason": done.finish_reason}
        return replies

    def _answer(self, reply: dict[str, Any]) -> Answer:
        if "error" in reply:
            return Answer(None, None, self.name, reply["error"])
        return Answer(reply["text"], reply["finish_reason"], self.name)


Writer = EndpointWriter | LocalWriter  # a door to a model
