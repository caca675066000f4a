"""Draws of tokens in torch; see core/generate/sampling.py for the order of the filters.

The token whose interval of the cumulative distribution holds u is found in two steps, first among
the sums of BLOCK tokens and then within one block, so that only a small part is summed up serially.
The sums are float64, their terms float32.
"""

import math

import numpy as np
import torch

from sabia.core.generate.sampling import RowParams

Tensor = torch.Tensor
BLOCK = 128


class Columns:
    """RowParams on a device, as columns [B, 1]."""

    def __init__(self, params: RowParams, device: torch.device) -> None:
        self.of = params
        on_device = [torch.from_numpy(x).to(device)[:, None] for x in params.columns]
        self.temperature, self.top_k, self.top_p, self.min_p = on_device


def draw(
    logits: Tensor, columns: Columns, uniform: np.ndarray, bias: np.ndarray | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(tokens[B], logprobs[B], raw_logprobs[B]) of one draw per row from logits[B, V], fp32.

    `logprobs` are of the distribution drawn from (after temperature and filters; 0 for the
    argmax), `raw_logprobs` of the model's own at temperature 1 over the whole vocabulary. bias[B,
    V] is added to the logits for the former only. exact: `logprobs` are those of log_softmax, which
    a trainer computes too (core.ops.exact_torch).
    """
    params = columns.of
    unscaled = _biased(logits, bias)
    scores = _steered(unscaled, columns)
    tokens, logprobs = _drawn(scores, uniform)
    if exact:
        logprobs = torch.log_softmax(scores, -1).gather(1, tokens)
    if params.greedy:
        greedy = columns.temperature == 0
        tokens = torch.where(greedy, unscaled.argmax(-1, keepdim=True), tokens)
        logprobs = torch.where(greedy, 0.0, logprobs)
    if bias is None and params.plain:
        return tokens[:, 0], logprobs[:, 0], logprobs[:, 0]
    raw = torch.log_softmax(logits, -1).gather(1, tokens)
    return tokens[:, 0], logprobs[:, 0], raw[:, 0]


def verify(
    logits: Tensor, columns: Columns, uniform: np.ndarray, bias: np.ndarray | None,
    theirs: Tensor, proposed: Tensor, keeping: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(tokens[B], logprobs[B], raw_logprobs[B], kept[B]); see Runner.verify.

    A token proposed[b] (-1: none), drawn from the draft's distribution q, is kept if keeping[b]
    q(x) < p(x); otherwise a token is drawn from max(p - q, 0), or from p where none was proposed.
    """
    unscaled, given, at = _biased(logits, bias), proposed[:, None] >= 0, proposed[:, None].clamp(0)
    scores = torch.log_softmax(_steered(unscaled, columns), -1)
    ours, drafted = (x.double().exp() for x in
                     (scores, torch.log_softmax(_steered(theirs, columns), -1)))  # fmt: skip
    kept = given & (keeping[:, None] * drafted.gather(1, at) < ours.gather(1, at))
    rest = (ours - drafted).clamp_(min=0)
    rest = torch.where(given & (rest.sum(-1, keepdim=True) > 0), rest, ours)
    tokens = torch.where(kept, at, _drawn(rest.log().to(scores.dtype), uniform)[0])
    logprobs = scores.gather(1, tokens)
    if columns.of.greedy:
        greedy, best = columns.temperature == 0, unscaled.argmax(-1, keepdim=True)
        tokens, logprobs = torch.where(greedy, best, tokens), torch.where(greedy, 0.0, logprobs)
        kept = torch.where(greedy, best == proposed[:, None], kept)
    raw = torch.log_softmax(logits, -1).gather(1, tokens)
    return tokens[:, 0], logprobs[:, 0], raw[:, 0], kept[:, 0]


def _biased(logits: Tensor, bias: np.ndarray | None) -> Tensor:
    return logits if bias is None else logits + torch.from_numpy(bias).to(logits.device)


def _steered(logits: Tensor, columns: Columns) -> Tensor:
    """Logits after temperature and filters; those of greedy rows are of no use."""
    if not columns.of.plain:
        logits = logits / torch.where(columns.temperature == 0, 1.0, columns.temperature)
    return filtered(logits, columns) if columns.of.filters else logits


def _drawn(scores: Tensor, uniform: np.ndarray) -> tuple[Tensor, Tensor]:
    """(token, log-probability), each [B, 1], drawn from softmax(scores[B, V])."""
    rows, size = scores.shape
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    padded = torch.nn.functional.pad(weights, (0, -size % BLOCK)).view(rows, -1, BLOCK)
    ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)  # [B, blocks]
    total = ends[:, -1:]
    goal = torch.from_numpy(uniform).to(scores.device, torch.float64)[:, None] * total
    # of probability > 0, because u is below 1
    block = torch.searchsorted(ends, goal, right=True).clamp_(max=ends.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    within = padded.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    # rounding may put the goal at the end of the block's own sum: then its last token of weight > 0
    goal = torch.minimum(goal - before, torch.nextafter(within[:, -1:], within.new_zeros(())))
    tokens = block * BLOCK + torch.searchsorted(within, goal, right=True)
    return tokens, scores.gather(1, tokens) - top - total.log().to(scores.dtype)


def likeliest(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """See Runner.likeliest, for logits[B, V]."""
    values, ids = torch.log_softmax(logits, -1).topk(min(count, logits.shape[-1]))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def filtered(scaled: Tensor, columns: Columns) -> Tensor:
    """Logits[B, V] with -inf for tokens excluded by top-k, top-p or min-p."""
    ordered, index = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)[None]
    keep = (rank < columns.top_k) | (columns.top_k == 0)
    probability = torch.softmax(ordered.masked_fill(~keep, -math.inf).double(), -1)
    before = probability.cumsum(-1) - probability
    keep &= (before < columns.top_p) | (columns.top_p >= 1)
    keep &= ordered >= ordered[:, :1] + columns.min_p.log()  # log 0 = -inf keeps all
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(1, index, keep)
    return scaled.masked_fill(~kept, -math.inf)
