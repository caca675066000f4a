"""Requests to a generation engine, and the completions that it returns.

A request is one prompt and `n` samples of it. Random numbers are a function of (seed, request id,
sample, position); a request without an id is identified by its prompt, so the same prompt with the
same seed gives the same samples in any batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sabia.core.errors import UsageError
from sabia.core.generate.sampling import SamplingParams
from sabia.core.generate.thinking import ThinkingBudget
from sabia.core.grammar.guide import Guide

STOP, LENGTH = "stop", "length"
Ranked = Sequence[tuple[int, float]]  # token ids and their log-probabilities, likeliest first


@dataclass(frozen=True)
class Request:
    """`n` samples of at most `max_new_tokens` tokens that continue the token ids of `prompt`.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 filter nothing. A sample ends with a stop
    id (None: the tokenizer's) or where its text holds one of the `stop` strings. `top_logprobs`:
    number of the likeliest tokens to give for each drawn one. `echo`: also give the
    log-probabilities of the prompt. `presence_penalty` is subtracted from the logit of each token
    that the sample has, `frequency_penalty` once for each time it has it, and `logit_bias` is added
    to those of its token ids (before the temperature; as in the API of OpenAI). `guide`: the
    grammar that the text fits, also where it ends at the limit of tokens. `adapter`: the name of an
    adapter that the model's operations have. `thinking`: a budget of reasoning. `routed_experts`:
    also give the experts that each token went to.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    n: int = 1
    id: str = ""
    only: tuple[int, ...] | None = None  # only these of the samples 0..n-1
    top_logprobs: int = 0
    echo: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    guide: Guide | None = None
    adapter: str = ""
    thinking: ThinkingBudget | None = None
    routed_experts: bool = False

    @property
    def samples(self) -> Sequence[int]:
        """The numbers of the requested samples."""
        return range(self.n) if self.only is None else self.only

    @cached_property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters; raises UsageError for impossible ones."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def steers(self) -> bool:
        """Whether logits are changed before sampling."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.logit_bias or self.guide
        )

    @cached_property
    def name(self) -> str:
        """The id, or a hash of the prompt."""
        text = ",".join(map(str, self.prompt))
        return self.id or hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def check(self, vocab_size: int, context: int) -> None:
        """Raise UsageError if the model cannot run the request."""
        if not len(self.prompt) or self.max_new_tokens < 1 or not len(self.samples):
            raise UsageError(
                f"generate: prompt of {len(self.prompt)} tokens, {self.max_new_tokens} new tokens, "
                f"{len(self.samples)} samples (expected 1 or more of each)"
            )
        if not 0 <= min(self.prompt) <= max(self.prompt) < vocab_size:
            raise UsageError(
                f"generate: token ids {min(self.prompt)}..{max(self.prompt)} in the prompt "
                f"(expected 0..{vocab_size - 1}; is this the model's tokenizer?)"
            )
        if len(self.prompt) + self.max_new_tokens > context:
            raise UsageError(
                f"generate: prompt of {len(self.prompt)} + {self.max_new_tokens} new tokens do not "
                f"fit the model's context of {context}; ask for fewer new tokens"
            )
        penalties = (self.presence_penalty, self.frequency_penalty)
        if not all(-2 <= penalty <= 2 for penalty in penalties):
            raise UsageError(
                f"generate: penalties {penalties[0]:g} and {penalties[1]:g} (expected -2 to 2)"
            )
        for token, bias in self.logit_bias:
            if not (0 <= token < vocab_size and -100 <= bias <= 100):
                raise UsageError(
                    f"generate: bias {bias:g} of token {token} (expected -100 to 100 of a token "
                    f"below {vocab_size})"
                )
        if self.guide and self.guide.least_tokens > self.max_new_tokens:
            raise UsageError(
                f"generate: {self.max_new_tokens} new tokens (expected {self.guide.least_tokens} "
                "or more, with which a text that fits the grammar can be written)"
            )
        if any(not text for text in self.stop):
            raise UsageError("generate: an empty stop string (expected one or more characters)")
        _ = self.sampling


@dataclass(frozen=True)
class Echo:
    """The model's log-probability (temperature 1) of each prompt token but the first, given those
    before it, and the likeliest tokens at each of these positions."""

    logprobs: Sequence[float]
    ranked: Sequence[Ranked]


@dataclass(frozen=True)
class Completion:
    """One sample: `tokens` end with the stop id where one was drawn; `text` is without it.

    `logprobs` are of the distribution drawn from, `raw_logprobs` of the model's own (temperature
    1, whole vocabulary); natural logarithms, one a token. `finish_reason` is stop or length.
    `forced`: the places of tokens that were not sampled, but appended by a budget of reasoning.
    `routed_experts`: the experts of the tokens of prompt and sample that the model has run, all but
    the last one, as `core.model.routing` packs them; empty if they were not asked for.
    """

    request_id: str
    sample: int
    tokens: list[int]
    text: str
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str
    forced: list[int] = field(default_factory=list)
    routed_experts: bytes = b""


@dataclass(frozen=True)
class Ended:
    """A sample that a session has finished. ticket: of its request. `ranked` and `echo` are what
    `top_logprobs` and `echo` of the request ask for. versions: of the weights that drew each
    token."""

    ticket: int
    completion: Completion
    ranked: Sequence[Ranked]
    echo: Echo | None
    versions: Sequence[int]
