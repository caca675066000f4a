"""What rounding costs a trained model, and what training for it gives back: three seeds.

A model of one layer memorizes random facts (the value of a pair), about as many as it can hold.
"""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.model import forward  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.parallel.build_ops import load_ops  # noqa: E402
from sabia.core.quant.hessians import batches  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.quant.recipe import Recipe, load_recipe  # noqa: E402
from sabia.core.spec import from_config, new_config  # noqa: E402
from sabia.core.train.losses.next_token import Distillation, next_token_loss  # noqa: E402
from sabia.core.train.stepper_factory import make_stepper  # noqa: E402
from sabia.core.train.teacher import Teacher  # noqa: E402

OPS, SIZE = load_ops("torch"), 43
SPEC = from_config(
    new_config(hidden=48, layers=1, heads=4, ffn=128, vocab=SIZE + 1, tied=False, context=16)
)
PAIRS = np.stack([*np.indices((SIZE, SIZE)).reshape(2, -1), np.full(SIZE**2, SIZE)], 1)  # a, b, =
Facts = np.ndarray  # the value of each pair
EVERYWHERE = Recipe("four", dict.fromkeys(("attention", "mlp", "head"), "w4a16"))
Params = dict[str, np.ndarray]


def trained(
    facts: Facts, params: Params, steps: int, lr: float, seed: int, teacher: Any = None, **more: Any
) -> Params:
    """The parameters after `steps` on random pairs; teacher: whose predictions are learned."""

    def loss(*arguments: Any) -> Any:
        return next_token_loss(*arguments, teacher=Distillation() if teacher else None)

    stepper, rng = make_stepper("torch", SPEC, params, loss, **more), np.random.default_rng(seed)
    for step in range(steps):
        chosen = rng.integers(0, len(PAIRS), 512)
        targets = np.zeros((512, 3), np.int32)
        targets[:, 2] = facts[chosen]
        batch = {
            "input_ids": PAIRS[chosen].astype(np.int32),
            "targets": targets,
            "loss_mask": np.repeat(np.float32([[0, 0, 1]]), 512, 0),
        }
        rate = lr * min(1, (step + 1) / 20) * (1 - step / steps)
        stepper.step(teacher.complete(batch) if teacher else batch, rate, number=step)
    return {name: array.detach().numpy().copy() for name, array in stepper.params.items()}


def accuracy(facts: Facts, params: Params) -> float:
    weights = OPS.to_device(params, "float32")
    with torch.inference_mode():
        hidden = forward.hidden(SPEC, weights, PAIRS, OPS)[:, -1:]
        best = forward.logits(SPEC, weights, hidden, OPS)[:, 0].argmax(-1)
    return float((best.numpy() == facts).mean())


def served(facts: Facts, params: Params, recipe: Recipe) -> float:
    """The accuracy after quantization, calibrated on 512 pairs."""
    chosen = np.random.default_rng(0).integers(0, len(PAIRS), 512)
    rows = batches(PAIRS[chosen].tolist())
    return accuracy(facts, quantize(SPEC, params, recipe, OPS, rows).params)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_what_rounding_costs_and_training_gives_back(seed: int) -> None:
    facts = np.random.default_rng(seed).integers(0, SIZE, len(PAIRS))
    params = trained(facts, hub.init_params(SPEC, seed), 500, 3e-3, seed)
    original = accuracy(facts, params)
    mixed, four, rounded = (
        served(facts, params, recipe)
        for recipe in (load_recipe("mixed"), EVERYWHERE, load_recipe("qat-int4"))
    )
    made = {}
    for name, teacher in (("QAT", None), ("QAD", Teacher(SPEC, params, "torch"))):
        more = {"teacher": teacher, "precision": "qat-int4"}
        tuned = trained(facts, params, 200, 5e-4, seed + 10, **more)
        made[name] = served(facts, tuned, load_recipe("qat-int4"))
    figures = {"original": original, "mixed": mixed, "4 bits by GPTQ": four, "to nearest": rounded}
    print(seed, {name: round(value, 4) for name, value in (figures | made).items()})
    assert original - mixed <= 0.01
    assert original - four > original - mixed and original - rounded > 0.05
    for value in made.values():
        assert value - rounded >= (original - rounded) / 2
