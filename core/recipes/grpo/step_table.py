"""The report of a GRPO run: a table row and a metrics row per step, a warning of collapse.

The sums of all processes are added as one vector (`SUMS`), so the figures are of all samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import Failed
from sabia.core.generate.client import ClientStats
from sabia.core.generate.requests import LENGTH
from sabia.core.generate.session import Counts
from sabia.core.judge.agreement import Pairs, audited
from sabia.core.judge.reward_checks import RewardChecks, Traits, same_family
from sabia.core.judge.verdict import Verdict
from sabia.core.recipes.grpo.sample_batch import Group
from sabia.core.recipes.grpo.value_estimates import Estimates
from sabia.core.train.losses.grpo import informative_groups
from sabia.core.train.stepper import StepResult

SUMS = (
    *("solved", "nats", "teacher_kl", "teacher_tokens"),
    *("reward", "graded", "samples", "live", "groups", "tokens", "truncated", "unknown", "items"),
    *("made", "seconds", "processes", "computed", "proposed", "accepted", "forced"),
    *("judge_calls", "judge_cached", "judge_usd"),
    *Estimates._fields,
)
AUDIT = len(SUMS)  # behind these sums: those of `Pairs`, then those of `Traits`
TRAITS = AUDIT + len(Pairs._fields)
SOURCES = TRAITS + len(Traits.of(()).numbers)  # then rewards and graded samples of each source
SOLVED = 1.0  # the reward of a sample that has solved its prompt
HEADER_EVERY = 20
# column → its figure in the metrics, and how it is written
COLUMNS = {
    "step": ("step", ","), "reward": ("reward", ".3f"), "live": ("live_groups", ".0%"),
    "length": ("length", ".1f"), "clip": ("clip_fraction", ".1%"),
    "|dlogp|": ("logprob_gap", ".0e"), "grad": ("grad_norm", ".3f"),
    "tok/s": ("tokens_per_s", ",.0f"),
}  # fmt: skip
JUDGE_COLUMNS = {"cached": ("judge_cached", ".0%"), "judge $": ("judge_usd", ".4f")}
COLLAPSE_SHARE, COLLAPSE_DROP, COLLAPSE_STEPS = 0.5, 0.1, 3


def step_sums(
    groups: Sequence[Group], made: int, seconds: float, computed: float,
    before: ClientStats, after: ClientStats, sources: Sequence[str] = (),
    distance: tuple[float, float] = (0.0, 0.0), drafted: Counts = Counts(),
    estimates: Estimates = Estimates(),
) -> np.ndarray:  # fmt: skip
    """Sums over this process's samples, in the order of SUMS, with those of audits and checks, and
    by source.

    `made` tokens took `seconds`.

    computed: tokens in the forward passes of training. distance: sums over trained tokens of
    log-probabilities minus the teacher's, and their number. before, after: counts of the judge's
    calls. drafted: of the tokens that a draft proposed. estimates: of the value head.
    """
    rewards = np.stack([group.rewards for group in groups])
    samples = [sample for group in groups for sample in group.samples]
    verdicts = [v for group in groups for grade in group.grades for _, v, _ in grade.verdicts]
    values = {
        "solved": (np.nan_to_num(rewards, nan=-np.inf).max(1) >= SOLVED - 1e-9).sum(),
        "nats": -sum(sum(sample.logprobs) for sample in samples),
        "teacher_kl": distance[0],
        "teacher_tokens": distance[1],
        "reward": np.nansum(rewards),
        "graded": (~np.isnan(rewards)).sum(),
        "samples": rewards.size,
        "live": informative_groups(rewards).sum(),
        "groups": len(groups),
        "tokens": sum(len(sample.tokens) for sample in samples),
        "truncated": sum(sample.finish_reason == LENGTH for sample in samples),
        "unknown": sum(verdict is Verdict.UNKNOWN for verdict in verdicts),
        "items": len(verdicts),
        "made": made,
        "seconds": seconds,
        "processes": 1,
        "computed": computed,
        "proposed": drafted.proposed,
        "accepted": drafted.accepted,
        "forced": sum(len(sample.forced) for sample in samples),
        "judge_calls": after.calls - before.calls,
        "judge_cached": after.cached - before.cached,
        "judge_usd": (after.usd or 0.0) - (before.usd or 0.0),
        **estimates._asdict(),
    }
    audit = Pairs()
    for grade in (grade for group in groups for grade in group.grades):
        named = [(one.judge, one.audit, one.numbers) for one in grade.opinions]
        audit = audit.plus(audited(grade.numbers, named))
    traits = Traits.of(([s.text for s in group.samples], group.rewards) for group in groups)
    by_source = []
    for source in sources:
        rewards_of = rewards[[group.prompt.source == source for group in groups]]
        by_source += [np.nansum(rewards_of), (~np.isnan(rewards_of)).sum()]
    parts = [values[name] for name in SUMS], audit, traits.numbers, by_source
    return np.array([number for part in parts for number in part], np.float64)


def judge_row(sums: np.ndarray, priced: bool) -> dict[str, object]:
    """The judge's calls of a step: those paid for, the share of answers from the cache, dollars;
    what its auditor was asked about, and how far it agrees."""
    t = dict(zip(SUMS, sums.tolist(), strict=False))
    answers = t["judge_calls"] + t["judge_cached"]
    row = {
        "judge_calls": int(t["judge_calls"]),
        "judge_cached": t["judge_cached"] / max(answers, 1),
    }
    row |= {"judge_usd": t["judge_usd"]} if priced else {}
    if (audit := Pairs(*sums[AUDIT:TRAITS].tolist())).number:
        row["audit_verdicts"], row["audit_agreement"] = int(audit.number), audit.agreement
        row |= {"audit_kappa": audit.kappa} if audit.kappa is not None else {}
    return row


def metrics_row(lr: float, sums: np.ndarray, updates: Sequence[StepResult]) -> dict[str, object]:
    """The figures of a step for metrics.jsonl: means over samples, tokens and updates."""
    t = dict(zip(SUMS, sums.tolist(), strict=False))
    made = [update for update in updates if update.updated]
    trained = sum(update.extras.get("tokens", 0.0) for update in updates)
    row = {
        "reward": t["reward"] / max(t["graded"], 1),
        "live_groups": t["live"] / t["groups"],
        "pass_at_k": t["solved"] / t["groups"],
        "entropy": t["nats"] / max(t["tokens"] - t["forced"], 1),
        "samples": int(t["samples"]),
        "no_reward": int(t["samples"] - t["graded"]),
        "unknown_verdicts": int(t["unknown"]),
        "length": t["tokens"] / t["samples"],
        "truncated": t["truncated"] / t["samples"],
        "sampled_tokens": int(t["tokens"] - t["forced"]),
        "trained_tokens": int(trained),
        "clip_fraction": _share(updates, "clipped", trained),
        "logprob_gap": _share(updates, "gap", trained),
        "logprob_gap_max": max(
            0.0, *(float(np.max(update.extras["gap_max"])) for update in updates)
        ),
        "updates": len(made),
        "lr": lr,
        "tokens_per_s": t["made"] / max(t["seconds"] / t["processes"], 1e-9),
    }
    if t["teacher_tokens"]:
        row["teacher_kl"] = t["teacher_kl"] / t["teacher_tokens"]
    if t["valued"]:
        estimates = Estimates(*(t[name] for name in Estimates._fields))
        row["explained_variance"] = estimates.explained_variance
        row["value_loss"] = _share(updates, "value_loss", trained)
        row["value_clip_fraction"] = _share(updates, "value_clipped", trained)
    if t["proposed"]:
        row["accepted_proposals"] = t["accepted"] / t["proposed"]
    if made:
        row["loss"] = float(np.mean([update.loss for update in made]))
        row["grad_norm"] = float(np.mean([update.grad_norm for update in made]))
    if any("k3" in update.extras for update in updates):
        row["kl"] = _share(updates, "k3", trained)
    return row


def _share(updates: Sequence[StepResult], name: str, tokens: float) -> float:
    return sum(float(update.extras.get(name, 0.0)) for update in updates) / max(tokens, 1.0)


def other_experts(mismatch: float, bound: float) -> str:
    """What is wrong with a sampler whose choices of experts differ by this share."""
    return (
        f"the sampler has other experts: the trainer's routers would not choose {mismatch:.0%} of "
        f"those that it chose (expected at most {bound:.0%})"
    )


@dataclass
class StepTable:
    """Writes rows on stderr under a header, and warns once when the reward collapses.

    max_gap: bound of the mean |old - sampler| of a step, in nats. judged: there is a judge, priced:
    and a price of its calls. policy, judges: names of the model and of the judges' models.
    sources: of the prompts, where there are several. entropy_floor: below it there is one warning.
    exact: there must be no difference at all. max_mismatch: bound of `routing_mismatch`.
    expert_layers: numbers of the layers with experts.
    """

    max_gap: float = float("inf")
    judged: bool = False
    priced: bool = False
    policy: str = ""
    judges: Sequence[str] = ()
    sources: Sequence[str] = ()
    entropy_floor: float = 0.0
    exact: bool = False
    max_mismatch: float = 1.0
    expert_layers: Sequence[int] = ()
    rows: int = 0
    samples: int = 0
    rewards: list[float] = field(default_factory=list)
    warned: bool = False
    warned_of_entropy: bool = False
    checks: RewardChecks = field(default_factory=RewardChecks)

    def show(self, row: dict[str, Any]) -> None:
        """Print the row of one more step; warn once when the reward has collapsed.

        Raises Failed if the trainer's log-probabilities are not those of the sampler.
        """
        columns = COLUMNS | dict([*JUDGE_COLUMNS.items()][: self.judged + self.priced])
        if self.rows % HEADER_EVERY == 0:
            notes.note("  ".join(f"{name:>7}" for name in columns))
        self.rows += 1
        # a step without an update has no norm
        cells = (f"{row[k]:>7{form}}" if k in row else f"{'-':>7}" for k, form in columns.values())
        notes.note("  ".join(cells))
        self.check_collapse()
        if (
            self.entropy_floor
            and row["entropy"] < self.entropy_floor
            and not self.warned_of_entropy
        ):
            self.warned_of_entropy = True
            notes.warn(
                f"step {row['step']}: the entropy is {row['entropy']:.3g} nats a token (expected "
                f"at least --entropy-floor {self.entropy_floor:g}): samples of a prompt become "
                "equal; try a lower --lr, a larger --clip-high or a KL penalty (--beta)"
            )
        for line in (*self.checks.warnings(), *self.checks.family(self.policy, self.judges)):
            notes.warn(line)
        if row.get("routing_mismatch", 0.0) > self.max_mismatch:
            raise Failed(
                f"step {row['step']}: {other_experts(row['routing_mismatch'], self.max_mismatch)}; "
                "the step is not saved"
            )
        if self.exact and not row["logprob_gap_max"] == row["logprob_gap"] == 0:
            raise Failed(
                f"step {row['step']}: with --exact the trainer's log-probability of a sampled "
                f"token differs from the sampler's by up to {row['logprob_gap_max']:.3g} "
                "(expected 0): on this machine products depend on the rows beside them; the step "
                "is not saved. Train without --exact"
            )
        if not row["logprob_gap"] <= self.max_gap:
            raise Failed(
                f"step {row['step']}: the trainer's log-probabilities of the sampled tokens differ "
                f"from the sampler's by {row['logprob_gap']:.3g} on average (expected at most "
                f"{self.max_gap:g}): it trains another distribution than it samples; the step is "
                "not saved. Train with a higher --precision, or raise --max-logprob-gap"
            )

    def figures(
        self, results: Sequence[StepResult], sums: np.ndarray, lr: float
    ) -> dict[str, object]:
        """The metrics of one more step, whose samples and reward are recorded."""
        row = metrics_row(lr, sums, results)
        if (routed := float(results[0].extras.get("routed", 0))) > 0:
            shares = np.asarray(results[0].extras["rerouted"], np.float64) / routed
            row["routing_mismatch"] = float(shares.mean())
            by_layer = zip(map(str, self.expert_layers), shares.tolist(), strict=True)
            row["routing_mismatch_by_layer"] = dict(by_layer)
        if self.sources:
            pairs = sums[SOURCES:].reshape(-1, 2).tolist()
            named = zip(self.sources, pairs, strict=True)
            row["reward_by_source"] = {k: total / n for k, (total, n) in named if n}
        if self.judged:
            row |= judge_row(sums, self.priced) | self.checks.add(sums[TRAITS:SOURCES].tolist())
            row["judge_family"] = int(bool(same_family(self.policy, self.judges)))
        self.add(row)
        return row

    def add(self, row: Mapping[str, Any]) -> None:
        """Count the samples of a step and record its reward."""
        self.samples += row["samples"]
        self.rewards.append(row["reward"])

    def check_collapse(self) -> None:
        """Warn once if the last rewards are far below the first ones of the run."""
        if self.warned or len(self.rewards) < 2 * COLLAPSE_STEPS:
            return
        first = float(np.mean(self.rewards[:COLLAPSE_STEPS]))
        now = float(np.mean(self.rewards[-COLLAPSE_STEPS:]))
        if first > 0 and now < COLLAPSE_SHARE * first and first - now > COLLAPSE_DROP:
            self.warned = True
            notes.warn(
                f"reward has collapsed from {first:.3f} to {now:.3f}: the updates destroy the "
                "policy; stop, and try a tenth of --lr from the same model"
            )

    def describe(self) -> list[str]:
        """Parts of the summary of a run."""
        first, last = self.rewards[0], self.rewards[-1]
        return [f"{self.samples:,} samples", f"reward {first:.3f} → {last:.3f}"]
