"""From graded samples to the arrays of an update.

The training samples are arrays [R, g, C]: R rows of g samples of one prompt, C tokens per sample.
Where prompts are long in relation to samples, g is as large as memory allows and the prompt is
computed once per row; otherwise g is 1 and a row is prompt + sample without its last token (see
core.train.losses.grpo.sample_logprobs). Padding is at the end. Zero-advantage groups (all rewards
equal, fewer than two valid) are left out, and so is their share of the denominator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from sabia.core.generate.requests import LENGTH, Completion
from sabia.core.judge.verdict import Grade
from sabia.core.model.routing import Routing
from sabia.core.options.grpo import GrpoOptions
from sabia.core.recipes.grpo.prompt_schedule import Prompt
from sabia.core.recipes.grpo.step_rewards import step_rewards, token_advantages, token_rewards
from sabia.core.spec import ModelSpec
from sabia.core.train.losses import grpo

WIDTH_STEP = 8
LEAST_ROWS, LEAST_LENGTH = 8, 16  # of batches of few shapes
MIN_SAVED = 0.25
READ_BY_MODEL = ("input_ids", "completion_at", "prompt_ids", "prompt_length", "targets")
ROUTING = ("routing", "prompt_routing")
Batch = dict[str, np.ndarray]
# a prompt and its training samples with their advantages, or those of their tokens
TrainingSamples = tuple[Prompt, list[tuple[Completion, float | np.ndarray]]]


@dataclass(frozen=True)
class Group:
    """The samples of one prompt with their grades, in the order of their numbers.

    position: (draw, number of the prompt in its step).
    """

    prompt: Prompt
    samples: Sequence[Completion]
    grades: Sequence[Grade]
    position: tuple[int, int] = (0, 0)

    @property
    def rewards(self) -> np.ndarray:
        """Rewards float64[G], NaN where there is none."""
        scores = [np.nan if grade.score is None else grade.score for grade in self.grades]
        return np.array(scores, np.float64)


def trained_rewards(group: Group, options: GrpoOptions) -> np.ndarray:
    """Rewards float64[G] with the soft punishment of long samples (DAPO, equation 13)."""
    if not options.overlong_buffer:
        return group.rewards
    lengths = np.array([len(sample.tokens) for sample in group.samples])
    beyond = lengths - (options.max_new_tokens - options.overlong_buffer)
    return group.rewards - np.clip(beyond / options.overlong_buffer, 0, 1)


def is_dull(group: Group) -> bool:
    """Whether all samples with a reward have the same one: solved always, or never."""
    return not grpo.informative_groups(group.rewards[None])[0]


def is_informative(group: Group, options: GrpoOptions) -> bool:
    """Whether the group's samples have different rewards, or a teacher or a value head, so that it
    trains."""
    if options.teacher:
        return True
    if options.advantage == "gae":
        return not bool(np.isnan(group.rewards).all())
    if options.step_delimiter:
        return bool(grpo.informative_groups(step_rewards(group.grades)[None])[0])
    return bool(grpo.informative_groups(trained_rewards(group, options)[None])[0])


def training_samples(
    groups: Sequence[Group], options: GrpoOptions
) -> dict[tuple[int, int], TrainingSamples]:
    """The training samples of the groups that have any, by (number of the prompt, draw); with a
    value head their rewards take the place of advantages."""
    rewards = np.stack([trained_rewards(group, options) for group in groups])
    advantage: Any = rewards
    if options.step_delimiter and options.advantage == "gae":
        advantage = [[*map(token_rewards, group.samples, group.grades)] for group in groups]
    elif options.step_delimiter:
        std = options.advantage == "std"
        advantage = [token_advantages(group.samples, group.grades, std) for group in groups]
    elif options.advantage != "gae":
        advantage = grpo.advantages(rewards, options.advantage == "std")
    training = {
        group.position[::-1]: (group.prompt, [
            (sample, advantage[g][i])
            for i, sample in enumerate(group.samples)
            if not np.isnan(rewards[g, i])
            and (options.overlong == "keep" or sample.finish_reason != LENGTH)
        ])
        for g, group in enumerate(groups) if is_informative(group, options)
    }  # fmt: skip
    return {position: group for position, group in training.items() if group[1]}


def divided(
    training: Mapping[tuple[int, int], TrainingSamples],
    counts: Mapping[tuple[int, int], int],
    updates: int,
) -> list[list[TrainingSamples]]:
    """The training samples of each update; counts: samples of all processes' groups, by position.

    All of them, numbered in the order of the positions, are cut into runs of nearly equal size. So
    an update has the same samples with any mesh, backend and micro-batch, groups stay together but
    at a cut, and processes, whose groups alternate, have nearly equal parts of each update.
    """
    parts: list[list[TrainingSamples]] = [[] for _ in range(updates)]
    before, total = dict[tuple[int, int], int](), 0
    for position in sorted(counts):
        before[position], total = total, total + counts[position]
    for position, (prompt, samples) in training.items():
        update = (before[position] + np.arange(len(samples))) * updates // total
        for number in np.unique(update):
            some = [sample for sample, u in zip(samples, update, strict=True) if u == number]
            parts[number].append((prompt, some))
    return parts


def empty_batch(options: GrpoOptions, routing: Routing | None = None) -> Batch:
    """One row of weight 0, for a process that has no training samples in a step."""
    completion = Completion("", 0, [0], "", [0.0], [0.0], LENGTH)
    samples: TrainingSamples = Prompt("", (), (0,), None, None), [(completion, 0.0)]
    batch = arrays_of([samples], options, 1, routing)
    for name in ("loss_mask", "weights", "share"):
        batch[name][:] = 0
    return batch


def own_rows(batch: Batch, part: int, parts: int, step: int) -> Batch:
    """Rows part, part + parts, … of a batch of one sample a row.

    It is filled up with rows of weight 0 so that all parts have equally many, and its rows to a
    multiple of `step` tokens.
    """
    rows, length = (-n % m for n, m in zip(batch["input_ids"].shape, (parts, step), strict=True))
    own = {}
    for name, array in batch.items():
        wider = length if name in ("input_ids", "routing") else 0
        widths = [(0, rows), (0, wider), *[(0, 0)] * (array.ndim - 2)]
        filled = np.pad(array, widths, constant_values=-1 if name == "targets" else 0)
        own[name] = filled[part::parts]
    return own


def of_few_shapes(batch: Batch, longest: int, parts: int, step: int) -> Batch:
    """A batch of one sample a row, filled up to rows, tokens of a row and tokens of a sample that
    are 2ⁿ or 3 · 2ⁿ, or the next multiples of `parts` (rows) and `step` (tokens of a row).

    longest: tokens of a sample at most. Programs that are compiled for a shape are few then; what
    is added has weight 0.
    """
    rows, length = batch["input_ids"].shape
    narrow = batch["targets"].shape[-1]
    rows, length = _rounded(rows, LEAST_ROWS, parts), _rounded(length, LEAST_LENGTH, step)
    narrow, filled = max(narrow, min(_rounded(narrow, LEAST_LENGTH), longest)), {}
    for name, array in batch.items():
        wide = {"input_ids": (rows, length), "completion_at": (rows, narrow),
                "routing": (rows, length, *array.shape[2:])}  # fmt: skip
        by_sample = (rows, 1, 1 if array.shape[-1] == 1 and name != "targets" else narrow)
        shape = wide.get(name, by_sample)
        widths = [(0, n - have) for n, have in zip(shape, array.shape, strict=True)]
        filled[name] = np.pad(array, widths, constant_values=-1 if name == "targets" else 0)
    return filled


def _rounded(count: int, least: int, multiple: int = 1) -> int:
    size = max(least, 1 << (count - 1).bit_length())
    if 3 * size // 4 >= max(count, least):
        size = 3 * size // 4
    return -(-size // multiple) * multiple


def arrays_of(
    training: Sequence[TrainingSamples], options: GrpoOptions, most: int,
    routing: Routing | None = None,
) -> Batch:  # fmt: skip
    """The batch of (prompt, its samples with their advantages); with `routing` it has the experts
    of the samples (see core.train.losses.grpo.grpo_loss)."""
    narrow = max(2, *(len(sample.tokens) for _, samples in training for sample, _ in samples))
    width = max(len(prompt.ids) for prompt, _ in training)
    fan = _fan(width, narrow, options, most)
    rows = [
        (prompt, samples[start : start + fan])
        for prompt, samples in training
        for start in range(0, len(samples), fan)
    ]
    shape = (len(rows), fan, narrow)
    targets, sampler = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    wide = narrow if options.step_delimiter else 1
    advantage, mask = np.zeros((len(rows), fan, wide), np.float32), np.zeros(shape, np.float32)
    for r, (_, samples) in enumerate(rows):
        for i, (sample, a) in enumerate(samples):
            targets[r, i, : len(sample.tokens)] = sample.tokens
            sampler[r, i, : len(sample.tokens)] = sample.logprobs
            advantage[r, i, : np.size(a)] = a
            mask[r, i, : len(sample.tokens)] = 1
            mask[r, i, sample.forced] = 0  # tokens that were not sampled
    weights, share = grpo.aggregation_weights(
        mask.reshape(-1, narrow), options.aggregation, options.max_new_tokens
    )
    share = np.where(mask.any(-1), share.reshape(shape[:2]), 0)  # padding has no share
    prompts = [prompt.ids for prompt, _ in rows]
    inputs = _prompt_arrays(prompts, width) if fan > 1 else _row_arrays(prompts, targets[:, 0])
    if routing is not None:
        inputs |= _routing_arrays(rows, inputs, shape, routing)
    return inputs | {
        "targets": targets,
        "loss_mask": mask,
        "weights": weights.reshape(shape).astype(np.float32),
        "share": share.astype(np.float32)[..., None],
        "sampler": sampler,
        "advantage": advantage,
    }


def _fan(width: int, narrow: int, options: GrpoOptions, most: int) -> int:
    """Samples per row: as many as fit into a micro-batch, if that saves a quarter of the work."""
    fan = min(most, max(1, (options.micro_tokens - width) // narrow))
    # a row of its own costs width + narrow tokens; g samples of a row share the prompt's width
    saved = width * (1 - 1 / fan) / (width + narrow)
    return fan if saved >= MIN_SAVED else 1


def _prompt_arrays(prompts: Sequence[Sequence[int]], width: int) -> Batch:
    ids = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    lengths = np.array([[len(prompt)] for prompt in prompts], np.int32)
    return {"prompt_ids": ids, "prompt_length": lengths}


def _row_arrays(prompts: Sequence[Sequence[int]], targets: np.ndarray) -> Batch:
    """Rows of prompt + sample; `targets` [R, C]."""
    lengths = (targets >= 0).sum(1)
    longest = max(len(p) + n - 1 for p, n in zip(prompts, lengths.tolist(), strict=True))
    ids = np.zeros((len(prompts), -(-longest // WIDTH_STEP) * WIDTH_STEP), np.int32)
    at = np.zeros(targets.shape, np.int32)
    for row, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
        start = len(prompt)
        ids[row, :start] = prompt
        ids[row, start : start + length - 1] = targets[row, : length - 1]
        at[row, :length] = np.arange(start - 1, start - 1 + length)
    return {"input_ids": ids, "completion_at": at}


def _routing_arrays(
    rows: Sequence[TrainingSamples], inputs: Batch, shape: tuple[int, ...], routing: Routing
) -> Batch:
    """`routing` and, with shared prompts, `prompt_routing`, those of a row's first sample."""
    kind = routing.layers, routing.top_k
    shared = "prompt_ids" in inputs
    of_prompts = inputs["prompt_ids" if shared else "input_ids"].shape
    first = np.zeros((*of_prompts, *kind), np.int16)
    rest = np.zeros((*shape, *kind), np.int16)
    for row, (prompt, samples) in enumerate(rows):
        for number, (sample, _) in enumerate(samples):
            experts = routing.unpacked(sample.routed_experts) + 1
            own = experts[len(prompt.ids) :]
            rest[row, number, : len(own)] = own
            if not number:
                experts = experts[: len(prompt.ids)] if shared else experts
                first[row, : len(experts)] = experts
    return {"prompt_routing": first, "routing": rest} if shared else {"routing": first}


