"""The prompts of a GRPO run: read, rendered, checked; and the prompts of each step.

The order is computed as in pretraining: prompt number n of a run is a pure function of (seed, n),
in passes over all prompts, each pass in another order. Records whose reward cannot be computed are
rejected with the reason, never trained on with an invented reward.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.generate.chat import render
from sabia.core.judge.rewards import Grader
from sabia.core.judge.rubric import Rubric
from sabia.core.shards.order import DataOrder, key64
from sabia.core.shards.sources import Source
from sabia.core.text.tokenize.tokenizer import Tokenizer

RejectRow = Callable[[dict[str, Any], str, str], None]
ATTEMPTS, FURTHER = 16, 1000  # to draw a prompt that is not dull; draws between two of them
COLUMNS = ("id", "messages", "tools", "rubric", "answer", "source")


@dataclass(frozen=True)
class Prompt:
    """One prompt: its rendered token ids, and the answer or rubric that grades its samples."""

    id: str
    messages: Sequence[dict[str, Any]]
    ids: tuple[int, ...]
    answer: str | None
    rubric: Rubric | None
    tools: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    source: str = ""


def read_prompts(
    sources: Sequence[Source], tokenizer: Tokenizer, grader: Grader, longest: int,
    reject: RejectRow, variables: Mapping[str, Any],
) -> list[Prompt]:  # fmt: skip
    """All usable prompts in the order of the input; raises BadData when there is none.

    `longest` bounds the rendered prompt in tokens; `reject` takes (row, reason, shard);
    `variables` are those of the chat template.
    """
    prompts: list[Prompt] = []
    reasons: list[str] = []
    for source in sources:
        name = source.name

        def refuse(row: dict[str, Any], reason: str, name: str = name) -> None:
            reasons.append(reason)
            reject(row, reason, name)

        for batch in source.batches(columns=COLUMNS, reject=refuse):
            for row in batch.to_pylist():
                try:
                    prompts.append(_prompt(row, tokenizer, grader, longest, variables))
                except BadData as error:
                    refuse(row, str(error))
    counted = f"{len(reasons):,} rejected"
    for reason, times in Counter(reasons).most_common(1):
        counted += f"; {times:,} of them: {reason}"
    if not prompts:
        raise BadData(f"no usable prompt records ({counted})")
    if reasons:
        notes.warn(f"of the prompt records {counted}")
    return prompts


def _prompt(
    row: dict[str, Any], tokenizer: Tokenizer, grader: Grader, longest: int,
    variables: Mapping[str, Any],
) -> Prompt:  # fmt: skip
    messages = [{k: v for k, v in m.items() if v is not None} for m in row["messages"]]
    if not messages or messages[-1].get("role") == "assistant":
        raise BadData("the conversation does not end with a turn to answer")
    rubric = grader.check(row["answer"], row["rubric"])
    text = render(messages, tokenizer, True, row["tools"], **variables)
    ids = tuple(tokenizer.encode(text))
    if len(ids) > longest:
        raise BadData(f"the prompt has {len(ids)} tokens (expected at most {longest})")
    name, source = str(row["id"]), str(row.get("source") or "")
    return Prompt(name, messages, ids, row["answer"], rubric, row["tools"], variables, source)


@dataclass(frozen=True)
class PromptSchedule:
    """The prompts of step s are numbers s·count … (s+1)·count - 1 of the run's order; those of a
    later draw for the same places have the same numbers in an order of their own.

    A prompt that is `dull` is kept with probability `keep` and gives way to another otherwise: a
    function of (seed, step, number, draw) and of the numbers in `dull`, which the owner changes.
    """

    prompts: Sequence[Prompt]
    count: int
    seed: int
    keep: float = 1.0
    dull: set[int] = field(default_factory=set)

    def of_step(self, step: int, draw: int = 0) -> list[Prompt]:
        """The prompts of a step, or of another draw of it (both from 0)."""
        chosen = numbers = self._numbers(step, draw)
        for attempt in range(1, ATTEMPTS if self.keep < 1 else 1):
            dull = np.isin(chosen, list(self.dull))
            if not dull.any():
                break
            for n in np.flatnonzero(dull).tolist():
                dull[n] = key64(self.seed, step, n, draw, attempt) / 2**64 >= self.keep
            numbers = np.where(dull, self._numbers(step, draw + attempt * FURTHER), numbers)
            # where a prompt was kept, it stays
            chosen = np.where(dull, numbers, -1)
        return [self.prompts[n] for n in numbers.tolist()]

    def _numbers(self, step: int, draw: int) -> np.ndarray:
        seed = self.seed
        if draw:
            text = f"{self.seed} draw {draw}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
        order = DataOrder((len(self.prompts),), seed=seed)
        return np.asarray(order.rows(step * self.count, self.count))
