"""Scores of documents by a language model that is asked about each, in one of two backends.

A local model computes the probability of each answer: one pass over the prompt, log p(answer) for
each, and p by their softmax; the score on a scale is its mean under p. A server is asked for the
answer, which is read from its text. Finished calls are stored in a content-addressed cache, so none
is paid for or computed twice. A failed call, and a reply that cannot be read, is unknown: NaN,
counted, never a score. When the server is unavailable the run stops, and continues from there when
it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from sabia.core.bench.loglikelihood import Scorer, encode_options
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import ChatRequest, content_key
from sabia.core.generate.chat import render
from sabia.core.generate.client import Client
from sabia.core.generate.model_directory import model_fingerprint
from sabia.core.generate.opened import default_cache, open_budget, open_client
from sabia.core.model.storage import hub
from sabia.core.options.classify import AskOptions
from sabia.core.recipes.classifier.lm_prompt import Prompt, load_prompt
from sabia.core.shards.job import Job
from sabia.core.text.tokenize.tokenizer import load_tokenizer

GROUP = 64  # documents of a local model whose answers are kept at once


class EndpointBackend:
    """An OpenAI-compatible server; the answer that it gives has probability 1."""

    def __init__(self, prompt: Prompt, client: Client) -> None:
        self.prompt, self.client = prompt, client

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """float64[n, answers]: the probability of each answer; a row of NaN where unknown."""
        limit = self.prompt.max_tokens
        requests = [ChatRequest(self.prompt.messages(text), max_tokens=limit) for text in texts]
        by_text = np.full((len(texts), len(self.prompt.answers)), np.nan)
        readers = [lambda text: self.prompt.parse(text) is not None] * len(requests)
        for row, reply in enumerate(self.client.chat(requests, readers)):
            answer = None if reply.error else self.prompt.parse(reply.text or "")
            if answer is not None:
                by_text[row] = np.arange(by_text.shape[1]) == answer
        return by_text

    def summary(self) -> str:
        """What it did, for a line on stderr."""
        return self.client.summary()

    def close(self) -> None:
        """Close the client."""
        self.client.close()


class LocalBackend:
    """A model directory, scored by core.bench.loglikelihood; `cache`: of finished documents."""

    def __init__(self, prompt: Prompt, directory: str, backend: str, cache: CallCache) -> None:
        self.prompt, self.directory, self.backend, self.cache = prompt, directory, backend, cache
        self.fingerprint = model_fingerprint(directory, "--lm")
        self.tokenizer = load_tokenizer(directory, "--lm")
        self.computed = self.cached = 0

    @cached_property
    def scorer(self) -> Any:
        """The model, loaded when first used."""
        spec, params = hub.load_model(self.directory)
        return Scorer(spec, params, self.backend)

    def probabilities(self, texts: Sequence[str]) -> np.ndarray:
        """As EndpointBackend's; unknown where a prompt does not fit the model's context."""
        body = {"model": self.fingerprint, "prompt": self.prompt.digest}
        limit = self.prompt.max_chars
        keys = [content_key("answers", body | {"text": text[:limit]}) for text in texts]
        known = {key: row["logprobs"] for key in keys if (row := self.cache.get(key))}
        missing = [(k, t) for k, t in dict(zip(keys, texts, strict=True)).items() if k not in known]
        self.cached += len(known)
        # in groups, so that an interrupted run has the finished ones in the cache
        for start in range(0, len(missing), GROUP):
            group = missing[start : start + GROUP]
            logprobs = self._logprobs([text for _, text in group])
            new = {key: row for (key, _), row in zip(group, logprobs, strict=True)}
            self.cache.append((key, {"logprobs": row}) for key, row in new.items() if row)
            known |= new
            self.computed += len(group)
        unknown = [np.nan] * len(self.prompt.answers)
        rows = np.array([known[key] or unknown for key in keys], np.float64)  # [n, answers]
        exp = np.exp(rows - rows.max(-1, keepdims=True))  # softmax without overflow
        return exp / exp.sum(-1, keepdims=True)

    def _logprobs(self, texts: Sequence[str]) -> list[list[float] | None]:
        """Log p of each answer, or None where a prompt does not fit."""
        questions = [self._question(text) for text in texts]
        limit = self.scorer.context
        fits = [max(len(row.ids) for row in rows) <= limit for rows in questions]
        fitting = [rows for rows, fit in zip(questions, fits, strict=True) if fit]
        scored = iter(self.scorer.score(fitting) if fitting else ())
        return [[float(x) for x in next(scored)] if fit else None for fit in fits]

    def _question(self, text: str) -> Any:
        answers = self.prompt.answers
        if not self.tokenizer.chat_template:
            return encode_options(self.tokenizer, self.prompt.plain(text), answers, special=False)
        context = render(self.prompt.messages(text), self.tokenizer, add_generation_prompt=True)
        return encode_options(self.tokenizer, context, answers, special=True)

    def summary(self) -> str:
        """What it did, for a line on stderr."""
        return f"{self.computed:,} documents computed, {self.cached:,} cached"

    def close(self) -> None:
        """Close the cache."""
        self.cache.close()


def lm_scorer(job: Job, options: AskOptions) -> LmScorer:
    """The scorer that `--ask` names. Raises UsageError for its prompt."""
    return LmScorer(load_prompt(options.ask), options, job)


class LmScorer:
    """core.text.classify.scorers.Scorer by a language model; pickled as its settings.

    A scale gives one score, `name`; labels give the probability of each as `name_label`.
    """

    def __init__(self, prompt: Prompt, options: AskOptions, job: Job) -> None:
        self.prompt, self.options, self.job = prompt, options, job
        labels = tuple(f"{prompt.name}_{answer}" for answer in prompt.answers)
        self.names = (prompt.name,) if prompt.numeric else labels
        # a local model is identified by its files
        model = options.lm if options.url else model_fingerprint(options.lm, "--lm")
        self.digest = f"{prompt.digest} {model}"
        self.asked = self.unknown = 0

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return LmScorer, (self.prompt, self.options, self.job)

    @cached_property
    def backend(self) -> EndpointBackend | LocalBackend:
        """The backend that the options name, opened when first used."""
        options = self.options
        if options.url:
            budget = open_budget(options, self.job)
            client = open_client(options.url, options.lm, options, options.cache, budget)
            return EndpointBackend(self.prompt, client)
        cache = CallCache(options.cache or default_cache())
        return LocalBackend(self.prompt, options.lm, options.backend, cache)

    def score(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """float32[n] of every name; NaN where the model's answer is unknown."""
        probabilities = self._probabilities(texts)
        if self.prompt.numeric:
            return {self.names[0]: self._mean(probabilities).astype(np.float32)}
        return dict(zip(self.names, probabilities.T.astype(np.float32), strict=True))

    def answers(self, texts: Sequence[str]) -> list[tuple[str | None, float | None]]:
        """(likeliest answer, number on a scale) of each text; None where there is none."""
        probabilities, names = self._probabilities(texts), self.prompt.answers
        means = self._mean(probabilities).tolist() if self.prompt.numeric else [None] * len(texts)
        return [
            (None, None) if np.isnan(row[0]) else (names[row.argmax()], mean)
            for row, mean in zip(probabilities, means, strict=True)
        ]

    def _mean(self, probabilities: np.ndarray) -> np.ndarray:
        """The expected number on the scale, float64[n]."""
        return probabilities @ np.array([float(answer) for answer in self.prompt.answers])

    def _probabilities(self, texts: Sequence[str]) -> np.ndarray:
        rows = np.full((len(texts), len(self.prompt.answers)), np.nan)
        nonempty = [number for number, text in enumerate(texts) if text.strip()]
        if nonempty:
            rows[nonempty] = self.backend.probabilities([texts[number] for number in nonempty])
        self.asked += len(texts)
        self.unknown += int(np.isnan(rows[:, 0]).sum())
        return rows

    def __enter__(self) -> LmScorer:
        return self

    def __exit__(self, *_: object) -> None:
        if "backend" in vars(self):
            self.backend.close()

    def summary(self) -> str:
        """How many documents were asked about, and with what outcome, for a line on stderr."""
        details = f"; {self.backend.summary()}" if "backend" in vars(self) else ""
        return f"{self.prompt.name}: {self.asked:,} asked, {self.unknown:,} unknown{details}"
