"""Fit the constants of the planner's step-time model; write core/plan/data/calibration.toml.

  python tests/bench/calibrate_plan.py            fit, cross-validate, write
  python tests/bench/calibrate_plan.py --forms    print errors of simpler forms of the model too

Data: tests/core/plan/calibration_rows.toml for all constants but those of MIXTURE; then, with these
held, calibration_mixtures.toml for those, nothing else. So mixtures, whose software varies
more, leave the rest alone. Each source of mixtures has the weight of the root of its rows' number.
Least squares on log(predicted/published)
with a pseudo-Huber loss (a row that is far off for a reason of its own counts linearly), and a
penalty for leaving the priors, that say what each constant should be from physics and how sure
that is. Errors: in-sample, each row left out, each source left out, each chip left out. The band of
a prediction comes from the latter two. A form of the model is one of the full set of constants or
the set with one of them at the value that it would have on an ideal machine (those of MIXTURE: at
what they are for other products); the choice was made by the error with sources left out, save that
`shape` stays: no dense row here has small products, which others have.
"""

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from step_cases import CALIBRATION, MIXTURES, Case, calibration_cases, mixture_cases  # noqa: E402

from sabia.core.plan.device.step_time import step_time  # noqa: E402
from sabia.core.plan.device.step_work import Constants  # noqa: E402

TARGET = ROOT / "core" / "plan" / "data" / "calibration.toml"
NOISE = 0.08  # log error that a published figure is expected to have
MIXTURE_NOISE = 0.2  # the same of mixtures
# constant: (prior, standard deviation of its logarithm, value on an ideal machine)
PRIORS = {
    "gpu": (0.85, 0.15, 1.0),
    "tpu": (0.85, 0.15, 1.0),
    "balance": (0.05, 1.0, 0.0),
    "shape": (0.6, 0.7, 0.0),
    "attention": (0.6, 0.3, 1.0),
    "elementwise": (1.2, 0.4, 1.0),
    "collective": (0.8, 0.2, 1.0),
    "exposed": (0.2, 0.7, 0.0),
    "grouped": (0.6, 0.7, 0.0),
    "routed_tpu": (0.85, 0.3, 1.0),
    "exposed_routed": (0.3, 0.7, 0.0),
    "launch_s": (0.005, 0.7, 0.0),
    "sinks": (2.0, 0.7, 1.0),
}
MIXTURE = ("grouped", "routed_tpu", "exposed_routed", "launch_s", "sinks")
Array = np.ndarray
Values = dict[str, float]


def log_errors(cases: list[Case], values: Values) -> Array:
    """log(predicted / published) of each case."""
    constants = Constants(**values)
    predicted = [
        step_time(case.workload, case.layout, case.chip, case.stack, constants).total_s
        for case in cases
    ]
    return np.log(np.array(predicted) / [case.measured_s for case in cases])


def fit(
    cases: list[Case], mixtures: list[Case] | None = None, ideal: tuple[str, ...] = ()
) -> Values:
    """The constants; those of `ideal` stay at an ideal machine's value.

    Those of MIXTURE stay at what they are for other products if there are no mixtures.
    """
    held = {name: PRIORS[name][2] for name in (*ideal, *MIXTURE)}
    found = _fit(cases, held, NOISE, np.ones(len(cases)))
    found |= {"grouped": found["shape"], "exposed_routed": found["exposed"]}
    if not mixtures:
        return found
    alike = Counter(map(source, mixtures))
    weights = np.array([alike[source(case)] for case in mixtures]) ** -0.25
    held = {name: found[name] for name in found if name not in MIXTURE or name in ideal}
    return _fit(mixtures, held, MIXTURE_NOISE, weights)


def source(case: Case) -> str:
    """What a table of mixtures comes from: the first word of its id."""
    return case.table.split("-")[0]


def _fit(cases: list[Case], held: Values, noise: float, weights: Array) -> Values:
    """All constants, those that are not held fitted."""
    free = [name for name in PRIORS if name not in held]
    if not free:
        return held
    prior = np.log([PRIORS[name][0] for name in free])
    width = np.array([PRIORS[name][1] for name in free])

    def values(x: Array) -> Values:
        return held | dict(zip(free, np.exp(x).tolist(), strict=True))

    def residuals(x: Array) -> Array:
        off = log_errors(cases, values(x)) / noise
        huber = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([weights * huber, (x - prior) / width])

    found = values(least_squares(residuals, prior).x)
    return {name: found[name] for name in PRIORS}


def left_out(
    cases: list[Case], key: Callable[[int, Case], Any], ideal: tuple[str, ...] = ()
) -> Array:
    """log errors of each case with constants fitted on the cases of other keys."""
    return _left_out(cases, key, lambda rest: fit(rest, None, ideal))


