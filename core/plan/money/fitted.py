"""A scaling law fitted on one's own runs (`--fit`), with intervals by bootstrap.

L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, arXiv 2203.15556, approach 3). For given α and β
the law is linear in E, A and B: these are the non-negative least squares of relative errors, and α
and β are searched on a grid that is refined (variable projection, Golub and Pereyra 1973). Fewer
than MOST_FREE runs, or fewer than three sizes or numbers of tokens, cannot determine the exponents:
then they are those of BESIROGLU. Only the end of a run counts, since the losses before the learning
rate has decayed are too high (Hoffmann, section 3).

The interval of a figure is the 10th to the 90th percentile over laws fitted to the runs drawn with
replacement (Efron 1979); that of a loss also has the spread of the runs around the law. Neither
shows that the law itself does not hold: -d log L / d log D, which by the law falls with D, rises in
runs of a few hundred steps (`exponents`), and forecasts for longer runs are then too high.

One's own runs for a scaling law: a table, or a directory of runs of `sabia pretrain`.
"""

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.money.scaling import BESIROGLU, Pair, ScalingLaw
from sabia.core.plan.runs import read_runs

LEAST_RUNS = 4
MOST_FREE = 8
MOST_RUNS = 2000
RESAMPLED = 100
EXPONENTS = 0.05, 1.0
SIDE, LEVELS = 9, 7  # of the grid of exponents, and its refinements


@dataclass(frozen=True)
class OwnRun:
    """The end of one run: parameters, training tokens, and loss in nats a token."""

    params: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class FittedLaw:
    """A law, those of the resampled runs, and the relative errors of the runs.

    free: whether the exponents were fitted.
    """

    law: ScalingLaw
    resampled: tuple[ScalingLaw, ...]
    errors: tuple[float, ...]
    runs: tuple[OwnRun, ...]
    free: bool

    @property
    def rms_error(self) -> float:
        """Root mean square of the relative errors."""
        return (sum(error**2 for error in self.errors) / len(self.errors)) ** 0.5

    @property
    def largest_flops(self) -> float:
        """6ND of the largest run."""
        return max(Pair(run.params, run.tokens).train_flops for run in self.runs)

    @property
    def exponents(self) -> tuple[float, float] | None:
        """Mean of -d log L / d log D between the two shortest runs of a size, and the two longest.

        None where no size has three lengths.
        """
        best: dict[float, dict[float, float]] = {}
        for run in self.runs:
            losses = best.setdefault(run.params, {})
            losses[run.tokens] = min(run.loss, losses.get(run.tokens, math.inf))
        pairs = [
            (_exponent(*ends[:2]), _exponent(*ends[-2:]))
            for ends in (sorted(losses.items()) for losses in best.values())
            if len(ends) > 2
        ]
        if not pairs:
            return None
        first, last = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        return first, last

    def interval(self, of: Callable[[ScalingLaw], float]) -> tuple[float, float]:
        """10th and 90th percentile of a figure of the law."""
        return percentiles([of(law) for law in self.resampled])

    def loss_interval(self, params: float, tokens: float) -> tuple[float, float]:
        """The same of the loss that a run would have, with the spread of the runs."""
        fitted = 5 if self.free else 3
        wider = (len(self.errors) / max(1, len(self.errors) - fitted)) ** 0.5
        pairs = itertools.product(self.resampled, self.errors)
        return percentiles(law.loss(params, tokens) * (1 + error * wider) for law, error in pairs)


def _exponent(short: tuple[float, float], long: tuple[float, float]) -> float:
    return math.log(short[1] / long[1]) / math.log(long[0] / short[0])


