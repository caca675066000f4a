"""On-policy distillation: a teacher scores the tokens that the policy has sampled.

The advantage of a token gets weight (log p_teacher - log p_policy), the negated estimate of the
reverse KL divergence from the policy to the teacher at that token (arXiv 2306.13649; Thinking
Machines, On-Policy Distillation, 2025). Both are at the temperature of sampling.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.options.grpo import GrpoOptions
from sabia.core.parallel.build_ops import ops_as_served
from sabia.core.recipes.grpo.sample_batch import Batch, score
from sabia.core.recipes.model_source import load_fp32
from sabia.core.spec import ModelSpec, load_spec
from sabia.core.spec.model import check_predicts
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer


def check_teacher(options: GrpoOptions, tokenizer: Tokenizer) -> None:
    """Raise UsageError unless the teacher is a decoder with this tokenizer."""
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


@dataclass(frozen=True)
class OnPolicyTeacher:
    """A model with its parameters on this process's device."""

    spec: ModelSpec
    params: Mapping[str, Any]
    ops: Any

    @classmethod
    def load(cls, path: str, backend: str) -> "OnPolicyTeacher":
        """The teacher of a model directory, in fp32."""
        spec = load_spec(path)
        ops = ops_as_served(backend, spec)
        return cls(spec, ops.to_device(load_fp32(path), "float32"), ops)

    def advised(self, batch: Batch, options: GrpoOptions, rows: int) -> Batch:
        """The batch with `teacher` [R, g, C], its log-probabilities, and advantage [R, g, C]."""
        scored = score(self.spec, self.params, batch, self.ops, options.temperature, rows)
        mask = batch["loss_mask"]
        added = options.teacher_weight * (scored - batch["sampler"]) * mask
        return batch | {"teacher": scored, "advantage": batch["advantage"] + added}

    def distance(self, batch: Batch, share: float) -> tuple[float, float]:
        """Sums over the batch's tokens of log p_policy - log p_teacher, and of ones, of which this
        process counts a share."""
        mask: np.ndarray = batch["loss_mask"]
        apart = (batch["sampler"] - batch["teacher"]) * mask
        return share * float(apart.sum()), share * float(mask.sum())
