"""Numbers of chips that can be rented; why no layout fits, and the smallest change that fixes it.

GPUs are rented by node, TPUs as slices of a torus (cloud.google.com/tpu/docs, page of each version,
seen 2026-11): v5e and v6e as 1, 4, 8, 16, 32, 64, 128 or 256 chips and multiples of whole pods of
256; those with three dimensions as 4, 8, 16 or 32 chips, and then cubes of 4 x 4 x 4.

Changes of one option are searched in this order, from the cheapest to the most expensive: do not
fix a field of the layout; fewer bytes per parameter (a smaller state recipe); more chips (the
fewest that can be rented and fit); shorter sequences in batches of as many tokens; a batch that the
chips divide; the same number of a chip with more memory. Memory is least with full recomputation,
the smallest micro-batch and the highest ZeRO level, so only these are tried where they are free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from sabia.core.errors import Infeasible
from sabia.core.plan.chips import Chip, load_chips
from sabia.core.plan.device.layout import Workload
from sabia.core.plan.device.search_rules import SearchProblem
from sabia.core.plan.device.survey import Survey
from sabia.core.plan.memory import RECIPES
from sabia.core.units import format_bytes

CUBE = 64
FLAT_SLICES = (1, 4, 8, 16, 32, 64, 128, 256)
CUBE_PARTS = (4, 8, 16, 32)
FINE = 16  # all sizes up to so many units, then FINE/2 sizes per doubling


def rentable(chip: Chip, limit: int, start: int = 1) -> Iterator[int]:
    """Numbers of chips from `start` to `limit` that can be rented, ascending."""
    unit, parts = _unit(chip), {2: FLAT_SLICES, 3: CUBE_PARTS}.get(chip.torus_axes, ())
    yield from (n for n in parts if start <= n <= min(limit, unit - 1))
    yield from range(max(1, -(-start // unit)) * unit, limit + 1, unit)


def _unit(chip: Chip) -> int:
    """The unit of large numbers of chips: pods or cubes of a torus, else nodes."""
    return {2: chip.scale_up_domain, 3: CUBE}.get(chip.torus_axes, chip.node_chips)


def coarse(chip: Chip, limit: int) -> list[int]:
    """As `rentable`, but only about FINE/2 of the large numbers per doubling."""
    unit = _unit(chip)

    def round_number(size: int) -> bool:
        units = size // unit
        return size % (unit << max(0, (units // FINE).bit_length())) == 0 or units <= FINE

    return [size for size in rentable(chip, limit) if round_number(size)]


MOST_CHIPS = 32768
MOST_SIZES = 512  # that are searched one by one
SHORTEST = 512  # tokens of a row
NAMED = 4  # changes in a message
OWN_FLAGS = ("micro_batch", "recompute")


def infeasible(problem: SearchProblem, counts: Sequence[int], survey: Survey) -> Infeasible:
    """The error for a search without any layout that fits."""
    advice = "; no change of one option makes it fit, so use a smaller model"
    free = replace(problem, pinned={})
    if fixes := list(islice(changes(problem, counts), NAMED)):
        advice = f"; use {', or '.join(fixes)}"
    elif problem.pinned and (more := list(islice(changes(free, counts), NAMED))):
        fields = ", ".join(field.replace("_", "-") for field in problem.pinned)
        advice = f"; do not fix {fields} and use {', or '.join(more)}"
    return Infeasible(_what(problem, counts, survey) + advice)


def _what(problem: SearchProblem, counts: Sequence[int], survey: Survey) -> str:
    many = str(counts[0]) if len(counts) == 1 else f"up to {max(counts)}"
    begin = f"--chips: {many} {problem.chip.name}"
    if survey.least is None:
        reasons = sorted(survey.rejected.items(), key=lambda pair: -pair[1])
        why = f"most often {reasons[0][0]}" if reasons else "the fixed axes do not divide them"
        return f"{begin} have no layout for this model ({why})"
    need, layout = survey.least
    return (
        f"{begin} cannot hold the run: it needs at least {format_bytes(need)} per chip "
        f"({layout.described}), and {problem.utilisation:.0%} of "
        f"{format_bytes(problem.chip.usable_hbm_bytes)} may be used"
    )


def changes(problem: SearchProblem, counts: Sequence[int]) -> Iterator[str]:
    """Options with which the run fits, one change each; the cheapest first."""
    yield from _freed(problem, counts)
    yield from _first_fit(_leaner(problem), counts)
    yield from _more_chips(problem, counts)
    for others in (_shorter(problem), _other_batch(problem, max(counts)), _larger_chip(problem)):
        yield from _first_fit(others, counts)


# alternatives, lazily: (the option, the problem with it)
_Others = Iterator[tuple[str, SearchProblem]]


def _first_fit(others: _Others, counts: Sequence[int]) -> Iterator[str]:
    """The option of the first of `others` for which a layout fits, if any."""
    return islice((flag for flag, other in others if _fits(other, counts)), 1)


def _fits(problem: SearchProblem, counts: Sequence[int]) -> Survey | None:
    """The layouts with the free settings that need least memory, if any fits."""
    lean: dict[str, Any] = {"recompute": "full", "micro_batch": 1, "zero": problem.can.zero[-1]}
    survey = Survey(replace(problem, pinned=lean | {**problem.pinned}), counts, timed=False)
    return survey if survey.fitting else None


def _freed(problem: SearchProblem, counts: Sequence[int]) -> Iterator[str]:
    """Another value of one fixed field; the fastest layout first."""
    by_step_time = []
    for field in problem.pinned:
        others = {k: v for k, v in problem.pinned.items() if k != field}
        survey = Survey(replace(problem, pinned=others), counts)
        if survey.fitting:
            best = survey.row(int(survey.gathered()[0].argmin()))
            by_step_time.append((best.step_s, _as_option(field, getattr(best.layout, field))))
    yield from (flag for _, flag in sorted(by_step_time))


def _as_option(field: str, value: object) -> str:
    """A field's value as on the command line."""
    name = field.replace("_", "-")
    if isinstance(value, bool):
        value = "yes" if value else "no"
    return f"--{name} {value}" if field in OWN_FLAGS else f"{name}={value} in --fixed-layout"


