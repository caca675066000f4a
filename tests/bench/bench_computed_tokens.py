"""CPU seconds of a training step on fewer tokens: shared prompts of pairs, packed documents.

    OMP_NUM_THREADS=1 python tests/bench/bench_computed_tokens.py MODEL [--rounds 3]
        [--documents 32]

pairs: a step of dpo and a pass without gradients over 4 pairs of 2 x 256 random tokens, of which
the first 27 are the prompt, whole rows and rows whose prompts are computed once, in turns. packed:
the next-token loss of documents of 100 to 2,000 tokens (log-normal, median 330), 8 in a padded
batch beside rows of 2,048 in which they are packed.
"""

import argparse
import time
from functools import partial
from typing import Any

import numpy as np

from sabia.core.model.storage import hub
from sabia.core.text.tokenize.packing import best_fit
from sabia.core.train.losses.next_token import next_token_loss
from sabia.core.train.losses.preference import PreferenceLoss, preference_loss
from sabia.core.train.stepper_factory import make_stepper

PROMPT, ANSWER, PAIRS, ROWS, LENGTH = 27, 229, 4, 8, 2048


def batch(rows: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows of these documents, whose first PROMPT - 1 tokens predict nothing that counts."""
    shape = len(rows), max(sum(map(len, row)) for row in rows)
    names = ("input_ids", "segments", "positions", "targets")
    made: dict[str, np.ndarray] = {name: np.zeros(shape, np.int32) for name in names}
    made["loss_mask"] = np.zeros(shape, np.float32)
    for r, row in enumerate(rows):
        start = 0
        for number, ids in enumerate(row):
            part = slice(start, start + len(ids))
            made["input_ids"][r, part], made["segments"][r, part] = ids, number + 1
            made["positions"][r, part] = np.arange(len(ids))
            made["targets"][r, start : part.stop - 1] = ids[1:]
            made["loss_mask"][r, start + PROMPT - 1 : part.stop - 1] = 1
            start = part.stop
    if max(map(len, rows)) == 1:
        del made["segments"], made["positions"]
    return made


def timed(function: Any, *arguments: Any) -> float:
    started = time.process_time()
    function(*arguments)
    return time.process_time() - started


def pairs(spec: Any, params: Any, draw: Any, rounds: int) -> None:
    rows = []
    for _ in range(PAIRS):
        prompt = draw(PROMPT)
        rows.append([np.concatenate([prompt, draw(ANSWER)]) for _ in range(2)])
    given = batch(rows) | {name: np.zeros((PAIRS, 1), np.float32) for name in ("z", "per_token")}
    given["sides"] = np.tile(np.array([1, -1], np.float32), (PAIRS, 1))
    given["reference"] = np.full((PAIRS, 2), -2000, np.float32)
    given["source"] = np.ones((PAIRS, 1), np.float32)
    loss = partial(preference_loss, options=PreferenceLoss("dpo"))
    steppers = {name: make_stepper("torch", spec, params, loss) for name in ("whole", "shared")}
    steppers["whole"]._whole_rows = "as the other side"  # type: ignore[attr-defined]
    costs: dict[str, list[list[float]]] = {name: [] for name in steppers}
    for _ in range(rounds + 1):  # the first one is a warm-up
        for name, one in steppers.items():
            costs[name].append([timed(one.step, given, 0.0), timed(one.evaluate, given)])
    for name, rows_of in costs.items():
        step, without = np.median(rows_of[1:], 0)
        print(f"pairs, {name}: step {step:.2f} s, without gradients {without:.2f} s", flush=True)


def packed(spec: Any, params: Any, draw: Any, documents: int, rounds: int) -> None:
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(5.8, 1.0, documents), 100, 2000).astype(int)
    texts = [draw(length) for length in lengths]
    rows = [[texts[i] for i in members] for members in best_fit(list(map(len, texts)), LENGTH)]
    forms = {"padded": [[text] for text in texts], "packed": rows}
    one = make_stepper("torch", spec, params, next_token_loss, micro_batch=2)
    for _ in range(rounds):
        for name, every in forms.items():
            made = [batch(every[at : at + ROWS]) for at in range(0, len(every), ROWS)]
            seconds = sum(timed(one.step, some, 0.0) for some in made)
            computed = sum(some["input_ids"].size for some in made)
            rate = lengths.sum() / seconds
            print(
                f"{name}: {computed:,} tokens computed, {rate:.0f} real ones a CPU second",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=32)
    options = parser.parse_args()
    spec, params = hub.load_model(options.model)
    random = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return random.integers(5, spec.vocab_size, count).astype(np.int32)

    pairs(spec, params, draw, options.rounds)
    packed(spec, params, draw, options.documents, options.rounds)


if __name__ == "__main__":
    main()
