"""Which tokens are computed: shared beginnings once, the last layer where there is a loss.

Consecutive documents of a row that begin with the same tokens (the chosen and the rejected answer
to a prompt, answers under one system prompt) have the same states there, so that these are computed
once; the keys and values of each document are put together from them. The states that follow from
the last layer's attention are needed only for tokens with a loss: its queries, its output, its
feed-forward part, the final norm and the vocabulary are computed for these. Both change neither the
loss nor its gradient. They apply to a torch step on CPUs whose shapes may change.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sabia.core.parallel.mesh import Mesh
from sabia.core.spec.layers import GatedDeltaNet
from sabia.core.train.losses.next_token import TAKE_SOME_TOKENS, Loss, next_token_loss
from sabia.core.train.stepper import Setup

Batch = Mapping[str, np.ndarray]
BY_PREDICTION = (
    "targets",
    "loss_mask",
    "teacher_ids",
    "teacher_probabilities",
    "teacher_rest",
    "teacher_information",
)
MOST = 0.98  # a larger share of the tokens is not worth the copies


def whole_rows(setup: Setup, mesh: Mesh, device: str) -> str:
    """Why all tokens of a row must be computed, '' where they need not be."""
    if device != "cpu":
        return f"on {device}"
    if setup.compiled:
        return "--compile"
    if mesh.size > mesh.data * mesh.fsdp * mesh.tensor:
        return f"--mesh {mesh}"
    if setup.exact:
        return "--exact"
    schedule = setup.precision
    if schedule.precision.recipe is not None:  # scales of whole tensors
        return f"--precision {schedule.precision.name}"
    return "" if _function(setup.loss) in TAKE_SOME_TOKENS else "another loss"


def no_sharing(setup: Setup) -> str:
    """Why documents cannot share the states of equal tokens, '' where they can."""
    spec = setup.spec
    if not spec.causal:
        return "a token attends to later ones"
    if any(isinstance(layer.mixer, GatedDeltaNet) for layer in spec.layers):
        return "its delta nets keep one state a row"
    if any(rope.by_length for rope in spec.ropes):
        return "its rotations change with the length of a document"
    if spec.expert_layers and _function(setup.loss) is next_token_loss:
        return "each document counts for the loads of the experts"
    return ""


def _function(loss: Loss) -> Any:
    return getattr(loss, "func", loss)  # of a partial


def computed_tokens(batch: Batch, shared: bool) -> dict[str, np.ndarray]:
    """The batch of fewer tokens with the same losses; see core.model.forward.hidden_and_stats.

    input_ids, positions [B, T] lose tokens that documents share (if `shared`), and keys[B, S],
    queries[B, T] say which; segments stay [B, S]. targets, loss_mask and a teacher's arrays become
    those of outputs[B, N], the tokens with a loss, filled up with tokens without one.
    """
    made: dict[str, Any] = dict(batch)
    if shared and "segments" in batch:
        made |= _shared(batch["input_ids"], batch["segments"], batch["positions"])
    counted = batch["loss_mask"] != 0
    width = max(1, int(counted.sum(1).max()))
    if "keys" in made or width <= MOST * counted.shape[1]:
        outputs = np.argsort(~counted, 1, kind="stable")[:, :width]
        made["outputs"] = outputs.astype(np.int32)
        for name in BY_PREDICTION:
            if name in batch:
                array = batch[name]
                at = outputs.reshape(*outputs.shape, *[1] * (array.ndim - 2))
                made[name] = np.take_along_axis(array, at, 1)
        filled = ~np.take_along_axis(counted, outputs, 1)
        made["targets"] = np.where(filled, -1, made["targets"]).astype(batch["targets"].dtype)
    return made


def _shared(ids: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
    """ids and positions [B, T] without repeated beginnings, with keys and queries; {} if those are
    few."""
    rows = [_row_sources(*row) for row in zip(ids, segments, strict=True)]
    own = [np.flatnonzero(source == np.arange(len(source))) for source in rows]
    width = max(map(len, own))
    if width > MOST * ids.shape[1]:
        return {}
    queries = np.zeros((len(ids), width), np.int32)
    keys = np.zeros(ids.shape, np.int32)
    for row, (source, first) in enumerate(zip(rows, own, strict=True)):
        queries[row, : len(first)] = first
        keys[row] = np.searchsorted(first, source)
    taken = {"input_ids": ids, "positions": positions}
    made = {name: np.take_along_axis(array, queries, 1) for name, array in taken.items()}
    return {**made, "keys": keys, "queries": queries}


def _row_sources(ids: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """For each token of a row the first one that has the same beginning: itself, or one of the
    document before its own; padding is one token."""
    source = np.arange(len(ids))
    starts = np.flatnonzero(np.diff(segments, prepend=0))
    ends = np.append(starts[1:], len(ids))
    before: tuple[int, int] | None = None
    for start, end in zip(starts, ends, strict=True):
        if not segments[start]:  # padding
            source[start:end] = start
            continue
        if before is not None:
            length = min(end - start, before[1] - before[0])
            differ = ids[start : start + length] != ids[before[0] : before[0] + length]
            same = int(differ.argmax()) if differ.any() else length
            source[start : start + same] = source[before[0] : before[0] + same]
        before = int(start), int(end)
    return source
