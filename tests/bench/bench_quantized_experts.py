"""Where the divergence of a quantized model of experts is from: parts, rounding, other experts.

    python tests/bench/bench_quantized_experts.py CALIBRATION HELD_OUT --model DIR …

CALIBRATION and HELD_OUT are JSONL files of documents. For `mixed`, with experts calibrated on the
tokens routed to them or on all, and to nearest, and for each component of it alone: the mean KL in
nats; the same if each token goes to the experts that the original model chooses; the share of
tokens that some layer sends to others; the relative errors of outputs of experts.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.parallel.build_ops import build_ops, load_ops
from sabia.core.quant.hessians import Batch, batches
from sabia.core.quant.quantize import quantize
from sabia.core.quant.recipe import Recipe, component_of, load_recipe
from sabia.core.spec import ModelSpec
from sabia.core.text.tokenize.tokenizer import load_tokenizer

Weights = Mapping[str, Any]
OPS = load_ops("torch")


def predictions(
    spec: ModelSpec, weights: Weights, batch: Batch, chosen: Sequence[Any] | None = None
) -> tuple[Any, list[Any]]:
    """(log-probabilities [tokens, V], what the routers choose); chosen: what they have to."""
    ops, seen = build_ops("torch"), list[Any]()
    plain, given = ops.topk, iter(chosen or ())

    def topk(scores: Any, k: int) -> Any:
        best, numbers = plain(scores, k)
        if chosen is not None:
            numbers = next(given)
            best = scores.gather(-1, numbers)
        seen.append(numbers)
        return best, numbers

    ops.topk = topk  # type: ignore[method-assign]
    with torch.inference_mode():
        hidden = forward.hidden(spec, weights, batch.ids, ops, segments=batch.segments)
        return forward.logits(spec, weights, hidden, ops).log_softmax(-1)[batch.mask], seen


def compared(spec: ModelSpec, pair: Sequence[Weights], rows: Sequence[Batch]) -> dict[str, float]:
    sums, tokens = np.zeros(3), 0
    for batch in rows:
        p, first = predictions(spec, pair[0], batch)
        q, second = predictions(spec, pair[1], batch)
        same = predictions(spec, pair[1], batch, first)[0]
        other = torch.zeros(batch.ids.shape, dtype=torch.bool)
        for a, b in zip(first, second, strict=True):
            other |= (a.sort(-1)[0] != b.sort(-1)[0]).any(-1)
        kl = [(p.exp() * (p - x)).sum().item() for x in (q, same)]
        sums += *kl, other[batch.mask].sum().item()
        tokens += len(p)
    return dict(zip(("kl", "same_experts", "other_experts"), sums / tokens, strict=True))


def documents(path: str, directory: str, count: int) -> list[Batch]:
    tokenizer = load_tokenizer(directory)
    with open(path, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(count), strict=False)]
    return batches([tokenizer.encode_ordinary(text)[:256] for text in texts])


def measure(directory: str, options: argparse.Namespace) -> None:
    spec, loaded = hub.load_model(directory)
    params = {name: np.array(x, np.float32) for name, x in loaded.items()}
    seen = documents(options.calibration, directory, options.rows)
    held = documents(options.held_out, directory, options.rows // 2)
    mixed = load_recipe("mixed")
    own = {component_of(t) for t in spec.tensors() if t.linear} & mixed.components.keys()
    recipes = {
        "mixed": mixed,
        "mixed, all tokens": replace(mixed, experts="all"),
        "mixed, to nearest": replace(mixed, rounding="rtn"),
    }
    recipes |= {f"{part} alone": Recipe("mixed", {part: mixed.components[part]}) for part in own}
    for name, recipe in recipes.items():
        made = quantize(spec, params, recipe, OPS, seen)
        pair = [OPS.to_device(x, "float32") for x in (params, made.params)]
        found = compared(spec, pair, held)
        errors = [x["output_error"] for x in made.rows if x["component"] == "expert"]
        error = np.mean([x for x in errors if x is not None] or [0])
        print(
            f"{directory} {name}: KL {found['kl']:.5f}, {found['same_experts']:.5f} with the same "
            f"experts; other experts for {found['other_experts']:.1%} of tokens; output error of "
            f"experts {error:.4f}", flush=True
        )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calibration")
    parser.add_argument("held_out")
    parser.add_argument("--model", dest="models", nargs="+", required=True)
    parser.add_argument("--rows", type=int, default=64)
    given = parser.parse_args()
    for one in given.models:
        measure(one, given)
