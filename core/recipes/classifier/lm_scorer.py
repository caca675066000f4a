"""Scores by asking a language model about each document, through one of two doors.

A local model says how likely each answer is: one pass over the prompt, log p(answer) for each, and
p by their softmax; a scale gives its mean under p. A server is asked for the answer, which is read
from its text. Finished calls are in a content-addressed cache, so none is paid or computed twice; a
call that comes to nothing, and a reply that cannot be read, is unknown: NaN, counted, never a
score. When the server is out the run stops, and goes on where it was when run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from sabia.core import units
from sabia.core.bench.loglikelihood import Scorer, encode_options
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import ChatRequest, content_key
from sabia.core.generate.chat import render
from sabia.core.generate.local import model_fingerprint
from sabia.core.generate.opened import default_cache, open_client
from sabia.core.model.storage import hub
from sabia.core.options.classify import Asking
from sabia.core.recipes.classifier.lm_prompt import Prompt, load_prompt
from sabia.core.text.tokenize.tokenizer import load_tokenizer

GROUP = 64  # documents of a local model whose answers are kept at once


class Door(Protocol):
    """A model that is asked."""

    def shares(self, texts: Sequence[str]) -> np.ndarray:
        """float64[n, answers]: how much each answer is meant; a row of NaN where unknown."""

    def said(self) -> str:
        """What it did, for a line on stderr."""

    def close(self) -> None:
        """Ends it."""


class EndpointDoor:
    """An OpenAI-compatible server; the answer it gives has all of the share."""

    def __init__(self, prompt: Prompt, client: Any) -> None:
        self.prompt, self.client = prompt, client

    def shares(self, texts: Sequence[str]) -> np.ndarray:
        """See Door."""
        most = self.prompt.max_tokens
        asked = [ChatRequest(self.prompt.messages(text), max_tokens=most) for text in texts]
        found = np.full((len(texts), len(self.prompt.answers)), np.nan)
        for row, reply in enumerate(self.client.chat(asked)):
            answer = None if reply.error else self.prompt.parse(reply.text or "")
            if answer is not None:
                found[row] = np.arange(found.shape[1]) == answer
        return found

    def said(self) -> str:
        """See Door."""
        stats = self.client.stats
        cost = "" if stats.usd is None else f", {units.format_money(stats.usd)}"
        return f"{stats.calls:,} calls, {stats.cached:,} cached, {stats.failed:,} failed{cost}"

    def close(self) -> None:
        """See Door."""
        self.client.close()


class LocalDoor:
    """A model directory, scored by core.bench.loglikelihood; `cache`: of finished documents."""

    def __init__(self, prompt: Prompt, directory: str, backend: str, cache: Any) -> None:
        self.prompt, self.directory, self.backend, self.cache = prompt, directory, backend, cache
        self.fingerprint = model_fingerprint(directory, "--lm")
        self.tokenizer = load_tokenizer(directory, "--lm")
        self.computed = self.kept = 0

    @cached_property
    def scorer(self) -> Any:
        """Loads the model when first used."""
        spec, params = hub.load_model(self.directory)
        return Scorer(spec, params, self.backend)

    def shares(self, texts: Sequence[str]) -> np.ndarray:
        """See Door; unknown where a prompt does not fit the model's context."""
        body = {"model": self.fingerprint, "prompt": self.prompt.digest}
        keys = [
            content_key("answers", body | {"text": text[: self.prompt.max_chars]}) for text in texts
        ]
        known = {key: kept["logprobs"] for key in keys if (kept := self.cache.get(key))}
        todo = [(k, t) for k, t in dict(zip(keys, texts, strict=True)).items() if k not in known]
        self.kept += len(known)
        for start in range(0, len(todo), GROUP):
            group = todo[start : start + GROUP]
            values = self._computed([text for _, text in group])
            made = {key: value for (key, _), value in zip(group, values, strict=True)}
            self.cache.append((key, {"logprobs": value}) for key, value in made.items() if value)
            known |= made
            self.computed += len(group)
        nothing = [np.nan] * len(self.prompt.answers)
        found = np.array([known[key] or nothing for key in keys], np.float64)
        shares = np.exp(found - found.max(-1, keepdims=True))
        return shares / shares.sum(-1, keepdims=True)

    def _computed(self, texts: Sequence[str]) -> list[list[float] | None]:
        """Log p of each answer, or None."""
        questions = [self._question(text) for text in texts]
        room = self.scorer.context
        fits = [max(len(row.ids) for row in rows) <= room for rows in questions]
        asked = [rows for rows, flag in zip(questions, fits, strict=True) if flag]
        scored = iter(self.scorer.score(asked) if asked else ())
        return [[float(x) for x in next(scored)] if flag else None for flag in fits]

    def _question(self, text: str) -> Any:
        answers = self.prompt.answers
        if not self.tokenizer.chat_template:
            return encode_options(self.tokenizer, self.prompt.plain(text), answers, special=False)
        context = render(self.prompt.messages(text), self.tokenizer, add_generation_prompt=True)
        return encode_options(self.tokenizer, context, answers, special=True)

    def said(self) -> str:
        """See Door."""
        return f"{self.computed:,} documents asked about, {self.kept:,} cached"

    def close(self) -> None:
        """See Door."""
        self.cache.close()