def _leaner(problem: SearchProblem) -> _Others:
    workload = problem.workload
    if problem.can.recipes or workload.adapter_params is not None:
        return  # the software has its own recipe; the state of adapters is small
    leaner = [r for r in RECIPES.values() if r.bytes_per_param < workload.recipe.bytes_per_param]
    for recipe in sorted(leaner, key=lambda recipe: -recipe.bytes_per_param):
        yield f"--state-recipe {recipe.name}", _with(problem, recipe=recipe)


def _with(problem: SearchProblem, **changed: Any) -> SearchProblem:
    workload: Workload = replace(problem.workload, **changed)
    return replace(problem, workload=workload)


def _more_chips(problem: SearchProblem, counts: Sequence[int]) -> Iterator[str]:
    start, most = max(counts) + 1, min(2 * max(counts), MOST_CHIPS)
    while start <= MOST_CHIPS:
        sizes = list(rentable(problem.chip, most, start))
        if len(sizes) > MOST_SIZES:
            sizes = [size for size in coarse(problem.chip, most) if size >= start]
        survey = _fits(problem, sizes) if sizes else None
        if survey is not None:
            yield f"--chips {survey.fewest}"
            return
        start, most = most + 1, min(4 * most, MOST_CHIPS) if most < MOST_CHIPS else MOST_CHIPS + 1


def _shorter(problem: SearchProblem) -> _Others:
    workload = problem.workload
    length, rows = workload.sequence // 2, workload.batch_rows * 2
    while length >= SHORTEST:
        yield f"--seq {length}", _with(problem, sequence=length, batch_rows=rows)
        length, rows = length // 2, rows * 2


def _other_batch(problem: SearchProblem, chips: int) -> _Others:
    workload = problem.workload
    rounded = 1 << (workload.batch_rows - 1).bit_length()
    for rows in sorted({rounded, -(-workload.batch_rows // chips) * chips}):
        if rows != workload.batch_rows:
            yield f"--batch-tokens {rows * workload.sequence}", _with(problem, batch_rows=rows)


def _larger_chip(problem: SearchProblem) -> _Others:
    now = problem.chip
    larger = [c for c in load_chips().values() if c.usable_hbm_bytes > now.usable_hbm_bytes]
    for chip in sorted(larger, key=lambda chip: (chip.family != now.family, chip.usable_hbm_bytes)):
        yield f"--chip {chip.name}", replace(problem, chip=chip)
