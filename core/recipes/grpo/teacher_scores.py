"""On-policy distillation: a teacher scores the tokens that the policy has sampled.

The advantage of a token gets weight (log p_teacher - log p_policy), the negated estimate of the
reverse KL divergence from the policy to the teacher at that token (arXiv 2306.13649; Thinking
Machines, On-Policy Distillation, 2025). Both are at the temperature of sampling. The teacher is a
model on each process's device, or a server that gives the log-probabilities of prompts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.build_ops import ops_as_served
from sabia.core.recipes.grpo.sample_batch import Batch, score, sequences
from sabia.core.recipes.grpo.server_calls import Json, ServerCalls
from sabia.core.recipes.model_source import load_fp32
from sabia.core.spec import load_spec
from sabia.core.spec.model import check_predicts
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer

PROBED = 48  # tokens of the first request to a server
LEAST_COMPARED = 8  # tokens of it whose texts are compared
UNKNOWN = "\ufffd"


def open_teacher(options: GrpoOptions, tokenizer: Tokenizer) -> "Callable[[str], OnPolicyTeacher]":
    """What opens the teacher, given the backend; raises UsageError unless it is a decoder with
    this tokenizer."""
    if not options.teacher_is_served:
        _check_directory(options, tokenizer)
        return lambda backend: LocalTeacher(options.teacher, backend)
    teacher = ServedTeacher(options.teacher, tokenizer)
    return lambda backend: teacher


def _check_directory(options: GrpoOptions, tokenizer: Tokenizer) -> None:
    path, spec = options.teacher, load_spec(options.teacher)
    check_predicts(spec)
    if load_tokenizer(path, "--teacher").fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"--teacher: {path} has another tokenizer than {options.model} (expected the same: its "
            "log-probabilities are of the policy's tokens)"
        )
    if spec.vocab_size < tokenizer.vocab_size:
        raise UsageError(
            f"--teacher: {path} has a vocabulary of {spec.vocab_size:,} (expected the tokenizer's, "
            f"{tokenizer.vocab_size:,})"
        )


class OnPolicyTeacher(ABC):
    """What both kinds of teachers do with their log-probabilities."""

    on_wait: Callable[[], None] | None = None

    @abstractmethod
    def scores(self, batch: Batch, options: GrpoOptions, rows: int) -> np.ndarray:
        """Log-probabilities [R, g, C] of a batch's samples, `rows` rows in a pass."""

    def advised(self, batch: Batch, options: GrpoOptions, rows: int) -> Batch:
        """The batch with `teacher` [R, g, C], its log-probabilities, and advantage [R, g, C]."""
        scored = self.scores(batch, options, rows)
        mask = batch["loss_mask"]
        added = options.teacher_weight * (scored - batch["sampler"]) * mask
        return batch | {"teacher": scored, "advantage": batch["advantage"] + added}

    def distance(self, batch: Batch, share: float) -> tuple[float, float]:
        """Sums over the batch's tokens of log p_policy - log p_teacher, and of ones, of which this
        process counts a share."""
        mask: np.ndarray = batch["loss_mask"]
        apart = (batch["sampler"] - batch["teacher"]) * mask
        return share * float(apart.sum()), share * float(mask.sum())


class LocalTeacher(OnPolicyTeacher):
    """A model directory, with its parameters in fp32 on this process's device."""

    def __init__(self, path: str, backend: str) -> None:
        self.spec = load_spec(path)
        self.ops = ops_as_served(backend, self.spec)
        self.params = self.ops.to_device(load_fp32(path), "float32")

    def scores(self, batch: Batch, options: GrpoOptions, rows: int) -> np.ndarray:
        """See OnPolicyTeacher."""
        return score(
            self.spec, self.params, batch, self.ops, options.temperature, rows, routes=True
        )


class ServedTeacher(OnPolicyTeacher):
    """A server that repeats prompts of token ids with their log-probabilities (`echo`)."""

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        """The server at the URL, after one request for tokens from all over the vocabulary.

        Raises UsageError if it gives no log-probabilities, or names the tokens otherwise than the
        tokenizer, and what `ServerCalls.answers` raises.
        """
        self.calls = ServerCalls("--teacher", url)
        self.model = str(self.calls.model()["id"])
        size = tokenizer.vocab_size
        ids = np.unique(np.linspace(0, size - 1, PROBED).astype(int)).tolist()
        (reply,) = self.calls.answers([self._call(ids, 0)])
        self._read(reply, len(ids))
        named = reply["choices"][0]["logprobs"].get("tokens") or []
        pairs = zip(named, ids, strict=False)  # behind them is the token that was drawn
        texts = [(str(name).strip(), tokenizer.decode([i]).strip()) for name, i in pairs]
        texts = [pair for pair in texts if all(pair) and UNKNOWN not in "".join(pair)]
        texts = [pair for pair in texts if not pair[0].startswith("bytes:")]
        if len(texts) < LEAST_COMPARED:
            raise UsageError(f"--teacher: {url} does not name the tokens of a prompt by their text")
        if other := [pair for pair in texts if pair[0] != pair[1]]:
            raise UsageError(
                f"--teacher: {url} has another tokenizer than the policy: a token that is "
                f"{other[0][1]!r} here is {other[0][0]!r} there"
            )

    def scores(self, batch: Batch, options: GrpoOptions, rows: int) -> np.ndarray:
        """See OnPolicyTeacher; the server decides what it computes together."""
        scored = np.zeros(batch["targets"].shape, np.float32)
        asked = sequences(batch)
        calls = [self._call(ids, number) for number, (_, _, ids, _) in enumerate(asked)]
        self.calls.on_wait = self.on_wait
        for reply in self.calls.answers(calls):
            row, sample, ids, start = asked[int(reply["asked"]["seed"])]
            scored[row, sample, : len(ids) - start] = self._read(reply, len(ids))[start - 1 :]
        return scored

    def _call(self, ids: Sequence[int], number: int) -> tuple[str, Json]:
        """The request; its seed is without effect and tells which one is answered."""
        # one token more, because most servers draw at least one
        more = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "seed": number}
        return f"{self.calls.url}/completions", {"model": self.model, "prompt": [*ids], **more}

    def _read(self, reply: Json, tokens: int) -> list[float]:
        """The log-probabilities of all tokens of a prompt but the first one."""
        try:
            given = reply["choices"][0]["logprobs"]["token_logprobs"]
            logprobs = [float(p) for p in given[1:tokens]]
        except (KeyError, IndexError, TypeError, ValueError):
            logprobs = []
        if len(logprobs) != tokens - 1 or not len(given) <= tokens + 1:
            raise UsageError(
                f"--teacher: {self.calls.url} gives no log-probabilities of a prompt's tokens "
                "(expected a server with echo, such as sabia serve)"
            )
        return logprobs