def open_door(prompt: Prompt, options: Asking) -> Door:
    """The door that the options name."""
    if options.url:
        client = open_client(options.url, options.lm, options, options.cache)
        return EndpointDoor(prompt, client)
    cache = CallCache(options.cache or default_cache())
    return LocalDoor(prompt, options.lm, options.backend, cache)


def asked(options: Asking) -> LmScorer | None:
    """The scorer that `--ask` names, None without it. Raises UsageError for its prompt."""
    return LmScorer(load_prompt(options.ask), options) if options.ask else None


class LmScorer:
    """core.text.classify.scorers.Scorer by a language model; it travels as its settings.

    A scale gives one score, `name`; labels give each its share as `name_label`.
    """

    def __init__(self, prompt: Prompt, options: Asking) -> None:
        self.prompt, self.options = prompt, options
        labels = tuple(f"{prompt.name}_{answer}" for answer in prompt.answers)
        self.names = (prompt.name,) if prompt.numeric else labels
        self.digest = f"{prompt.digest} {_model_name(options)}"
        self.asked = self.unknown = 0
        self._door: Door | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return LmScorer, (self.prompt, self.options)

    @property
    def door(self) -> Door:
        """Opened when first used."""
        if self._door is None:
            self._door = open_door(self.prompt, self.options)
        return self._door

    def score(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """float32[n] of every name; NaN where the model's answer is unknown."""
        shares = self._shares(texts)
        if self.prompt.numeric:
            return {self.names[0]: self._mean(shares).astype(np.float32)}
        return dict(zip(self.names, shares.T.astype(np.float32), strict=True))

    def answers(self, texts: Sequence[str]) -> list[tuple[str | None, float | None]]:
        """(likeliest answer, number on a scale) of each text; None where there is none."""
        shares, names = self._shares(texts), self.prompt.answers
        means = self._mean(shares).tolist() if self.prompt.numeric else [None] * len(texts)
        return [
            (None, None) if np.isnan(row[0]) else (names[row.argmax()], mean)
            for row, mean in zip(shares, means, strict=True)
        ]

    def _mean(self, shares: np.ndarray) -> np.ndarray:
        return shares @ np.array([float(answer) for answer in self.prompt.answers])

    def _shares(self, texts: Sequence[str]) -> np.ndarray:
        answers = len(self.prompt.answers)
        found = np.full((len(texts), answers), np.nan)
        there = [number for number, text in enumerate(texts) if text.strip()]
        if there:
            found[there] = self.door.shares([texts[number] for number in there])
        self.asked += len(texts)
        self.unknown += int(np.isnan(found[:, 0]).sum())
        return found

    def __enter__(self) -> LmScorer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._door is not None:
            self._door.close()

    def said(self) -> str:
        """What was asked and came of it, for a line on stderr."""
        done = "" if self._door is None else f"; {self._door.said()}"
        return f"{self.prompt.name}: {self.asked:,} asked, {self.unknown:,} unknown{done}"


def _model_name(options: Asking) -> str:
    """What names the model in fingerprints: a local one by its files."""
    return options.lm if options.url else model_fingerprint(options.lm, "--lm")
