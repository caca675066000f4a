"""From graded samples to the arrays of an update.

A row is prompt + sample without its last token, padded behind; what is trained on lies in narrow
arrays [B, C] over the sample's tokens, with `completion_at` telling which hidden state predicts
each (core.train.losses_grpo.sample_logprobs). Samples of groups that teach nothing (all rewards
equal, fewer than two valid) are left out, and with them their share of the denominator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sabia.core.generate.requests import LENGTH, Completion
from sabia.core.judge.verdict import Grade
from sabia.core.recipes.grpo_config import GrpoConfig
from sabia.core.recipes.grpo_prompts import Prompt
from sabia.core.train.losses_grpo import (
    GrpoLossConfig,
    advantages,
    aggregation_weights,
    live_groups,
    sample_logprobs,
)

WIDTH_STEP = 8
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Group:
    """The samples of one prompt with their grades, in the order of their numbers."""

    prompt: Prompt
    samples: Sequence[Completion]
    grades: Sequence[Grade]

    @property
    def rewards(self) -> np.ndarray:
        """Rewards float64[G], NaN where there is none."""
        scores = [np.nan if grade.score is None else grade.score for grade in self.grades]
        return np.array(scores, np.float64)


def make_batch(groups: Sequence[Group], config: GrpoConfig, micro_rows: int) -> Batch | None:
    """The arrays of all rows that teach something; None where no group does."""
    rewards = np.stack([group.rewards for group in groups])
    advantage, live = advantages(rewards, config.std), live_groups(rewards)
    rows = [
        (group.prompt, sample, float(advantage[g, i]))
        for g, group in enumerate(groups)
        for i, sample in enumerate(group.samples)
        if live[g] and not np.isnan(rewards[g, i]) and _trains(sample, config)
    ]
    return _arrays(rows, config, micro_rows) if rows else None


def _trains(sample: Completion, config: GrpoConfig) -> bool:
    return config.overlong == "keep" or sample.finish_reason != LENGTH


def empty_batch(config: GrpoConfig) -> Batch:
    """One row of no weight: what a process adds to a step in which it has nothing to teach."""
    nothing = Completion("", 0, [0], "", [0.0], [0.0], LENGTH)
    batch = _arrays([(Prompt("", (), (0,), None, None), nothing, 0.0)], config, 1)
    for name in ("loss_mask", "weights", "share"):
        batch[name][:] = 0
    return batch


def _arrays(
    rows: Sequence[tuple[Prompt, Completion, float]], config: GrpoConfig, micro_rows: int
) -> Batch:
    count = len(rows)
    longest = max(len(prompt.ids) + len(sample.tokens) - 1 for prompt, sample, _ in rows)
    width = -(-longest // WIDTH_STEP) * WIDTH_STEP
    narrow = max(len(sample.tokens) for _, sample, _ in rows)
    ids = np.zeros((count, width), np.int32)
    at = np.zeros((count, narrow), np.int32)
    targets = np.full((count, narrow), -1, np.int32)
    sampler = np.zeros((count, narrow), np.float32)
    for row, (prompt, sample, _) in enumerate(rows):
        start, length = len(prompt.ids), len(sample.tokens)
        ids[row, :start] = prompt.ids
        ids[row, start : start + length - 1] = sample.tokens[:-1]
        at[row, :length] = np.arange(start - 1, start - 1 + length)
        targets[row, :length] = sample.tokens
        sampler[row, :length] = sample.logprobs
    mask = (targets >= 0).astype(np.float32)
    weights, share = aggregation_weights(mask, config.loss.aggregation, config.max_new_tokens)
    slots = -(-count // micro_rows)
    return {
        "input_ids": ids,
        "completion_at": at,
        "targets": targets,
        "loss_mask": mask,
        "weights": weights.astype(np.float32),
        "share": share.astype(np.float32)[:, None],
        "sampler": sampler,
        "advantage": np.array([a for _, _, a in rows], np.float32)[:, None],
        "slot": np.eye(slots, dtype=np.float32)[np.arange(count) // micro_rows],
    }


def split(batch: Batch, parts: int, seed: tuple[int, int]) -> list[Batch]:
    """The rows in `parts` random parts of nearly equal size (fewer where there are fewer rows)."""
    count = len(batch["targets"])
    if parts == 1:
        return [batch]
    order = np.random.default_rng(seed).permutation(count)
    chosen = np.array_split(order, min(parts, count))
    return [{name: array[rows] for name, array in batch.items()} for rows in chosen]


@torch.no_grad()
def score(
    spec: Any,
    params: Mapping[str, Any],
    batch: Batch,
    ops: Any,
    loss: GrpoLossConfig,
    micro_rows: int,
) -> np.ndarray:
    """Log-probabilities [B, C] of a batch's samples under `params`, without gradients."""
    logprobs = partial(sample_logprobs, spec, params, ops=ops, temperature=loss.temperature)
    names = ("input_ids", "completion_at", "targets")
    parts = [
        logprobs({name: batch[name][start : start + micro_rows] for name in names})
        for start in range(0, len(batch["targets"]), micro_rows)
    ]
    return torch.cat(parts).float().cpu().numpy()
