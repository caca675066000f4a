"""Rewriting by a model: the pieces of a document, and the two model back ends.

A long document is cut as the recipe says and rewritten piece by piece. A writer takes prompts and
returns answers in order. It stores each answer in a content-addressed cache (the key is a hash of
model, prompt and sampling) before it returns it, so a run that is started again does not pay for it
twice. The endpoint writer keeps many calls in flight; the local writer generates in groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import ChatRequest, content_key
from sabia.core.generate.chat import render
from sabia.core.generate.chat_variables import server_variables, template_variables
from sabia.core.generate.client import Client
from sabia.core.generate.requests import Request
from sabia.core.generate.template_engine import chat_template
from sabia.core.options.chat_template import DATE, chat_variables
from sabia.core.shards.job import Job
from sabia.core.text.rewrite.rewrite_recipe import Pieces, Recipe

if TYPE_CHECKING:
    from sabia.core.generate.engine import Engine

SPARE_TOKENS = 64
GROUP = 64
BATCHES_AHEAD = 2  # that are requested before the first has its answers


@dataclass(frozen=True)
class ModelAnswer:
    """The text that a model returned, or None and an error of one line."""

    text: str | None
    finish_reason: str | None
    model: str | None
    error: str = ""


def one_process(job: Job) -> Job:
    """The job with one process; says so if it had several."""
    if job.jobs > 1:
        notes.note(f"-j {job.jobs} is ignored: a model engine uses one process (see --concurrency)")
    return replace(job, jobs=1)


def messages(recipe: Recipe, text: str) -> list[dict[str, str]]:
    """The chat messages that ask for one piece."""
    return [
        {"role": "system", "content": recipe.prompt},
        {"role": "user", "content": text},
    ]


def pieces_of(text: str, cut: Pieces) -> list[str]:
    """Alternately pieces of the text and the white space between them, pieces first.

    A piece has at most `most_chars` characters, or is one longer part, such as a paragraph. Joined,
    all are the text.
    """
    parts = cut.separator.split(text)
    pieces = [parts[0]]
    for gap, part in zip(parts[1::2], parts[2::2], strict=True):
        if len(pieces[-1]) + len(gap) + len(part) <= cut.most_chars:
            pieces[-1] += gap + part
        else:
            pieces += [gap, part]
    return pieces


def answer_tokens(text: str, cut: Pieces) -> int:
    """Tokens that the rewritten piece may have."""
    return int(len(text) * cut.tokens_per_char) + SPARE_TOKENS


class EndpointWriter:
    """Rewrites through an OpenAI-compatible server."""

    def __init__(
        self, client: Client, recipe: Recipe, temperature: float, seed: int, chat: str = ""
    ) -> None:
        self.client, self.recipe, self.extra = client, recipe, server_variables(chat)
        self.temperature, self.seed = temperature, seed

    def request(self, text: str) -> ChatRequest:
        """The request for one piece."""
        return ChatRequest(
            messages(self.recipe, text),
            max_tokens=answer_tokens(text, self.recipe.pieces),
            temperature=self.temperature,
            seed=self.seed if self.temperature > 0 else None,
            extra=self.extra,
        )

    def submit(self, texts: Sequence[str]) -> Callable[[], list[ModelAnswer]]:
        """Start rewriting; the function returned waits for the answers, in order."""
        futures = [self.client.submit(self.request(text)) for text in texts]

        def collect() -> list[ModelAnswer]:
            return [
                ModelAnswer(r.text, r.finish_reason, r.model or self.client.model, r.error or "")
                for r in self.client.wait(futures)
            ]

        return collect

    def close(self) -> None:
        self.client.close()


class LocalWriter:
    """Rewrites with a local engine; `fingerprint` identifies the model in the cache."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        fingerprint: str,
        cache: CallCache,
        recipe: Recipe,
        temperature: float,
        seed: int,
        chat: str = "",
    ) -> None:
        chat_template(engine.tokenizer, f"--engine local: {name}")
        self.variables = template_variables(chat, engine.tokenizer)
        if DATE in self.variables and DATE not in chat_variables(chat):
            raise UsageError(
                f"--chat: {name} has a chat template that writes the date (expected one, so that "
                f"all shards get the same, such as --chat date={self.variables[DATE]})"
            )
        self.engine, self.name, self.cache, self.recipe = engine, name, cache, recipe
        self.sampling = {"temperature": temperature, "seed": seed if temperature > 0 else 0}
        self.fingerprint = fingerprint

    def submit(self, texts: Sequence[str]) -> Callable[[], list[ModelAnswer]]:
        return lambda: self._collect(texts)

    def close(self) -> None:
        self.cache.close()

    def _collect(self, texts: Sequence[str]) -> list[ModelAnswer]:
        bodies = [
            {
                "model": self.fingerprint,
                "messages": messages(self.recipe, text),
                "max_tokens": answer_tokens(text, self.recipe.pieces),
                **self.sampling,
                **({"chat": self.variables} if self.variables else {}),
            }
            for text in texts
        ]
        keys = [content_key("local", body) for body in bodies]
        replies = {key: kept for key in keys if (kept := self.cache.get(key)) is not None}
        unique = dict(zip(keys, bodies, strict=True)).items()
        missing = [(key, body) for key, body in unique if key not in replies]
        for start in range(0, len(missing), GROUP):
            stop.check()
            new = self._generate(missing[start : start + GROUP])
            self.cache.append((key, reply) for key, reply in new.items() if "text" in reply)
            replies |= new
        return [
            ModelAnswer(one.get("text"), one.get("finish_reason"), self.name, one.get("error", ""))
            for one in (replies[key] for key in keys)
        ]

    def _generate(self, todo: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """Replies by key; a prompt that does not fit the model's context gets an error."""
        requests, replies = [], {}
        context, tokenizer = self.engine.spec.max_positions, self.engine.tokenizer
        for key, body in todo:
            text = render(body["messages"], tokenizer, True, **self.variables)
            prompt = tokenizer.encode(text)
            max_tokens = min(body["max_tokens"], context - len(prompt))
            if max_tokens < SPARE_TOKENS:
                error = f"does not fit the model's context ({len(prompt)} of {context} tokens)"
                replies[key] = {"error": error}
            else:
                settings = {"temperature": body["temperature"], "seed": body["seed"]}
                requests.append(Request(prompt, max_tokens, id=key, **settings))
        for completion in self.engine.generate(requests) if requests else []:
            replies[completion.request_id] = {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
            }
        return replies


Writer = EndpointWriter | LocalWriter