def mixtures_left_out(
    cases: list[Case], mixtures: list[Case], ideal: tuple[str, ...] = ()
) -> Array:
    """log errors of each mixture with constants fitted on those of other sources."""
    return _left_out(mixtures, lambda _, case: source(case), lambda rest: fit(cases, rest, ideal))


def _left_out(
    cases: list[Case], key: Callable[[int, Case], Any], fitted: Callable[[list[Case]], Values]
) -> Array:
    keys = [key(number, case) for number, case in enumerate(cases)]
    errors = np.zeros(len(cases))
    for one in dict.fromkeys(keys):
        rest = [case for case, other in zip(cases, keys, strict=True) if other != one]
        held = [number for number, other in enumerate(keys) if other == one]
        errors[held] = log_errors([cases[number] for number in held], fitted(rest))
    return errors


def figures(errors: Array) -> Values:
    """Root mean square of the logs, mean error, share within 15 %."""
    share = np.abs(np.expm1(errors))
    return {
        "rms_log": float(np.sqrt(np.mean(errors**2))),
        "mean": float(share.mean()),
        "within_15_percent": float(np.mean(share <= 0.15)),
    }


def fingerprint(cases: list[Case]) -> str:
    """Of the rows, the priors, and what the model's formulas make of the rows at the priors."""
    values = {name: prior[0] for name, prior in PRIORS.items()}
    predicted = [f"{error:.6f}" for error in log_errors(cases, values)]
    rows = CALIBRATION.read_text() + MIXTURES.read_text()
    text = rows + repr(PRIORS) + " ".join(predicted)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def by_group(cases: list[Case], errors: Array, key: Callable[[Case], str]) -> Values:
    """Mean error by chip, or by source."""
    groups: dict[str, list[float]] = {}
    for case, error in zip(cases, errors, strict=True):
        groups.setdefault(key(case), []).append(abs(float(np.expm1(error))))
    return {name: float(np.mean(found)) for name, found in groups.items()}


def render(cases: list[Case], mixtures: list[Case]) -> str:
    """The file's text."""
    values = fit(cases, mixtures)
    by_source = left_out(cases, lambda _, case: case.table)
    errors = {
        "in_sample": log_errors(cases, values),
        "row_left_out": left_out(cases, lambda number, _: number),
        "source_left_out": by_source,
        "chip_left_out": left_out(cases, lambda _, case: case.chip.name),
        "mixtures_in_sample": log_errors(mixtures, values),
        "mixtures_source_left_out": mixtures_left_out(cases, mixtures),
    }
    lines = [
        "# Constants of the step-time model (core/plan/device/step_work.py says what they mean).",
        "# Written by tests/bench/calibrate_plan.py; never edit.",
        "",
        f"date = {date.today()}",
        "",
        *_table("constants", values.items()),
        *_table("rows", [("count", len(cases)), ("mixtures", len(mixtures)),
                         ("chips", sorted({c.chip.name for c in cases})),
                         ("fingerprint", fingerprint([*cases, *mixtures]))]),
    ]  # fmt: skip
    for name, found in errors.items():
        lines += _table(f"errors.{name}", figures(found).items())
    lines += _table("mean_by_chip", by_group(cases, by_source, lambda c: c.chip.name).items())
    lines += _table("mean_by_stack", by_group(cases, by_source, lambda c: c.stack.name).items())
    return "\n".join(lines).rstrip() + "\n"


def _table(name: str, items: Iterable[tuple[str, Any]]) -> list[str]:
    return [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in items), ""]


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if value % 1 else f"{value:.1f}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def print_forms(cases: list[Case], mixtures: list[Case]) -> None:
    """Errors with one constant fewer, sources left out."""
    for name in (None, *(name for name in PRIORS if name not in MIXTURE)):
        ideal = (name,) if name else ()
        found = figures(left_out(cases, lambda _, case: case.table, ideal))
        print(f"{'all constants' if name is None else 'without ' + name:22s}", found, flush=True)
    for ideal in ((), *((name,) for name in MIXTURE), MIXTURE):
        found = figures(mixtures_left_out(cases, mixtures, ideal))
        print(f"{'mixtures without ' + ', '.join(ideal):40s}", found, flush=True)


def main() -> None:
    """Fit and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--forms", action="store_true")
    asked = parser.parse_args()
    cases, mixtures = calibration_cases(), mixture_cases()
    if asked.forms:
        print_forms(cases, mixtures)
    TARGET.write_text(render(cases, mixtures))
    values = fit(cases, mixtures)
    print(asdict(Constants(**values)))
    every = [*cases, *mixtures]
    for case, error in zip(every, log_errors(every, values), strict=True):
        print(f"{case.table:16s}{case.label:46s}{100 * np.expm1(error):+7.1f} %")


if __name__ == "__main__":
    main()
