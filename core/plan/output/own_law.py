"""The law of `--fit`: its runs, its constants with intervals, and what it says about a plan."""

from dataclasses import asdict
from typing import Any

from sabia.core.plan.money.fitted import FittedLaw, percentiles
from sabia.core.plan.money.scaling import BESIROGLU, Pair
from sabia.core.plan.output.table import percent
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.units import format_count

RISING = 1.2  # ratio of the exponents of long and of short runs, above which the law fails
FAR = 1000  # times the FLOPs of the largest run, beyond which a law says little


def law_line(fitted: FittedLaw | None) -> str:
    """The law in one line."""
    law = fitted.law if fitted else BESIROGLU
    words = f"loss = {law.e:.3f} + {law.a:.4g}/N^{law.alpha:.3f} + {law.b:.4g}/D^{law.beta:.3f}"
    if fitted is None:
        return f"law       {law.name}: {words}; --fit uses your own runs"
    exponents = "" if fitted.free else ", exponents of Besiroglu 2024"
    return (
        f"law       of {len(fitted.runs)} runs{exponents}: {words}, error "
        f"{percent(round(fitted.rms_error, 4))}"
    )


def interval_text(pair: tuple[float, float]) -> str:
    """' (2.310 to 2.365)'."""
    return f" ({pair[0]:.3f} to {pair[1]:.3f})"


def fit(request: PlanRequest, plan: Plan) -> View:
    """What the law says about the plan: its final loss, and the best pair for its FLOPs."""
    fitted = request.own_law
    assert fitted is not None
    params, tokens = plan.run.active_params, plan.run.tokens
    flops = Pair(params, tokens).train_flops
    loss, interval = fitted.law.loss(params, tokens), fitted.loss_interval(params, tokens)
    lines = [
        law_line(fitted),
        f"          this plan: final loss {loss:.3f}{interval_text(interval)}",
    ]
    figures: dict[str, Any] = {
        "law": asdict(fitted.law),
        "runs": len(fitted.runs),
        "exponents_fitted": fitted.free,
        "rms_error": fitted.rms_error,
        "exponents": list(fitted.exponents or ()),
        "loss": loss,
        "loss_low": interval[0],
        "loss_high": interval[1],
        "times_largest_run": flops / fitted.largest_flops,
    }
    if fitted.law.a and fitted.law.b:
        best = fitted.law.optimal(flops)
        laws = [law for law in fitted.resampled if law.a and law.b]
        low, high = percentiles([law.optimal(flops).params for law in laws] or [best.params])
        lines.append(
            f"          for its FLOPs: {format_count(best.params)} parameters "
            f"({format_count(low)} to {format_count(high)}) on {format_count(best.tokens)} tokens, "
            f"loss {fitted.law.loss(best.params, best.tokens):.3f}"
        )
        figures |= {"best_params": best.params, "best_params_low": low, "best_params_high": high,
                    "best_tokens": best.tokens}  # fmt: skip
    first, last = fitted.exponents or (0.0, 0.0)
    if last > RISING * first > 0:
        lines.append(
            f"          the loss falls faster in longer runs (tokens^-{last:.3f}, in the shortest "
            f"^-{first:.3f}): they are too short for the law, and its losses are too high"
        )
    if flops > FAR * fitted.largest_flops:
        lines.append(
            f"          the plan has {flops / fitted.largest_flops:,.0f} times the FLOPs of the "
            "largest run: far outside of what was fitted"
        )
    return View("\n".join(lines), figures)
