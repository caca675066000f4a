"""The scores of a reward model: `sft --loss reward` trains one, `grpo --reward model` asks it."""

from collections.abc import Sequence

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.generate.chat import render_answer
from sabia.core.generate.template_engine import chat_template
from sabia.core.judge.rewards import Case
from sabia.core.recipes.classifier.sequence_classifier import ClassifierModel
from sabia.core.spec.families import load_spec
from sabia.core.text.tokenize.tokenizer import load_tokenizer

FLAG = "--reward-model"


class RewardScorer:
    """Scores answers by a model directory with one score, rendered with its own chat template."""

    def __init__(self, path: str) -> None:
        """Raises UsageError unless the directory is of such a model."""
        spec = load_spec(path)
        if spec.classifier is None or spec.classifier.labels != 1:
            raise UsageError(
                f"{FLAG}: {path} has no single score (expected a model that sabia sft --loss "
                "reward has trained)"
            )
        self.tokenizer = load_tokenizer(path, FLAG)
        chat_template(self.tokenizer, f"{FLAG}: {path}")
        self.longest = spec.max_positions
        self.model = ClassifierModel(path)

    def score(self, cases: Sequence[Case]) -> list[float | None]:
        """The score of each answer; None where it cannot be rendered, or is longer than the
        model's context."""
        rows = [self._ids(case) for case in cases]
        scores = iter(self.model.vectors([ids for ids in rows if ids is not None], 1)[:, 0])
        return [None if ids is None else float(next(scores)) for ids in rows]

    def _ids(self, case: Case) -> np.ndarray | None:
        turn = {"role": "assistant", "content": case.text}
        try:
            ids, _ = render_answer([*case.messages, turn], self.tokenizer)
        except BadData:
            return None
        return np.array(ids, np.int32) if len(ids) <= self.longest else None
