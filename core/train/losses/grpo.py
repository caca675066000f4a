"""The GRPO losses: advantages from group rewards, the clipped policy loss, and sums for metrics.

Rows are samples [B, T] with one log-probability per token; in a batch, [R, g, C]: g samples of
each prompt, which is computed once for all of them. With rho = exp(logp - old):
  clip         -min(rho A, clip(rho, 1 - low, 1 + high) A); `dual_clip` c: at most -c A where A < 0
  cispo        -min(rho, 1 + high) A logp, the weight of logp constant
  sapo         -(4 / t) s(t (rho - 1)) A, s the logistic function, t = 1, where A < 0 1.05
  masked       `sequence_mask` d: 0 for samples with A < 0 whose mean of old - logp is above d
  KL           + beta (exp(d) - d - 1), d = ref - logp (k3), no reference needed where beta is 0;
               `kl_times_ratio`: times rho, with its gradient
  aggregation  token: sum over all tokens / their number;  seq-mean: mean of the samples' means;
               dr: sum / (samples x max_length)
The denominator is that of the whole step, whatever the micro-batches: the loss returns its
numerator and each row's share of the denominator. A sample without a reward (NaN: the judge failed)
is excluded from means, counts and the loss. Sources: arXiv 2402.03300 (GRPO), 2503.14476 (DAPO:
clip-higher, token sum), 2503.20783 (Dr. GRPO), 2507.18071 (GSPO), 1912.09729 (dual clip),
2506.13585 (CISPO), 2511.20347 (SAPO), 2512.02556 (masked samples, weighted KL).
"""

import math
from typing import Any

import numpy as np

from sabia.core.model.forward import Stats, drawn_losses, hidden_and_stats, token_losses
from sabia.core.ops.base import Array, Ops, Params, Remat, dtype_name
from sabia.core.ops.kv_cache import KVCache
from sabia.core.options.grpo import PolicyLoss, ValueOptions
from sabia.core.spec.model import ModelSpec
from sabia.core.train.losses.next_token import Batch, Sums, of_whole_rows
from sabia.core.train.losses.value import token_values, value_losses

SAPO_TEMPERATURES = 1.0, 1.05  # of advantages of at least 0, and below
STD_EPSILON = 1e-4
_REROUTED = frozenset({"rerouted"})
_BY_SAMPLE = ("loss_mask", "weights", "sampler", "advantage", "share")


def advantages(rewards: np.ndarray, std: bool = False) -> np.ndarray:
    """A[Q, G] of rewards[Q, G]: reward - mean of its group; NaN rewards are excluded and get 0.

    `std` divides by the group's standard deviation (ddof 1) + 1e-4, as in the GRPO paper.
    """
    valid = ~np.isnan(rewards)
    count = valid.sum(1, keepdims=True)  # [Q, 1]
    filled = np.where(valid, rewards, 0.0)
    centred = np.where(valid, filled - filled.sum(1, keepdims=True) / np.maximum(count, 1), 0.0)
    if std:
        spread = np.sqrt((centred**2).sum(1, keepdims=True) / np.maximum(count - 1, 1))  # [Q, 1]
        centred = centred / (spread + STD_EPSILON)
    return centred


def informative_groups(rewards: np.ndarray) -> np.ndarray:
    """bool[Q]: groups with a nonzero advantage, that is, with two different valid rewards."""
    low = np.where(np.isnan(rewards), np.inf, rewards).min(1)
    high = np.where(np.isnan(rewards), -np.inf, rewards).max(1)
    return high > low


