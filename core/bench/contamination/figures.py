"""How likely a model finds the tokens of a text: what tells texts that it has read from others.

Min-K% (Shi et al. 2023, arXiv 2310.16789, section 4) is the mean log-probability of the k % least
likely tokens; Min-K%++ (Zhang et al. 2024, arXiv 2404.02936, section 3) takes instead of a token's
log-probability how many standard deviations it is above the mean of the model's distribution at its
place. Both are higher for texts of the training data.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sabia.core import stop
from sabia.core.bench.loglikelihood import Scorer, grouped, has_fixed_rotations, padded
from sabia.core.model import forward
from sabia.core.notes import progress

LENGTH_STEP = 64  # JAX: lengths are padded to multiples of it


@dataclass(frozen=True)
class TextFigures:
    """Of one text: nats, the sum of its tokens' log-probabilities; min_k and min_k_plus (in
    standard deviations), see the module. NaN where it is not known."""

    tokens: int
    nats: float
    min_k: float
    min_k_plus: float


def text_figures(scorer: Scorer, rows: Sequence[Sequence[int]], share: float) -> list[TextFigures]:
    """The figures of token ids after a first one, which is not scored; share: k as a fraction of 1.

    Texts longer than the model's context are truncated on the right.
    """
    cut = [list(row[: scorer.context + 1]) for row in rows]
    made: dict[int, TextFigures] = {}
    order = sorted(range(len(cut)), key=lambda n: len(cut[n]))

    def too_large(batch: Sequence[int]) -> bool:
        return len(batch) * len(cut[batch[-1]]) > scorer.batch_tokens

    with progress(len(cut), "tokens", "texts") as bar:
        for batch in grouped(order, too_large):
            stop.check()
            for number, scores in zip(batch, _scores(scorer, [cut[n] for n in batch]), strict=True):
                made[number] = _figures(*scores, share)
            bar.advance(len(batch))
    return [made[number] for number in range(len(cut))]


def _scores(scorer: Scorer, rows: Sequence[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each row the log-probabilities of its tokens and their standardised values."""
    width = max(map(len, rows)) - 1
    if scorer.backend == "jax":
        width = LENGTH_STEP * -(-width // LENGTH_STEP)
    lengths = np.array([len(row) - 1 for row in rows])
    segments = None
    if not has_fixed_rotations(scorer.spec):
        segments = (np.arange(width) < lengths[:, None]) + 0
    hidden = forward.hidden(
        scorer.spec, scorer.params, padded([row[:-1] for row in rows], width), scorer.ops,
        segments=segments,
    )  # fmt: skip
    where = np.nonzero(np.arange(width) < lengths[:, None])
    targets = np.concatenate([row[1:] for row in rows])
    parts, at = [], 0
    for logits in scorer.logits(hidden[where][None]):
        own = targets[at : at + len(logits)]
        parts.append(_standardised(logits.astype(np.float64), own))
        at += len(own)
    flat = np.concatenate(parts, 1)
    return [(part[0], part[1]) for part in np.split(flat, np.cumsum(lengths)[:-1], 1)]


def _standardised(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """[2, N]: log p of targets[N] by logits[N, V], and that less its mean by its deviation."""
    logs = logits - logits.max(1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(1, keepdims=True))
    weights = np.exp(logs)
    mean = (weights * logs).sum(1)
    spread = np.sqrt(np.maximum((weights * logs**2).sum(1) - mean**2, 1e-12))
    own = logs[np.arange(len(targets)), targets]
    return np.stack([own, (own - mean) / spread])


def _figures(nats: np.ndarray, standardised: np.ndarray, share: float) -> TextFigures:
    least = (_least(values, share) for values in (nats, standardised))
    return TextFigures(len(nats), float(nats.sum()), *least)


def figures_of_nats(nats: np.ndarray, share: float) -> TextFigures:
    """The figures of a text by the log-probabilities of its tokens alone: without Min-K%++, and
    without any where there is no token or one is not known."""
    if not len(nats) or np.isnan(nats).any():
        return TextFigures(len(nats), math.nan, math.nan, math.nan)
    return TextFigures(len(nats), float(nats.sum()), _least(nats, share), math.nan)


def _least(values: np.ndarray, share: float) -> float:
    return float(np.sort(values)[: max(1, round(share * len(values)))].mean())


def exposure_bits(canary: float, others: Sequence[float]) -> float:
    """Exposure (Carlini et al. 2019, arXiv 1802.08232, section 4.2) of a canary's log-likelihood
    among those of others of its form: log2 of their number by its rank; 0.5 to 1 on average for one
    that was not read, and log2(len(others) + 1) at most."""
    rank = 1 + sum(value >= canary for value in others)
    return float(np.log2((len(others) + 1) / rank))


def auc(marked: Sequence[float], others: Sequence[float]) -> float:
    """The probability that a marked value is above one of the others; equal values count half."""
    a, b = np.asarray(marked, float)[:, None], np.sort(np.asarray(others, float))
    below = np.searchsorted(b, a, "left") + np.searchsorted(b, a, "right")
    return float(below.mean() / (2 * len(b)))
