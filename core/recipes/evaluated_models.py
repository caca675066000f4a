"""The evaluated models: local directories or endpoints.

Both give score rows for a task. A local model computes log-likelihoods and generates in the chosen
backend; an endpoint is probed before its log-probabilities are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.bench.answers import (
    QUESTION_CHARACTERS,
    Answer,
    ask,
    generate,
    matched,
    prompt_ids,
    sampling_of,
)
from sabia.core.bench.contamination.figures import TextFigures, figures_of_nats, text_figures
from sabia.core.bench.contamination.memorization import memory_rows
from sabia.core.bench.conversation.conversations import hold
from sabia.core.bench.conversation.model_tools import ModelTools
from sabia.core.bench.endpoint import PromptScorer
from sabia.core.bench.harness.scores import needs_greedy, score_pairs
from sabia.core.bench.items import Item, by_context
from sabia.core.bench.kept_results import KeptResults
from sabia.core.bench.loglikelihood import (
    Row,
    Scorer,
    document_rows,
    encode_options,
    known_units,
    prefix_token,
    shares_options,
    units,
)
from sabia.core.bench.metrics import choice_scores, document_sums
from sabia.core.bench.score_rows import Score, ScoreRow, scores_of
from sabia.core.bench.task import Task
from sabia.core.errors import UsageError
from sabia.core.generate.budget import Budget
from sabia.core.generate.chat import render
from sabia.core.generate.chat_variables import template_variables
from sabia.core.generate.client import Client
from sabia.core.generate.model_directory import draft_fingerprint, load_draft, model_fingerprint
from sabia.core.generate.opened import default_cache, open_client
from sabia.core.generate.prefixes import PREFILL_POSITIONS, cache_limit, on_cpu
from sabia.core.judge.opened_judges import note_calls
from sabia.core.model.storage.stored_weights import load_stored
from sabia.core.options.chat_template import DATE
from sabia.core.options.eval import ENDPOINT, EvalOptions
from sabia.core.parallel.mesh import parse_mesh
from sabia.core.parallel.split_interface import SplitModel
from sabia.core.recipes.eval_judging import Judging, score_missing
from sabia.core.spec import ModelSpec, load_spec, parameter_count
from sabia.core.spec.model import training_flops_per_token
from sabia.core.text.tokenize.tokenizer import load_tokenizer


def divides(options: EvalOptions) -> bool:
    """Whether a mesh divides models, and not the items alone."""
    of_model = [
        axis for axis, size in parse_mesh(options.mesh).items() if size > 1 and axis != "data"
    ]
    return bool(options.mesh) and (bool(of_model) or options.backend == "jax")


class EvaluatedModel(ABC):
    """A model under evaluation; a context manager that releases what it loaded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> EvaluatedModel:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that identifies the model."""

    def cost(self, task: Task, items: Sequence[Item], samples: int) -> tuple[float, int]:
        """(upper limit of FLOPs, bytes of weights) on this machine: none for an endpoint."""
        return 0.0, 0

    @abstractmethod
    def choices(self, task: Task, items: Sequence[Item]) -> list[Sequence[float] | str]:
        """Log-likelihoods (nats) of each item's choices, or why there are none."""

    @abstractmethod
    def pairs(
        self, task: Task, items: Sequence[Item], greedy: bool
    ) -> list[Sequence[tuple[float, bool]] | str]:
        """Log-likelihoods (nats) of each item's pairs, with whether greedy decoding gives their
        continuations if that is asked (else false); or why there are none."""

    @abstractmethod
    def documents(self, task: Task, items: Sequence[Item]) -> list[tuple[float, int]]:
        """(log-likelihood, tokens) of each document."""

    @abstractmethod
    def figures(self, texts: Sequence[str], share: float) -> list[TextFigures]:
        """How likely texts are, by this share of their tokens. UsageError for an endpoint that
        gives no log-probabilities of prompts."""

    @abstractmethod
    def answers(
        self, task: Task, items: Sequence[Item], options: EvalOptions, only: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Answer]:  # fmt: skip
        """The answers that the model generates, or those of one sample, and its calls of tools."""

    def _held(self, task: Task, items: Sequence[Item], options: EvalOptions) -> list[Answer]:
        """The answers of conversations with later turns or tools."""
        tools = ModelTools(task) if task.tools else None
        schemas = tools.schemas if tools else ()

        def ask_once(prompts: Sequence[Item], sample: int) -> list[Answer]:
            return self.answers(task, prompts, options, sample, schemas)

        return hold(task, items, sampling_of(task, options)[0], ask_once, tools)

    def _answers(self, task: Task, items: Sequence[Item], options: EvalOptions) -> list[Answer]:
        talks = bool(task.turns or task.tools)
        return (self._held if talks else self.answers)(task, items, options)

    def scores(self, task: Task, items: Sequence[Item], judging: Judging) -> Iterator[ScoreRow]:
        """Score rows of a task."""
        if task.yaml is not None and task.kind in ("multiple_choice", "loglikelihood"):
            every = self.pairs(task, items, needs_greedy(task.yaml))
            for item, scored in zip(items, every, strict=True):
                if isinstance(scored, str):
                    yield from self._unscored(task, item, scored)
                else:
                    yield from score_pairs(task, self.name, item, scored)
        elif task.kind == "multiple_choice":
            for item, nats in zip(items, self.choices(task, items), strict=True):
                if isinstance(nats, str):
                    yield from self._unscored(task, item, nats)
                    continue
                correct = int(item.answer or 0)
                best = max(range(len(nats)), key=nats.__getitem__)
                detail: Mapping[str, Any] = {
                    "loglikelihoods": list(nats),
                    "chosen": item.choices[best],
                    "answer": item.choices[correct],
                    "question": item.question[-QUESTION_CHARACTERS:],
                }
                values = choice_scores(nats, item.choices, correct)
                yield from scores_of(self.name, task.name, item.id, 0, values, detail)
        elif task.kind == "perplexity":
            for item, (total, count) in zip(items, self.documents(task, items), strict=True):
                sums = document_sums(item.text, total, count)
                yield from scores_of(self.name, task.name, item.id, 0, sums)
        else:
            answers = self._answers(task, items, judging.options)
            yield from judging.score(task, self.name, matched(task, items, answers, self.name))

    def _unscored(self, task: Task, item: Item, reason: str) -> list[Score]:
        return score_missing(task, self.name, [(item, Answer(item.id, 0, "", missing=reason))])