def aggregation_weights(
    mask: np.ndarray, aggregation: str, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(weights[B, T] of token losses, each row's share[B] of the denominator) of mask[B, T]."""
    lengths = mask.sum(1)  # [B]
    if aggregation == "token":
        return mask, lengths
    if aggregation == "seq-mean":
        return mask / np.maximum(lengths, 1)[:, None], (lengths > 0).astype(mask.dtype)
    return mask, np.full(len(mask), max_length, mask.dtype)


def policy_losses(
    logp: Array,
    old: Array,
    mask: Array,
    advantage: Array,
    options: PolicyLoss,
    ops: Ops,
    *,
    sampler: Array | None = None,
    ref: Array | None = None,
) -> tuple[Any, Any]:
    """(loss[B, T], 1 where it is clipped [B, T]) of log-probabilities [B, T], advantage[B, 1].

    `old`: of the policy at sampling time; `sampler`: as reported by the sampler, which may differ
    (`correction` then weights the loss); `ref`: of the reference model (with `beta`).
    """
    lengths = mask.sum(-1)[..., None]  # [B, 1]
    log_ratio = (logp - old) * mask  # [B, T]
    if options.ratio == "sequence":
        # GSPO: one ratio per sample, the geometric mean over its tokens
        log_ratio = log_ratio.sum(-1)[..., None] / ops.where(lengths > 0, lengths, 1.0)
    rho = ops.exp(log_ratio)
    if options.surrogate == "clip":
        loss, clipped = _clipped(rho, advantage, options, ops)
    elif options.surrogate == "cispo":
        clipped = rho > 1 + options.clip_high
        weight = ops.stop_gradient(_at_most(rho, 1 + options.clip_high, ops))
        loss = -weight * advantage * logp
    else:
        positive, negative = SAPO_TEMPERATURES
        t = ops.where(advantage < 0, negative + 0 * advantage, positive)
        loss, clipped = -4 / t * ops.sigmoid(t * (rho - 1)) * advantage, rho < 0  # no clip
    if options.sequence_mask:
        # the mean over a sample's tokens of old - logp, a constant
        distance = ops.stop_gradient((old - logp) * mask).sum(-1)[..., None]
        far = distance > options.sequence_mask * lengths
        loss = ops.where(far, ops.where(advantage < 0, 0.0, loss), loss)
    if options.correction != "none":
        loss = loss * _correction(old, sampler, mask, options, ops)
    if options.beta:
        weight = options.beta * rho if options.kl_times_ratio else options.beta
        loss = loss + weight * _k3(logp, ref, mask, ops)
    return loss * mask, ops.where(clipped, mask, 0.0)


def _clipped(rho: Array, advantage: Array, options: PolicyLoss, ops: Ops) -> tuple[Any, Any]:
    """(loss, whether it is clipped) of PPO."""
    # clip(rho, 1 - low, 1 + high)
    least, clipped_rho = 1 - options.clip_low, _at_most(rho, 1 + options.clip_high, ops)
    clipped_rho = ops.where(clipped_rho < least, least, clipped_rho)
    # -min(rho A, clip(rho) A) = max(-rho A, -clip(rho) A)
    clipped = -clipped_rho * advantage > -rho * advantage
    loss = ops.where(clipped, -clipped_rho * advantage, -rho * advantage)
    if options.dual_clip:
        dual_bound = ops.where(advantage < 0, -options.dual_clip * advantage, math.inf)
        loss = ops.where(loss > dual_bound, dual_bound, loss)
    return loss, clipped


def _at_most(x: Array, bound: float, ops: Ops) -> Any:
    return ops.where(x > bound, bound, x)


def _k3(logp: Array, ref: Array, mask: Array, ops: Ops) -> Any:
    """The k3 estimate exp(d) - d - 1 of KL(policy || reference), never negative."""
    difference = (ref - logp) * mask
    return ops.exp(difference) - difference - 1.0


def _correction(old: Array, sampler: Array, mask: Array, options: PolicyLoss, ops: Ops) -> Any:
    """Truncated importance weight of the policy at sampling time against the sampler."""
    difference = (old - sampler) * mask
    if options.correction == "token-cap":
        return _at_most(ops.exp(difference), options.correction_cap, ops)
    # one weight per sample; sequence-mask drops samples above the cap
    weight = ops.exp(difference.sum(-1)[..., None])
    cap = options.correction_cap
    return ops.where(weight <= cap, weight, cap if options.correction == "sequence-cap" else 0.0)


def sample_logprobs(
    spec: ModelSpec,
    params: Params,
    batch: Batch,
    ops: Ops,
    temperature: float = 1.0,
    remat: Remat = "none",
) -> Array:
    """Log-probabilities [R·g, C] of the sampled tokens targets[R, g, C] at a temperature.

    A batch with `prompt_ids` [R, P] and `prompt_length` [R, 1] holds g samples of each prompt: the
    prompt is computed once and its keys and values are copied to its samples, with gradients.
    Otherwise g is 1, input_ids[R, T] are prompt and sample, and completion_at[R, C] the position
    whose hidden state predicts each target. Rows are padded at the end; a negative target is
    padding.
    """
    x, _ = _states(spec, params, batch, ops, remat)
    return _logprobs(spec, params, x, batch, ops, temperature)


def _logprobs(
    spec: ModelSpec, params: Params, x: Array, batch: Batch, ops: Ops, temperature: float
) -> Array:
    targets = batch["targets"].reshape(-1, batch["targets"].shape[-1])
    if ops.exact:
        return -drawn_losses(spec, params, x, targets, ops, temperature)
    nll, _ = token_losses(spec, params, x, targets, ops, temperature)
    return -nll


def sample_values(
    spec: ModelSpec, params: Params, batch: Batch, ops: Ops, temperature: float = 1.0
) -> Array:
    """Values [R·g, C] of the sampled tokens by the value head, as `sample_logprobs`."""
    return token_values(params, _states(spec, params, batch, ops, "none")[0], ops)


def _states(
    spec: ModelSpec, params: Params, batch: Batch, ops: Ops, remat: Remat
) -> tuple[Array, list[Stats]]:
    """Hidden states [R·g, C, D] that predict the samples, and the statistics of each pass."""
    states = _prompt_states if "prompt_ids" in batch else _row_states
    return states(spec, params, batch, ops, remat)


def _row_states(
    spec: ModelSpec, params: Params, batch: Batch, ops: Ops, remat: Remat
) -> tuple[Array, list[Stats]]:
    """Hidden states [R, C, D] that predict the samples, from whole rows."""
    given: Any = {"remat": remat, "routing": batch.get("routing"), "wanted": _REROUTED}
    x, stats = hidden_and_stats(spec, params, batch["input_ids"], ops, **given)
    x = ops.relayout(x, ("batch", "sequence", None), ("batch", None, None))  # [R, T, D]
    rows = ops.arange(x.shape[0], x)[:, None]  # [R, 1]
    return x[rows, ops.integers(batch["completion_at"], x)], [stats]


def _prompt_states(
    spec: ModelSpec, params: Params, batch: Batch, ops: Ops, remat: Remat
) -> tuple[Array, list[Stats]]:
    """Hidden states [R·g, C, D]: each prompt once, then its samples with copies of its cache."""
    prompts_count, per_prompt, length = batch["targets"].shape
    prompts, embed = batch["prompt_ids"], params["embed"]
    slots = prompts.shape[1] + length
    dtype = ops.activations or dtype_name(embed)
    cache = KVCache.create(spec, prompts_count, slots, ops, dtype, embed)
    given: Any = {"remat": remat, "wanted": _REROUTED}
    routing = batch.get("prompt_routing"), batch.get("routing")
    x, first_stats = hidden_and_stats(
        spec, params, prompts, ops, cache=cache, routing=routing[0], **given
    )
    rows = ops.arange(prompts_count, x)
    lengths = ops.integers(batch["prompt_length"], x)
    # [R·g]: index of each sample's prompt
    prompt_of_sample = (rows[:, None] + 0 * ops.arange(per_prompt, x)).reshape(-1)
    # the last prompt token predicts the first token of each sample, [R·g, 1, D]
    first = x[rows, lengths[:, 0] - 1][prompt_of_sample][:, None]
    ids = ops.integers(batch["targets"], x).reshape(-1, length)[:, :-1]  # [R·g, C - 1]
    ids = ops.where(ids < 0, 0, ids)
    positions = lengths[prompt_of_sample] + ops.arange(length - 1, x)  # [R·g, C - 1]
    copies = cache.select(prompt_of_sample)
    given |= {"positions": positions, "cache": copies}
    if routing[1] is not None:  # [R, g, C, L, k]
        given["routing"] = routing[1].reshape(-1, *routing[1].shape[2:])[:, :-1]
    rest, stats = hidden_and_stats(spec, params, ids, ops, **given)
    return ops.concat([first, rest], 1), [first_stats, stats]


def grpo_loss(
    spec: ModelSpec,
    params: Params,
    batch: Batch,
    ops: Ops,
    *,
    options: PolicyLoss,
    value: ValueOptions | None = None,
    remat: Remat = "none",
) -> Sums:
    """The policy loss of a micro-batch as (numerator, its share of the denominator, sums).

    Besides the arrays of `sample_logprobs`: loss_mask, weights (of the aggregation), sampler
    [R, g, C]; advantage, share [R, g, 1]; slot[R, M], one-hot index of the micro-batch. Optional:
    ref [R, g, C] and old [R, g, C] (default: the policy itself as a constant, which is right for
    the first update after sampling). With `value`: values, those of the value head at the time of
    sampling, and returns [R, g, C]. Sums: tokens, clipped (clipped tokens), gap (|old - sampler|),
    gap_max[M], k3, value_loss, value_clipped.

    routing [R, T, L, k] of whole rows or, of samples with a shared prompt, prompt_routing [R, P, L,
    k] and routing [R, g, C, L, k], are the experts of tokens, numbered from 1 (0: those that the
    router chooses). Sums then have rerouted[L], how many of them the routers of each layer would
    not have chosen, and routed, how many there are in a layer.
    """
    # [R, g, C] → [R·g, C]
    names = (name for name in (*_BY_SAMPLE, "old", "ref", "values", "returns") if name in batch)
    flat = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in names}
    x, stats = _states(spec, params, batch, ops, remat)
    logp = _logprobs(spec, params, x, batch, ops, options.temperature)
    mask, sampler = flat["loss_mask"], flat["sampler"]
    constant = ops.stop_gradient(logp)
    old, others = flat.get("old", constant), {"sampler": sampler, "ref": flat.get("ref")}
    losses, clipped = policy_losses(logp, old, mask, flat["advantage"], options, ops, **others)
    gap = (old - sampler) * mask
    gap = ops.where(gap < 0, -gap, gap)  # |old - sampler|
    sums = {"tokens": mask.sum(), "clipped": clipped.sum(), "gap": gap.sum()}
    sums["gap_max"] = gap.max() * batch["slot"][0]
    if "ref" in flat:
        sums["k3"] = (_k3(constant, flat["ref"], mask, ops) * mask).sum()
    if value is not None:
        made = token_values(params, x, ops), flat["values"], flat["returns"]
        value_loss, far = value_losses(*made, value, ops)
        value_loss = value_loss * mask
        losses = losses + value.value_coefficient * value_loss
        sums["value_loss"] = value_loss.sum()
        sums["value_clipped"] = ops.where(far, mask, 0.0).sum()
    whole = (losses * flat["weights"]).sum(), flat["share"].sum(), sums
    total, share, sums = of_whole_rows(whole, batch.get("input_ids"), ops)
    return total, share, sums | _rerouted(batch, stats, ops)


def _rerouted(batch: Batch, stats: list[Stats], ops: Ops) -> dict[str, Array]:
    """The sums of the tokens that a process has, by layer; {} where no experts are given."""
    given = [batch[name] for name in ("prompt_routing", "routing") if name in batch]
    if not given:
        return {}
    layers = [one["rerouted"] for one in stats]
    differ = [ops.concat([one[index].sum()[None] for index in sorted(one)], 0) for one in layers]
    counts = [ops.cast(one[..., 0, :] > 0, "float32").sum() for one in given]
    return {"rerouted": sum(differ[1:], differ[0]), "routed": sum(counts[1:], counts[0])}