def sequences(batch: Batch) -> list[tuple[int, int, list[int], int]]:
    """(row, number in it, ids of prompt and sample, tokens of the prompt) of trained samples."""
    entries = []
    for row, sample in zip(*np.nonzero(batch["loss_mask"].any(-1)), strict=True):
        targets = batch["targets"][row, sample]
        if "prompt_ids" in batch:
            prompt = batch["prompt_ids"][row, : batch["prompt_length"][row, 0]]
        else:
            prompt = batch["input_ids"][row, : batch["completion_at"][row, 0] + 1]
        ids = [*prompt.tolist(), *targets[targets >= 0].tolist()]
        entries.append((int(row), int(sample), ids, len(prompt)))
    return entries


def row_tokens(batch: Batch) -> int:
    """Tokens of one row of the batch in a forward pass."""
    if "input_ids" in batch:
        return batch["input_ids"].shape[1]
    return batch["prompt_ids"].shape[1] + batch["targets"].shape[1] * batch["targets"].shape[2]


def micro_rows(batch: Batch, options: GrpoOptions, devices: int = 1) -> int:
    """Rows of one forward and backward pass on each of `devices`, which share the batch's rows.

    As few passes as `--micro-tokens` allows, of nearly equal size: a program of fixed shapes fills
    up the last one.
    """
    own, most = -(-len(batch["targets"]) // devices), options.micro_tokens // row_tokens(batch)
    return -(-own // -(-own // max(1, most)))


def micro_batches(batch: Batch, rows: int) -> int:
    """Micro-batches of `rows` rows in a batch."""
    return -(-len(batch["targets"]) // rows)


def with_slots(batch: Batch, rows: int, width: int) -> Batch:
    """The batch with the number of each row's micro-batch of `rows` rows, one-hot [R, width]."""
    number = np.arange(len(batch["targets"])) // rows
    return batch | {"slot": np.eye(width, dtype=np.float32)[number]}


def score(
    spec: ModelSpec, params: Mapping[str, Any], batch: Batch, ops: Any, temperature: float,
    rows: int, of: Callable[..., Any] = grpo.sample_logprobs, routes: bool = False,
) -> np.ndarray:  # fmt: skip
    """Log-probabilities [R, g, C] of a batch's samples under `params`, `rows` at a time; or what
    another function gives. routes: with the model's own choice of experts."""
    logprobs = _compiled(spec, ops, temperature, of) if ops.name == "jax" else None
    logprobs = logprobs or partial(of, spec, ops=ops, temperature=temperature)
    names = READ_BY_MODEL if routes else (*READ_BY_MODEL, *ROUTING)
    read = {name: batch[name] for name in names if name in batch}
    parts = []
    for start in range(0, len(batch["targets"]), rows):
        part = {k: np.ascontiguousarray(v[start : start + rows]) for k, v in read.items()}
        scored = logprobs(params=params, batch=ops.to_device(part))
        parts.append(ops.to_numpy({"x": ops.cast(scored, "float32")})["x"])
    return np.concatenate(parts).reshape(batch["targets"].shape)


@lru_cache(8)
def _compiled(spec: ModelSpec, ops: Any, temperature: float, of: Callable[..., Any]) -> Any:
    import jax

    return jax.jit(partial(of, spec, ops=ops, temperature=temperature))