def percentiles(values: Iterable[float]) -> tuple[float, float]:
    """10th and 90th percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def fit(runs: Sequence[OwnRun], seed: int = 0) -> FittedLaw:
    """The law of `runs`. Raises UsageError where they cannot determine one."""
    import numpy as np

    sizes, lengths = {run.params for run in runs}, {run.tokens for run in runs}
    if len(runs) < LEAST_RUNS or len(sizes) < 2 or len(lengths) < 2:
        raise UsageError(
            f"--fit: {len(runs)} runs of {len(sizes)} sizes and {len(lengths)} numbers of tokens "
            f"(expected at least {LEAST_RUNS} runs, 2 sizes and 2 numbers of tokens)"
        )
    if len(runs) > MOST_RUNS:
        raise UsageError(f"--fit: {len(runs)} runs (expected at most {MOST_RUNS})")
    free = len(runs) >= MOST_FREE and min(len(sizes), len(lengths)) > 2
    table = np.array([(run.params, run.tokens, run.loss) for run in runs])
    draws = np.random.default_rng(seed)
    law = _law(table, np.ones(len(runs)), free)
    resampled = list[ScalingLaw]()
    while len(resampled) < RESAMPLED:
        drawn = draws.integers(0, len(runs), len(runs))
        some = table[drawn]
        if min(len(set(some[:, 0])), len(set(some[:, 1]))) > 1:
            weights = np.bincount(drawn, minlength=len(runs)).astype(float)
            resampled.append(_law(table, weights, free))
    errors = tuple(run.loss / law.loss(run.params, run.tokens) - 1 for run in runs)
    return FittedLaw(law, tuple(resampled), errors, tuple(runs), free)


def _law(table: Any, weights: object, free: bool) -> ScalingLaw:
    """The law with the least weighted squares of relative errors."""
    import numpy as np

    low, high = EXPONENTS
    centre, reach = np.array([BESIROGLU.alpha, BESIROGLU.beta]), 0.0
    if free:
        centre, reach = np.full(2, (low + high) / 2), (high - low) / 2
    middle = np.exp(np.log(table[:, :2]).mean(0))  # of sizes and tokens: keeps powers near 1
    best: tuple[float, Any, Any] = (np.inf, centre, np.zeros(3))
    for _ in range(LEVELS if free else 1):
        steps = np.linspace(-reach, reach, SIDE) if free else np.zeros(1)
        grid = np.clip(np.array(list(itertools.product(steps, steps))) + centre, low, high)
        powers = (table[None, :, :2] / middle) ** -grid[:, None, :]
        ones = np.ones((*powers.shape[:2], 1))
        columns = np.concatenate([ones, powers], 2) / table[:, 2][:, None]
        squares, factors = _non_negative(columns, weights)
        chosen = int(squares.argmin())
        if squares[chosen] < best[0]:
            best = float(squares[chosen]), grid[chosen], factors[chosen]
        centre, reach = best[1], reach * 2 / (SIDE - 1) * 1.5
    _, (alpha, beta), (e, a, b) = best
    scale = middle ** best[1]
    return ScalingLaw("fitted", *map(float, (e, a * scale[0], b * scale[1], alpha, beta)))


def _non_negative(columns: Any, weights: Any) -> tuple[Any, Any]:
    """Non-negative factors of three columns whose sum is nearest to 1, and the sums of squares.

    columns: [exponents, runs, 3]. Where all three are not positive, every set of two and of one is
    tried: one of them is the optimum.
    """
    import numpy as np

    normal = np.einsum("p,gpi,gpj->gij", weights, columns, columns)
    right = np.einsum("p,gpi->gi", weights, columns)
    best = np.full(len(columns), np.inf)
    factors = np.zeros((len(columns), 3))
    left = np.arange(len(columns))  # without a solution yet
    for count in (3, 2, 1):
        for some in map(list, itertools.combinations(range(3), count)):
            square = normal[left][:, some][:, :, some] + 1e-12 * np.eye(count)
            tried = np.zeros((len(left), 3))
            tried[:, some] = np.linalg.solve(square, right[left][:, some][..., None])[..., 0]
            squares = weights.sum() - np.einsum("gi,gi->g", tried, 2 * right[left])
            squares = squares + np.einsum("gi,gij,gj->g", tried, normal[left], tried)
            better = (tried >= 0).all(1) & (squares < best[left])
            best[left[better]], factors[left[better]] = squares[better], tried[better]
        if count == 3:
            left = left[np.isinf(best)]
    return best, factors


MOST_ROWS = 1_000_000
RUN_RECORD = "run.json"  # of a run directory; core.train.run_directory


def fitted_law(settings: PlanOptions) -> FittedLaw | None:
    """The law of --fit; None without it. Raises UsageError, BadData."""
    if settings.fit is None:
        return None
    rows = _run_directories(settings.fit) if os.path.isdir(settings.fit) else _rows(settings.fit)
    return fit(own_runs(rows))


def _rows(path: str) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(read_runs(path)):
        if number == MOST_ROWS:
            raise UsageError(f"--fit: {path}: more than {MOST_ROWS:,} rows")
        yield row


def _run_directories(folder: str) -> Iterator[tuple[str, Any]]:
    """A row for each run of `sabia pretrain` in a folder: run.json, and the size of its model."""
    from sabia.core.plan.counting.known import architecture_of

    for name in sorted(os.listdir(folder)):
        record, model = (os.path.join(folder, name, each) for each in (RUN_RECORD, "final"))
        if not os.path.isfile(record) or not os.path.isdir(model):
            continue
        try:
            with open(record, encoding="utf-8") as file:
                row = json.loads(file.read(1 << 24))
        except (OSError, ValueError, RecursionError) as error:
            raise BadData(f"--fit: {record}: {str(error)[:100]}") from None
        if isinstance(row, dict):
            yield name, {**row, "run": name, "params": architecture_of(model).active_params}


COLUMNS = {"params": ("params", "active_params"), "tokens": ("tokens",),
           "loss": ("validation_loss", "loss", "value")}  # fmt: skip


def own_runs(rows: Iterable[tuple[str, Any]]) -> list[OwnRun]:
    """The last row of each run that has all three figures; `run` (or `run_id`) names the run.

    rows: pairs of a place and a row, or why it is none. Raises BadData without any run.
    """
    ends: dict[str, OwnRun] = {}
    for where, row in rows:
        if isinstance(row, Exception):
            raise row
        run = own_run(row)
        if run is not None:
            ends[str(row.get("run", row.get("run_id", where)))] = run
    if not ends:
        wanted = ", ".join(" or ".join(names) for names in COLUMNS.values())
        raise BadData(f"--fit: no row has the columns {wanted} with numbers above 0")
    return list(ends.values())


def own_run(row: Mapping[str, Any]) -> OwnRun | None:
    """The figures of a row; None where one is missing or no number above 0."""
    figures = []
    for names in COLUMNS.values():
        values = [row[name] for name in names if row.get(name) is not None]
        value = values[0] if values else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            return None
        figures.append(float(value))
    return OwnRun(*figures)
