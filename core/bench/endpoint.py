"""Log-likelihoods from an OpenAI-compatible endpoint, after a check that it returns them.

Scoring a continuation needs `/completions` with `echo` and `logprobs`. Several servers accept these
fields and ignore them; then all options have equal scores and a task has chance accuracy without an
error. So one call with a known text is made first, and an endpoint that does not return a
log-probability for each of its tokens is refused.
"""

import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tenacity

from sabia.core import stop
from sabia.core.errors import Failed, UsageError

PROBE = "The capital of Brazil is Brasília, not Rio."
TRIES, TIMEOUT_S = 4, 600.0
_WHY = (
    "multiple_choice and perplexity need the log-probabilities of the prompt; use a local "
    "--model DIR, a server with echo (vLLM), or a task of kind exact_match"
)


class PromptScorer:
    """Summed log-probabilities of continuations by one endpoint."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str = "SABIA_API_KEY",
        concurrency: int = 8,
    ) -> None:
        self.url, self.model = base_url.rstrip("/") + "/completions", model
        self.key, self.concurrency = os.environ.get(api_key_env, ""), concurrency

    def probe(self) -> None:
        """Raise UsageError unless the endpoint echoes a prompt with its log-probabilities."""
        try:
            offsets, logprobs = self._echo(PROBE)
        except (Failed, KeyError, TypeError, IndexError, ValueError) as error:
            reason = " ".join(str(error).split()) or "no log-probabilities in the reply"
            raise UsageError(f"{self.url}: {reason}; {_WHY}") from error
        given = [x for x in logprobs[1:] if x is not None]
        whole = offsets and offsets[-1] < len(PROBE) and len(given) >= len(offsets) - 1 >= 4
        if not whole or len({round(x, 6) for x in given}) < 3 or max(given) > 0:
            raise UsageError(f"{self.url}: ignores echo or logprobs; {_WHY}")

    def score(self, context: str, continuations: Sequence[str]) -> list[float]:
        """Log-likelihoods (nats) of continuations of a context."""
        return [self._one(context, text) for text in continuations]

    def score_all(self, questions: Sequence[tuple[str, Sequence[str]]]) -> list[list[float]]:
        """`score` of many questions, several at a time."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self.score, *question) for question in questions]
            loglikelihoods = []
            for future in futures:
                stop.check()
                loglikelihoods.append(future.result())
        return loglikelihoods

    def _one(self, context: str, text: str) -> float:
        offsets, logprobs = self._echo(context + text)
        start, end = len(context), len(context) + len(text)
        # a token across the boundary counts as part of the continuation
        ends = [*offsets[1:], end]
        scored: list[Any] = [
            p for p, first, last in zip(logprobs, offsets, ends, strict=True)
            if last > start and first < end
        ]  # fmt: skip
        if not scored or any(p is None or not math.isfinite(p) for p in scored):
            raise Failed(f"{self.url}: no log-probability for a token of {text!r:.40}")
        return sum(scored)

    def _echo(self, text: str) -> tuple[list[int], list[float | None]]:
        """(character offsets, log-probabilities) of the prompt's tokens."""
        reply = self._post(
            {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0,
             "echo": True, "logprobs": 1}
        )  # fmt: skip
        choice = reply["choices"][0]
        logs = choice["logprobs"]
        if not choice["text"].startswith(text):
            raise Failed("the reply does not begin with the prompt (the server ignores echo)")
        pairs = [
            (offset, p)
            for offset, p in zip(logs["text_offset"], logs["token_logprobs"], strict=True)
            if offset < len(text)
        ]
        return [offset for offset, _ in pairs], [p for _, p in pairs]

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        tries = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(TRIES),
            wait=tenacity.wait_exponential_jitter(0.5, 30),
            retry=tenacity.retry_if_exception_type(_Retryable),
            reraise=True,
        )
        return tries(self._send, request)

    def _send(self, request: urllib.request.Request) -> Any:
        stop.check()
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            words = " ".join(error.read(300).decode("utf-8", "replace").split())
            kind = _Retryable if error.code in (408, 429) or error.code >= 500 else Failed
            raise kind(f"HTTP {error.code} {words}") from error
        except (OSError, ValueError) as error:
            raise _Retryable(f"no answer ({error})") from error


class _Retryable(Failed):
    """An error that a retry may resolve."""