class LocalModel(EvaluatedModel):
    """A model directory."""

    def __init__(self, name: str, directory: str, options: EvalOptions) -> None:
        super().__init__(name)
        self.directory, self.options = directory, options
        self.backend, self.dtype = options.backend, options.dtype
        self._files = model_fingerprint(directory)
        self.anew = options.force  # whether what is kept is computed again
        self.split: SplitModel | None = None  # over the devices of a mesh, while it is computed

    def __exit__(self, *_: object) -> None:
        if "kept" in vars(self):
            self.kept.close()
        if "engine" in vars(self) and self.engine.draft:
            notes.note(f"{self.name}: {self.engine.counts.describe()}")
        for name in ("scorer", "engine", "kept"):
            vars(self).pop(name, None)

    def fingerprint(self) -> str:
        return " ".join((self.name, self._files, *([d] if (d := self.variables.get(DATE)) else [])))

    @cached_property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template."""
        return template_variables(self.options.chat, self.tokenizer)

    def cost(self, task: Task, items: Sequence[Item], samples: int) -> tuple[float, int]:
        if task.generates:
            prompts = (len(prompt_ids(item, self.tokenizer, self.variables)) for item in items)
            lengths = [n + task.max_new_tokens for n in prompts for _ in range(samples)]
        elif task.kind == "perplexity":
            lengths = list(map(len, self.tokenizer.encode_ordinary_batch([i.text for i in items])))
        else:
            lengths = [len(row.ids) for item in items for row in self._options(task, item)]
        spec, flops = self.spec, 0.0
        for n, rows in Counter(lengths).items():
            each = training_flops_per_token(spec, min(n, spec.max_positions), "causal") / 3
            flops += rows * n * each
        return flops, parameter_count(spec) * (4 if self.dtype == "float32" else 2)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        return load_tokenizer(self.directory, "--model")

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's settings."""
        return load_spec(self.directory)

    @cached_property
    def kept(self) -> KeptResults:
        """What the model has computed, in this run or an earlier one."""
        folder = Path(self.options.judge_cache or default_cache()) / "models"
        identity = f"{self._files} {self.backend} {self.dtype}"
        if divides(self.options):
            identity += f" {self.options.mesh}"
        draft = draft_fingerprint(self.options)
        return KeptResults(folder, identity, anew=self.anew, draft=draft)

    @cached_property
    def scorer(self) -> Scorer:
        """The model, loaded when first used."""
        spec, params = load_stored(self.directory)
        return Scorer(spec, params, self.backend, self.dtype, split=self.split)

    @cached_property
    def engine(self) -> Any:
        """The generation engine, with the weights and the backend of the scorer."""
        from sabia.core.generate.engine import Engine
        from sabia.core.generate.runner.memory import cache_memory

        spec, params, ops = self.scorer.spec, self.scorer.params, self.scorer.ops
        memory = cache_limit(params, cache_memory(params["embed"]))
        engine = Engine(
            spec, params, self.tokenizer, self.dtype, on_step=self.scorer.check_stop, ops=ops,
            split=self.split, cache_bytes=memory, shares_prefixes=True,
            prefill_positions=PREFILL_POSITIONS if on_cpu(params) else 1 << 40,
        )  # fmt: skip
        engine.draft = load_draft(self.options, engine, self.dtype, self.backend)
        return engine

    def compute(self, task: Task, items: Sequence[Item], options: EvalOptions) -> None:
        """Compute, and keep, what `scores` and `figures` need."""
        if not items:
            return
        if task.yaml is not None and task.kind in ("multiple_choice", "loglikelihood"):
            self.pairs(task, items, needs_greedy(task.yaml))
        elif task.kind == "multiple_choice":
            self.choices(task, items)
        elif task.kind == "perplexity":
            self.documents(task, items)
        else:
            self._answers(task, items, options)
        if options.min_k:
            of_texts = partial(self.figures, share=options.min_k)
            list(memory_rows(self.name, task, items, of_texts))

    def choices(self, task: Task, items: Sequence[Item]) -> list[Sequence[float] | str]:
        questions = [self._options(task, item) for item in items]
        self._warn_of_cuts(task, questions)
        return [nats.tolist() for nats in self._loglikelihoods(questions)]

    def pairs(
        self, task: Task, items: Sequence[Item], greedy: bool
    ) -> list[Sequence[tuple[float, bool]] | str]:
        questions = [
            encode_options(self.tokenizer, context, texts, special=False)
            for item in items
            for context, texts in by_context(item)
        ]
        self._warn_of_cuts(task, questions)
        values = iter(self._loglikelihoods(questions, greedy))
        made: list[Sequence[tuple[float, bool]] | str] = []
        for item in items:
            rows = [row for _ in by_context(item) for row in next(values).tolist()]
            made.append([(row[0], bool(row[1])) if greedy else (row, False) for row in rows])
        return made

    def _warn_of_cuts(self, task: Task, questions: Sequence[Sequence[Row]]) -> None:
        context = self.spec.max_positions
        if cut := sum(any(len(row.ids) > context + 1 for row in rows) for rows in questions):
            what = f"{cut} of {len(questions)} questions"
            notes.warn(f"{task.name}: {what} cut on the left to {context} tokens")

    def _loglikelihoods(
        self, questions: Sequence[Sequence[Row]], greedy: bool = False
    ) -> list[np.ndarray]:
        """Of each question's rows; the model is loaded unless all are kept."""
        context = self.spec.max_positions
        fitted = [[row.fitting(context) for row in rows] for rows in questions]
        shares = shares_options(self.spec, self.backend) and not divides(self.options)
        values = known_units(fitted, shares, self.kept, greedy)
        if self.split or not all(values.values()):
            return self.scorer.score(fitted, self.kept, greedy)
        return [np.concatenate([values[u] for u in units(rows, shares)]) for rows in fitted]

    def _options(self, task: Task, item: Item) -> Any:
        if item.pairs:
            return [
                row
                for context, texts in by_context(item)
                for row in encode_options(self.tokenizer, context, texts, special=False)
            ]
        if not item.messages:
            texts = [task.delimiter + choice for choice in item.choices]
            return encode_options(self.tokenizer, item.text, texts, special=False)
        context = render(item.messages, self.tokenizer, True, **self.variables)
        return encode_options(self.tokenizer, context, item.choices, special=True)

    def documents(self, task: Task, items: Sequence[Item]) -> list[tuple[float, int]]:
        prefix, context = prefix_token(self.tokenizer), self.spec.max_positions
        if task.yaml is not None:  # as there: with the special tokens of the tokenizer
            encoded = [self.tokenizer.encode(item.text, bos=True) for item in items]
        else:
            encoded = self.tokenizer.encode_ordinary_batch([item.text for item in items])
        rows = [document_rows(ids, prefix, context) for ids in encoded]
        flat = self._loglikelihoods([[row] for document in rows for row in document])
        sums, start = [], 0
        for ids, document in zip(encoded, rows, strict=True):
            part = flat[start : start + len(document)]
            sums.append((sum(float(v[0]) for v in part), len(ids)))
            start += len(document)
        return sums

    def figures(self, texts: Sequence[str], share: float) -> list[TextFigures]:
        first = prefix_token(self.tokenizer)
        rows = [(first, *ids) for ids in self.tokenizer.encode_ordinary_batch(list(texts))]
        different = dict.fromkeys(row for row in rows if len(row) > 1)
        known = {row: self.kept.figures(row, share) for row in different}
        if left := [row for row, figures in known.items() if figures is None]:
            made = list(zip(left, text_figures(self.scorer, left, share), strict=True))
            known |= dict(made)
            self.kept.keep_figures(made, share)
        return [known.get(row) or TextFigures(0, 0.0, 0.0, 0.0) for row in rows]

    def answers(
        self, task: Task, items: Sequence[Item], options: EvalOptions, only: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Answer]:  # fmt: skip
        context = self.spec.max_positions
        return generate(
            lambda: self.engine, context, self.tokenizer, task, items, options, self.variables,
            self.kept, only, tools, self.split,
        )  # fmt: skip


