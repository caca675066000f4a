"""`eval --min-k`: figures that tell whether a model has read the items of a task.

The text of an item is what the contamination index looks for: its question without examples. With
the task's key `paraphrase` the gap to the item's paraphrases is measured, with `canary` the
exposure of the task's canary among CANARIES others, in which each digit and hexadecimal letter is
another one.
"""

import math
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sabia.core.bench.contamination.apart import CANARY, GAP, MIN_K, MIN_K_PLUS
from sabia.core.bench.contamination.figures import TextFigures, exposure_bits
from sabia.core.bench.items import Item, question_of, value
from sabia.core.bench.metrics import LN2
from sabia.core.bench.score_rows import Score
from sabia.core.bench.task import Task
from sabia.core.bench.task_files import items_of
from sabia.core.errors import UsageError

CANARIES = 255


def memory_rows(
    model: str,
    task: Task,
    items: Sequence[Item],
    figures_of: Callable[[Sequence[str]], Sequence[TextFigures]],
) -> Iterator[Score]:
    """Score rows with the figures of each item, which a model gives for texts; the canary's is in
    the first item's."""
    plain = {item.id: item for item in items_of(replace(task, shots=0, shots_data=""))}
    texts = [question_of(plain[item.id]) for item in items]
    others = [_paraphrases(task, item) for item in items]
    canaries = [task.canary, *other_canaries(task.canary)] if task.canary else []
    every = [*texts, *(text for of_item in others for text in of_item), *canaries]
    figures = iter(figures_of(every))
    of_texts = [next(figures) for _ in texts]
    of_others = [[next(figures) for _ in of_item] for of_item in others]
    exposed = [one.nats for one in figures]
    for number, (item, one) in enumerate(zip(items, of_texts, strict=True)):
        values = {MIN_K: one.min_k, MIN_K_PLUS: one.min_k_plus}
        if others[number]:
            bits = [
                _bits(other, text)
                for other, text in zip(of_others[number], others[number], strict=True)
            ]
            values[GAP] = sum(bits) / len(bits) - _bits(one, texts[number])
        if exposed and number == 0 and not any(map(math.isnan, exposed)):
            values[CANARY] = exposure_bits(exposed[0], exposed[1:])
        for name, number_of in values.items():
            if not math.isnan(number_of):  # endpoints do not give all of them
                yield Score(model, task.name, item.id, 0, name, number_of)


def _paraphrases(task: Task, item: Item) -> list[str]:
    given = value(task.paraphrase, item.fields) if task.paraphrase else []
    return [given] if isinstance(given, str) else [str(text) for text in given]


def _bits(one: TextFigures, text: str) -> float:
    """Bits a byte."""
    return -one.nats / LN2 / max(len(text.encode()), 1)


def other_canaries(canary: str) -> list[str]:
    """CANARIES texts of the form of a canary, drawn with a fixed seed. UsageError for one without
    digits."""
    draw = random.Random(0)
    code = re.compile(r"[0-9a-fA-F]{4,}")

    def another(match: re.Match[str]) -> str:
        letters = string.ascii_lowercase[:6] if match[0].lower() == match[0] else "ABCDEF"
        return "".join(
            draw.choice(string.digits if not re.search("[a-fA-F]", match[0])
                        else string.digits + letters)
            for _ in match[0]
        )  # fmt: skip

    if not code.search(canary) or not any(map(str.isdigit, canary)):
        raise UsageError(f"canary {canary!r:.60}: no hexadecimal code of four digits or more in it")
    return [code.sub(another, canary) for _ in range(CANARIES)]
