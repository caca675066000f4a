"""What the models of a comparison are scored by: held-out documents, and the answers of tasks.

Each item is scored by its log-likelihood: a document of the held-out rows given its first token (a
document that continues in a second row is two items of one cluster), the right answer of a task's
item given its prompt, a text of a perplexity task as `sabia eval` does it. A task's score is in
bits per byte of the answers, which small models change before they change the share of right ones.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.bench.harness.scores import right_choices
from sabia.core.bench.items import Item
from sabia.core.bench.loglikelihood import Row, Scorer, document_rows, encode_options, prefix_token
from sabia.core.bench.task import Task
from sabia.core.bench.task_files import items_of, load_tasks
from sabia.core.errors import BadData, UsageError
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.train.token_rows import TokenRows

HELD_OUT = "held-out loss"
READ_ROWS = 256  # at a time


@dataclass(frozen=True)
class Measure:
    """Rows to score. item[rows]: the item of each row; sizes[items]: its tokens or bytes;
    clusters[items]: numbers of what is independent. per: nats of a unit."""

    name: str
    unit: str
    per: float
    rows: tuple[Row, ...]
    item: np.ndarray
    sizes: np.ndarray
    clusters: np.ndarray

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the rows."""
        digest = hashlib.blake2b(digest_size=16)
        for row, item in zip(self.rows, self.item.tolist(), strict=True):
            digest.update(np.array((item, row.scored, *row.ids), "<i8").tobytes())
        return digest.hexdigest()

    def losses(self, scorer: Scorer) -> np.ndarray:
        """Nats of each item, float64[items]."""
        nats = np.zeros(len(self.sizes))
        np.subtract.at(nats, self.item, np.concatenate(scorer.score([[row] for row in self.rows])))
        return nats

    def score(self, nats: np.ndarray) -> float:
        """The sum of nats[items] over that of sizes, in `unit`."""
        return float(nats.sum() / self.sizes.sum() / self.per)


def held_out(rows: TokenRows, context: int, tokenizer: str = "") -> Measure:
    """The documents of token rows. Raises BadData for documents that are masked, or longer than
    the model's context.

    tokenizer: its path; a document that does not end with its end of document continues in the next
    one, unless none of them does. '': all documents are whole.
    """
    end = load_tokenizer(tokenizer).eos_id if tokenizer else None
    scored: list[Row] = []
    ended: list[bool] = []  # documents, those of one token too
    document: list[int] = []  # of each item, among these
    for start in range(0, len(rows), READ_ROWS):
        batch = rows.batch(np.arange(start, min(start + READ_ROWS, len(rows))))
        for ids, segments, mask in zip(
            batch["input_ids"], batch["segments"], batch["loss_mask"], strict=True
        ):
            for number in range(1, int(segments.max(initial=0)) + 1):
                at = np.flatnonzero(segments == number)
                if mask[at].sum() < len(at) - 1:
                    raise BadData(
                        "--validation: rows in which only some tokens have a loss (expected rows "
                        "of sabia tokenize)"
                    )
                ended.append(int(ids[at[-1]]) == end)
                if len(at) > 1:
                    document.append(len(ended) - 1)
                    scored.append(Row(tuple(ids[at].tolist()), len(at) - 1))
    longest = max((len(row.ids) for row in scored), default=0)
    if longest > context:
        raise BadData(
            f"--validation: a document of {longest:,} tokens in a row (expected at most the "
            f"model's context of {context:,})"
        )
    sizes = [row.scored for row in scored]
    whole = np.array(ended if any(ended) else [True] * len(ended))
    clusters = (np.cumsum(whole) - whole)[document].tolist()
    return _measure(HELD_OUT, "nats per token", 1.0, [[row] for row in scored], sizes, clusters)


def of_tasks(
    paths: Sequence[str], data: Sequence[str], path: str, context: int, seed: int
) -> list[Measure]:
    """A measure of each task of some files; path: of the tokenizer. Raises UsageError for a task
    without an answer to score, BadData for one with a single item."""
    if not path:
        raise UsageError("--task: the rows name no tokenizer (expected --tokenizer DIR)")
    tokenizer, made = load_tokenizer(path), []
    for task in load_tasks(paths, data):
        items = items_of(task, seed=seed)
        answers = [_answer(tokenizer, task, item, context) for item in items]
        rows = [rows for rows, _ in answers]
        if cut := sum(any(len(row.ids) > context + 1 for row in of_item) for of_item in rows):
            notes.warn(f"{task.name}: {cut} of {len(rows)} prompts cut on the left to {context:,} "
                       "tokens")  # fmt: skip
        sizes = [len(text.encode()) for _, text in answers]
        clusters = [item.cluster or item.id for item in items]
        made.append(_measure(task.name, "bits per byte", math.log(2), rows, sizes, clusters))
    return made


def _measure(
    name: str, unit: str, per: float, rows: Sequence[Sequence[Row]], sizes: Sequence[int],
    clusters: Sequence[Any],
) -> Measure:  # fmt: skip
    different, numbers = np.unique(clusters, return_inverse=True)
    if len(different) < 2:
        raise BadData(f"{name}: {len(different)} independent items (expected two or more)")
    item = np.repeat(np.arange(len(rows)), [len(of_item) for of_item in rows])
    flat = tuple(row for of_item in rows for row in of_item)
    return Measure(name, unit, per, flat, item, np.array(sizes), numbers)


def _answer(tokenizer: Tokenizer, task: Task, item: Item, context: int) -> tuple[list[Row], str]:
    """The rows that score an item's answer, and the answer."""
    if task.kind == "perplexity":
        if task.yaml is not None:  # as in eval
            ids = tokenizer.encode(item.text, bos=True)
        else:
            ids = tokenizer.encode_ordinary_batch([item.text])[0]
        return document_rows(ids, prefix_token(tokenizer), context), item.text
    prompt, answer = _prompted(task, item)
    if not answer.strip():
        raise UsageError(
            f"--task: {task.name}, item {item.id}: no answer in text after a prompt in text "
            "(expected a task with right choices or exact answers, without a chat template, or "
            "one of perplexity)"
        )
    return list(encode_options(tokenizer, prompt, [answer], special=False)), answer


def _prompted(task: Task, item: Item) -> tuple[str, str]:
    """The prompt of an item and its right answer with what separates them; '' for what is not a
    text."""
    if item.pairs:
        right = right_choices(item) if task.kind == "multiple_choice" else [0]
        return item.pairs[right[0]] if right else ("", "")
    answer = item.gold if task.yaml is not None else item.answer
    if isinstance(answer, int) and item.choices:
        answer = item.choices[answer]
    if item.messages or task.kind == "rubric" or not isinstance(answer, str):
        return "", ""
    return item.text, (task.yaml.target_delimiter if task.yaml else task.delimiter) + answer
