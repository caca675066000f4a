"""The figures of a GRPO run: rewards and samples of each step, and rewards of held-out prompts."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.sample_source import SampleSource
from sabia.core.recipes.grpo.step_table import SUMS, StepTable, metrics_row
from sabia.core.train.loop import Results

GREEDY, SAMPLED = "validation_reward", "validation_sampled_reward"


@dataclass(frozen=True)
class PolicyObjective:
    """See core.train.loop.Objective; held_out: prompts to validate on."""

    source: SampleSource
    table: StepTable
    held_out: Sequence[Prompt]

    def display(self, total: int, done: int) -> AbstractContextManager[StepTable]:
        """See Objective: a row per step."""
        return contextlib.nullcontext(self.table)

    def tokens(self, results: Results, sums: np.ndarray) -> tuple[int, int]:
        """See Objective."""
        trained = sum(result.extras.get("tokens", 0.0) for result in results)
        return int(trained), int(sums[SUMS.index("computed")])

    def figures(self, results: Results, sums: np.ndarray, lr: float) -> dict[str, object]:
        """See Objective."""
        return self.table.figures(results, sums, lr)

    def details(self, results: Results, sums: np.ndarray) -> dict[str, object]:
        """See Objective: the rate of sampling."""
        return {"tokens_per_s": metrics_row(0.0, sums, results)["tokens_per_s"]}

    def summary(self, row: dict[str, Any]) -> dict[str, object]:
        """See Objective."""
        if GREEDY in row:
            return {name: row[name] for name in (GREEDY, SAMPLED)}
        rewards = self.table.rewards
        return {"samples": self.table.samples, "reward_first": rewards[0], "reward": rewards[-1]}

    def validate(self, step: int) -> dict[str, object]:
        """See Objective: the mean rewards of a greedy and of a sampled answer to each prompt."""
        if not self.held_out:
            return {}
        self.source.use_policy(step)
        means, count = {}, 0
        for name, temperature in ((GREEDY, 0.0), (SAMPLED, self.source.options.temperature)):
            total, graded = self.source.held_out_rewards(self.held_out, temperature)
            means[name] = total / max(graded, 1.0)
            count = count or int(graded)
        notes.note(
            f"step {step:,}: validation reward {means[GREEDY]:.4f}, sampled {means[SAMPLED]:.4f}"
        )
        return {**means, "validation_prompts": count}
