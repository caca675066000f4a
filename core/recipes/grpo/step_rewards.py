"""Rewards of the steps of samples: process supervision (arXiv 2402.03300, section 4.1.3).

A sample is cut into steps behind each match of a delimiter; white space alone is no step. The
reward of a step is that of the sample up to its end, graded like a whole sample, and belongs to the
token in which the step ends. Within a group the rewards of all steps have their mean subtracted
(and are divided by their standard deviation); the advantage of a token is the sum of those of its
own step and of all later ones. With a value head they are the rewards of those tokens (arXiv
2312.08935, section 3.4).
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sabia.core.generate.requests import Completion
from sabia.core.judge.rewards import Case
from sabia.core.judge.verdict import Grade
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.train.losses.grpo import advantages

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # of bytes that are not yet a character


def step_ends(text: str, delimiter: str) -> list[int]:
    """The ends of a text's steps, in characters; one step at least, the last one ends the text."""
    ends, start = [], 0
    for match in re.finditer(delimiter, text):
        if text[start : match.end()].strip():
            ends.append(start := match.end())
    if ends and not text[start:].strip():
        ends.pop()
    return [*ends, len(text)]


def step_cases(case: Case, delimiter: str) -> list[Case]:
    """The case up to the end of each of its steps; the last one is the case."""
    ends = step_ends(case.text, delimiter)
    return [replace(case, text=case.text[:end]) for end in ends]


def token_ends(sample: Completion, delimiter: str, tokenizer: Tokenizer) -> list[int]:
    """The number of the token in which each step ends; that of the last step is the last token."""

    def characters(count: int) -> int:
        return len(tokenizer.decode(sample.tokens[:count]).rstrip(UNFINISHED))

    counts = range(1, len(sample.tokens) + 1)
    ends = step_ends(sample.text, delimiter)[:-1]
    numbers = [min(bisect_left(counts, end, key=characters), len(counts) - 1) for end in ends]
    return [*numbers, len(sample.tokens) - 1]


def graded_steps(grades: Sequence[Grade], ends: Sequence[int]) -> Grade:
    """The grade of the sample, the last one, with the rewards of all steps; it has none if a step
    has none."""
    scores = [(end, one.score) for end, one in zip(ends, grades, strict=True)]
    known = [(end, score) for end, score in scores if score is not None]
    if len(known) < len(scores):
        return replace(grades[-1], score=None)
    return replace(grades[-1], steps=tuple(known))


def step_rewards(grades: Sequence[Grade]) -> np.ndarray:
    """The rewards of all steps of a group's samples that have them, one after the other."""
    return np.array([reward for grade in grades for _, reward in grade.steps], np.float64)


def token_rewards(sample: Completion, grade: Grade) -> np.ndarray:
    """The reward of each token of a sample: of a step in the token where it ends."""
    made = np.zeros(len(sample.tokens))
    for end, reward in grade.steps:
        made[end] += reward
    return made


def token_advantages(
    samples: Sequence[Completion], grades: Sequence[Grade], std: bool
) -> list[np.ndarray]:
    """The advantages of the tokens of each sample of a group; 0 for one without rewards."""
    normal = iter(advantages(step_rewards(grades)[None], std)[0].tolist())
    made = []
    for sample, grade in zip(samples, grades, strict=True):
        sums = np.zeros(len(sample.tokens))
        for end, _ in grade.steps:
            sums[: end + 1] += next(normal)
        made.append(sums)
    return made
