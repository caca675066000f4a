"""The pieces of a document, and the answers of models: those behind a server, or in this process.

A long document is cut as the recipe says and rewritten piece by piece. Both kinds of models take
requests and give responses in order. Each answer is in a content-addressed cache (the key is a hash
of model, messages and sampling) before it is returned, so a run that is started again does not pay
for it twice. Many calls of a server are in flight; a model in this process generates in groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sabia.core import notes, stop
from sabia.core.errors import BadData, UsageError
from sabia.core.generate import calls
from sabia.core.generate.budget import Budget
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import ChatRequest, ChatResponse, content_key
from sabia.core.generate.chat import render
from sabia.core.generate.chat_variables import server_variables, template_variables
from sabia.core.generate.client import Client, Estimate
from sabia.core.generate.model_directory import (
    draft_fingerprint,
    load_draft,
    load_engine,
    model_fingerprint,
)
from sabia.core.generate.opened import default_cache, open_client, print_estimate
from sabia.core.generate.requests import Request
from sabia.core.generate.template_engine import chat_template
from sabia.core.generate.thinking import asked_budget, thinking_fields
from sabia.core.generate.turn_parser import parse_turn
from sabia.core.options.chat_template import DATE, chat_variables
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards.job import Job
from sabia.core.text.rewrite.rewrite_recipe import Pieces, Recipe

if TYPE_CHECKING:
    from sabia.core.generate.engine import Engine

SPARE_TOKENS = 64
GROUP = 64  # samples that are in the cache together
BATCHES_AHEAD = 2  # that are requested before the first has its answers
Collect = Callable[[], list[ChatResponse]]
Fields = Mapping[str, Any]  # of a request
NONE: Fields = {}
Made = TypeVar("Made")


def one_process(job: Job) -> Job:
    """The job with one process; says so if it had several."""
    if job.jobs > 1:
        notes.note(f"-j {job.jobs} is ignored: a model engine uses one process (see --concurrency)")
    return replace(job, jobs=1)


def in_advance(started: Iterable[Callable[[], Made]]) -> Iterator[Made]:
    """What functions return that wait for answers, with up to BATCHES_AHEAD more requested."""
    pending: deque[Callable[[], Made]] = deque()
    for wait in started:
        pending.append(wait)
        if len(pending) > BATCHES_AHEAD:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


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


class EndpointAnswers:
    """Answers of the model of a client; `extra` is part of each request. thinking: fields that ask
    for a budget of reasoning."""

    fingerprint = ""  # the name of the model is that of the client

    def __init__(self, client: Client, chat: str = "", thinking: Fields = NONE) -> None:
        self.client, self.extra = client, {**server_variables(chat), **thinking}

    @property
    def name(self) -> str:
        """The model that is asked for."""
        return self.client.model

    def submit(self, requests: Sequence[ChatRequest]) -> Collect:
        """Start the calls; the function returned waits for the responses, in order."""
        return partial(self.client.wait, [self.client.submit(request) for request in requests])

    def cached_text(self, request: ChatRequest) -> str | None:
        """The text of a finished call; None if it is not in the cache."""
        kept = self.client.cache.get(request.key(self.client.model))
        return None if kept is None else calls.text_of(kept)

    def print_estimate(self, requests: Iterable[ChatRequest]) -> Estimate | None:
        """Print the most that requests would cost, and return it."""
        return print_estimate(self.client, requests)

    def close(self) -> None:
        self.client.close()


class LocalAnswers:
    """Answers of a model in this process; `fingerprint` identifies it in the cache.

    Requests that differ in their vote alone are samples of one prompt, which is run once.
    """

    client = None

    def __init__(
        self, engine: Engine, name: str, fingerprint: str, cache: CallCache, chat: str = "",
        thinking: Fields = NONE,
    ) -> None:  # fmt: skip
        """Raises UsageError for a template that needs a date which --chat does not give."""
        chat_template(engine.tokenizer, f"--engine local: {name}")
        self.variables = template_variables(chat, engine.tokenizer)
        if DATE in self.variables and DATE not in chat_variables(chat):
            raise UsageError(
                f"--chat: {name} has a chat template that writes the date (expected one, so that "
                f"all shards get the same, such as --chat date={self.variables[DATE]})"
            )
        self.engine, self.name, self.fingerprint, self.cache = engine, name, fingerprint, cache
        self.extra = dict(thinking)

    def submit(self, requests: Sequence[ChatRequest]) -> Collect:
        """The function returned generates the responses, in order."""
        return lambda: self._collect(requests)

    def cached_text(self, request: ChatRequest) -> str | None:
        """The text of a finished answer; None if it is not in the cache."""
        kept = self.cache.get(self._key(request))
        return None if kept is None else self._response("", kept, request).text

    def print_estimate(self, requests: Iterable[ChatRequest]) -> Estimate | None:
        """Print how many answers would be generated."""
        keys = [(self._key(request), request.max_tokens or 0) for request in requests]
        missing = {key: tokens for key, tokens in keys if self.cache.get(key) is None}
        print(
            f"generate with {self.name}: {len(missing):,} answers ({len(keys) - len(missing):,} "
            f"more are in the cache), at most {sum(missing.values()):,} tokens"
        )
        return None

    def close(self) -> None:
        self.cache.close()
        if self.engine.draft:
            notes.note(f"{self.name}: {self.engine.counts.describe()}")

    def _key(self, request: ChatRequest, vote: int | None = None) -> str:
        body = {
            "model": self.fingerprint,
            "messages": request.messages,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed or 0,
            **request.extra,
            **({"chat": self.variables} if self.variables else {}),
        }
        return content_key("local", body, request.vote if vote is None else vote)

    def _collect(self, requests: Sequence[ChatRequest]) -> list[ChatResponse]:
        keys = [self._key(request) for request in requests]
        replies = {key: kept for key in keys if (kept := self.cache.get(key)) is not None}
        missing: dict[str, dict[str, ChatRequest]] = {}  # by prompt
        for key, request in zip(keys, requests, strict=True):
            if key not in replies:
                missing.setdefault(self._key(request, vote=0), {})[key] = request
        for group in _groups(missing):
            stop.check()
            new = self._generate(group)
            self.cache.append((key, reply) for key, reply in new.items() if "text" in reply)
            replies |= new
        pairs = zip(keys, requests, strict=True)
        return [self._response(key, replies[key], request) for key, request in pairs]

    def _generate(
        self, group: Mapping[str, Mapping[str, ChatRequest]]
    ) -> dict[str, dict[str, Any]]:
        """Replies by key; a prompt that the model cannot be given gets an error."""
        todo, replies, keys = [], dict[str, dict[str, Any]](), dict[tuple[str, int], str]()
        for prompt, samples in group.items():
            votes = {request.vote: key for key, request in samples.items()}
            try:
                request = self._request(prompt, next(iter(samples.values())), tuple(sorted(votes)))
            except BadData as error:
                replies |= {key: {"error": str(error)} for key in samples}
                continue
            todo.append(request)
            keys |= {(prompt, vote): key for vote, key in votes.items()}
        for made in self.engine.generate(todo) if todo else []:
            reply = {"text": made.text, "finish_reason": made.finish_reason}
            replies[keys[made.request_id, made.sample]] = reply
        return replies

    def _request(self, prompt: str, asked: ChatRequest, votes: tuple[int, ...]) -> Request:
        """The request for some samples of a prompt. Raises BadData if it does not fit."""
        tokenizer, context = self.engine.tokenizer, self.engine.spec.max_positions
        tools = asked.extra.get("tools")
        text = render(asked.messages, tokenizer, True, tools, **self.variables)
        ids = tokenizer.encode(text)
        most = min(asked.max_tokens or context, context - len(ids))
        if most < min(SPARE_TOKENS, asked.max_tokens or SPARE_TOKENS):
            raise BadData(f"does not fit the model's context ({len(ids)} of {context} tokens)")
        return Request(
            ids,
            most,
            asked.temperature,
            seed=asked.seed or 0,
            n=votes[-1] + 1,
            id=prompt,
            only=votes,
            thinking=asked_budget(asked.extra, text, tokenizer),
        )

    def _response(self, key: str, reply: Mapping[str, Any], asked: ChatRequest) -> ChatResponse:
        if "error" in reply:
            return ChatResponse(key, model=self.name, error=reply["error"])
        tokenizer, tools = self.engine.tokenizer, asked.extra.get("tools")
        message = parse_turn(reply["text"], asked.messages, tokenizer, tools, **self.variables)
        return ChatResponse(
            key, message["content"], reply["finish_reason"], model=self.name, message=message
        )


Answers = EndpointAnswers | LocalAnswers


def _groups(
    missing: Mapping[str, Mapping[str, ChatRequest]],
) -> Iterator[dict[str, Mapping[str, ChatRequest]]]:
    """Prompts of about GROUP samples together; the samples of a prompt stay together."""
    group: dict[str, Mapping[str, ChatRequest]] = {}
    for prompt, samples in missing.items():
        group[prompt] = samples
        if sum(map(len, group.values())) >= GROUP:
            yield group
            group = {}
    if group:
        yield group


def open_answers(options: RewriteOptions, budget: Budget) -> Answers:
    """The answers of the model that the options name. Raises UsageError."""
    if options.engine == "local":
        return local_answers(options.model, options)
    client = open_client(
        options.url, options.model, options, options.cache, budget, options.timeout
    )
    return EndpointAnswers(client, options.chat, thinking_fields(options))


def local_answers(directory: str, options: RewriteOptions) -> LocalAnswers:
    """The answers of a model directory. Raises UsageError."""
    cache = CallCache(options.cache or default_cache())
    fingerprint = model_fingerprint(directory)
    engine = load_engine(directory, backend=options.backend)
    engine.draft = load_draft(options, engine, backend=options.backend)
    fingerprint = " ".join(filter(None, (fingerprint, draft_fingerprint(options))))
    thinking = thinking_fields(options)
    return LocalAnswers(engine, directory, fingerprint, cache, options.chat, thinking)


@dataclass(frozen=True)
class Writer:
    """Asks a model for the rewritten pieces of documents."""

    answers: Answers
    recipe: Recipe
    temperature: float
    seed: int

    def request(self, text: str) -> ChatRequest:
        """The request for one piece."""
        return ChatRequest(
            [{"role": "system", "content": self.recipe.prompt}, {"role": "user", "content": text}],
            max_tokens=answer_tokens(text, self.recipe.pieces),
            temperature=self.temperature,
            seed=self.seed if self.temperature > 0 else None,
            extra=self.answers.extra,
        )

    def submit(self, texts: Sequence[str]) -> Collect:
        """Start rewriting; the function returned waits for the responses, in order."""
        return self.answers.submit([self.request(text) for text in texts])
