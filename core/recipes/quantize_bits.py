"""`quantize --bits`: gradients on the calibration records, formats within the budget, the recipe.

The search is a function of model, records, recipe, options and seed. The recipe that it finds is
written next to the weights, and quantizes to the same bytes when it is given as `--recipe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.model.storage.layered_files import LayeredFiles
from sabia.core.options.quantize import QuantizeOptions
from sabia.core.progress import progress
from sabia.core.quant.memory_bounds import SENSITIVITY_BATCH, SENSITIVITY_TOKENS
from sabia.core.quant.recipe import Recipe
from sabia.core.recipes.calibration.rows import CalibrationRows
from sabia.core.shards.atomic import write_atomic

FILE = "recipe.toml"


def found_in_budget(
    options: QuantizeOptions, recipe: Recipe, files: LayeredFiles, read: CalibrationRows, seed: int
) -> Recipe:
    """The recipe with formats chosen for `options.bits`. Raises UsageError, Infeasible."""
    # torch is loaded only when a model is quantized
    from sabia.core.ops.backend import load_ops
    from sabia.core.quant import allocation, hessians, sensitivity

    assert options.bits is not None
    choices = allocation.parse_choices(options.formats)
    recipe = allocation.with_components_of(recipe, files.spec)
    units = allocation.units(files.spec, recipe, choices)
    allocation.allocate(units, options.bits)  # a budget that is too small is refused first
    of = frozenset(t.name for unit in units for t in unit.tensors)
    batches = hessians.batches(_first([row.ids for row in read.rows]), SENSITIVITY_BATCH)
    parts = sensitivity.fisher(files.spec, files.read, of, batches, seed, load_ops("torch"))
    with progress(len(files.spec.layers) + 1, "sensitivity", "layers") as bar:
        for part in parts:
            allocation.add_losses(files.spec, units, part, recipe)
            bar.advance(layer=part.layer)
    chosen = allocation.allocate(units, options.bits)
    shares = allocation.by_format(units, chosen)
    expected = sum(unit.losses[choice] for unit, choice in zip(units, chosen, strict=True))
    notes.note(
        f"--bits {options.bits:g}: {allocation.stored_bits(units, chosen):.4f} stored bits per "
        f"weight of {len(units)} parts ("
        + ", ".join(f"{share:.0%} {name}" for name, share in sorted(shares.items()))
        + f"); expected KL {expected:.2g} nats"
    )
    return allocation.found_recipe(recipe, units, chosen, f"{recipe.name}-{options.bits:g}-bits")


def write_recipe(out: Path, recipe: Recipe, options: QuantizeOptions) -> None:
    """Write the recipe next to the weights."""
    from sabia.core.quant.allocation import to_toml

    comment = f"Found by sabia quantize --bits {options.bits:g} --formats {options.formats}"
    write_atomic(out / FILE, to_toml(recipe, comment))


def _first(rows: Sequence[Any]) -> list[Any]:
    """The first rows with SENSITIVITY_TOKENS tokens, one at least."""
    kept: list[Any] = []
    for row in rows:
        if kept and sum(map(len, kept)) + len(row) > SENSITIVITY_TOKENS:
            break
        kept.append(row)
    return kept