class Endpoint(EvaluatedModel):
    """An OpenAI-compatible server; its calls are cached, so none is paid for twice."""

    def __init__(
        self, name: str, url: str, model: str, options: EvalOptions, budget: Budget
    ) -> None:
        super().__init__(name)
        self.url, self.model, self.options, self.budget = url, model, options, budget

    def __exit__(self, *_: object) -> None:
        if "client" in vars(self):
            note_calls(self.name, self.client)
            self.client.close()
            del self.client

    def fingerprint(self) -> str:
        return f"{self.name} {self.url} {self.model}"

    def choices(self, task: Task, items: Sequence[Item]) -> list[Sequence[float] | str]:
        if any(item.messages for item in items):
            raise UsageError(
                f"{task.name}: a chat endpoint gives no log-probabilities of choices; use a plain "
                "prompt (chat = false), or kind exact_match"
            )
        questions = [(i.text, [task.delimiter + choice for choice in i.choices]) for i in items]
        return list(self._scorer().score_all(questions))

    def pairs(
        self, task: Task, items: Sequence[Item], greedy: bool
    ) -> list[Sequence[tuple[float, bool]] | str]:
        if greedy:
            raise UsageError(
                f"{task.name}: an endpoint does not say which tokens are the likeliest; use a "
                "local --model DIR"
            )
        asked = [part for item in items for part in by_context(item)]
        parts = iter(self._scorer().score_all(asked))
        made: list[Sequence[tuple[float, bool]] | str] = []
        for item in items:
            of_item = [next(parts) for _ in by_context(item)]
            refused = next((part for part in of_item if isinstance(part, str)), None)
            made.append(refused or [(float(nats), False) for part in of_item for nats in part])
        return made

    def figures(self, texts: Sequence[str], share: float) -> list[TextFigures]:
        return [figures_of_nats(nats, share) for nats in self._scorer().text_logprobs(texts)]

    def documents(self, task: Task, items: Sequence[Item]) -> list[tuple[float, int]]:
        raise UsageError(f"{task.name}: perplexity needs a local --model DIR, not an endpoint")

    @cached_property
    def client(self) -> Client:
        """The client, opened when first used."""
        cache = self.options.judge_cache
        return open_client(
            [self.url], self.model, self.options, cache, self.budget, refused_after=None
        )

    def _scorer(self) -> PromptScorer:
        """Raises UsageError for a server that gives no log-probabilities of prompts."""
        scorer = PromptScorer(self.client)
        scorer.probe()
        return scorer

    def answers(
        self, task: Task, items: Sequence[Item], options: EvalOptions, only: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[Answer]:  # fmt: skip
        return ask(self.client, task, items, options, only, tools)


def open_models(options: EvalOptions, budget: Budget) -> list[EvaluatedModel]:
    """The models of --model: DIR, NAME=DIR, URL#MODEL or NAME=URL#MODEL; names are unique."""
    models: list[EvaluatedModel] = []
    for text in options.model:
        name, equals, source = text.partition("=")
        if not equals or "/" in name:
            name, source = "", text
        if ENDPOINT.match(source):
            url, _, model = source.partition("#")
            if not model:
                raise UsageError(
                    f"--model: {source} does not name one of its models (expected {source}#NAME)"
                )
            models.append(Endpoint(name or model, url, model, options, budget))
            continue
        if not name:
            # the directory's name; for the `final` of a run directory, the run's
            path = Path(source).resolve()
            name = path.parent.name if path.name == "final" else path.name
            if name in {model.name for model in models}:
                name = source
        models.append(LocalModel(name, source, options))
    names = [model.name for model in models]
    if len(set(names)) != len(names):
        raise UsageError(f"--model: two have the same name: {', '.join(names)}; write NAME=DIR")
    return models
