"""Log-likelihoods from an OpenAI-compatible endpoint, after a check that it returns them.

Scoring a continuation needs `/completions` with `echo` and `logprobs`. Several servers accept these
fields and ignore them; then all options have equal scores and a task has chance accuracy without an
error. So one call with a known text is made first, and an endpoint that does not return a
log-probability for each of its tokens is refused. Calls go through the client of all endpoints:
its cache, its limits on what they cost, its retries.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sabia.core.errors import Failed, UsageError
from sabia.core.generate.calls import EchoedTokens, EchoRequest, Refused, echoed
from sabia.core.generate.client import Client

_WHY = (
    "multiple_choice and perplexity need the log-probabilities of the prompt; use a local "
    "--model DIR, a server with echo (vLLM), or a task of kind exact_match"
)


class Probe(EchoRequest):
    """A text whose tokens cannot all be as likely as each other."""

    def __init__(self) -> None:
        super().__init__("The capital of Brazil is Brasília, not Rio.")

    def accepts(self, given: EchoedTokens) -> bool:
        """Whether the reply has log-probabilities that a model can have computed."""
        logprobs = [p for _, p in given[1:] if p is not None]
        whole = super().accepts(given) and len(logprobs) >= len(given) - 1 >= 4
        return whole and len({round(x, 6) for x in logprobs}) >= 3 and max(logprobs) <= 0


class PromptScorer:
    """Summed log-probabilities of continuations by one endpoint."""

    def __init__(self, client: Client) -> None:
        self.client, self.url = client, client.urls[0]

    def probe(self) -> None:
        """Raise UsageError unless the endpoint echoes a prompt with its log-probabilities."""
        try:
            (reply,) = self.client.wait([self.client.submit(Probe())])
        except Refused as error:
            raise UsageError(f"{error}; {_WHY}") from error
        if reply.refused:
            raise UsageError(f"{self.url}: {reply.error}; {_WHY}")
        if reply.error:
            raise Failed(reply.error)

    def text_logprobs(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The log-probabilities (nats) of each text's tokens but the first, which servers do not
        score; none of a text that the server refuses. Raises Failed if one has no answer."""
        asked = [text for text in dict.fromkeys(texts) if text]
        futures = [self.client.submit(EchoRequest(text)) for text in asked]
        known: dict[str, np.ndarray] = {}
        for text, reply in zip(asked, self.client.wait(futures), strict=True):
            if reply.error and not reply.refused:
                raise Failed(f"{self.url}: {reply.error}; finished calls are kept: run again")
            tokens = [] if reply.refused else echoed(reply.message, text)[1:]
            known[text] = np.array([math.nan if p is None else p for _, p in tokens])
        return [known.get(text, np.zeros(0)) for text in texts]

    def score_all(self, questions: Sequence[tuple[str, Sequence[str]]]) -> list[list[float] | str]:
        """Log-likelihoods (nats) of the continuations of each context, or why the server refuses
        one of them for good. Raises Failed if one has no answer."""
        cells = [(context, text) for context, texts in questions for text in texts]
        futures = [self.client.submit(EchoRequest(context + text)) for context, text in cells]
        replies = iter(zip(cells, self.client.wait(futures), strict=True))
        return [self._question([next(replies) for _ in texts]) for _, texts in questions]

    def _question(self, cells: Sequence[tuple[tuple[str, str], Any]]) -> list[float] | str:
        values = list[float]()
        for (context, text), reply in cells:
            if reply.refused:
                return str(reply.error)
            if reply.error:
                raise Failed(f"{self.url}: {reply.error}; finished calls are kept: run again")
            tokens = echoed(reply.message, context + text)
            values.append(self._sum(tokens, len(context), text))
        return values

    def _sum(self, tokens: EchoedTokens, start: int, text: str) -> float:
        """The sum over the tokens that reach into a text, of which one may begin before it."""
        end = start + len(text)
        ends = [*(offset for offset, _ in tokens[1:]), end]
        scored: list[Any] = [
            p for (first, p), last in zip(tokens, ends, strict=True) if last > start and first < end
        ]
        if not scored or any(p is None or not math.isfinite(p) for p in scored):
            raise Failed(f"{self.url}: no log-probability for a token of {text!r:.40}")
        return float(sum(scored))
