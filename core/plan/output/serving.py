"""The view of serving: replicas that hold the model, their speed, and what tokens cost."""

from typing import Any

from sabia.core.plan.compute import model_kind
from sabia.core.plan.output.table import columns
from sabia.core.plan.output.view import View
from sabia.core.plan.request import Request
from sabia.core.plan.serving.asked import Asked, asked_loads
from sabia.core.plan.serving.decode import cache_bytes
from sabia.core.plan.serving.formats import Judged, judged
from sabia.core.plan.serving.traffic import Load, cheapest, room
from sabia.core.units import format_bytes, format_count


def see(request: Request) -> View:
    """Serve the request's model on its chip. Raises UsageError, Infeasible."""
    asked = Asked(request)
    found = asked_loads(asked)
    best, usd = cheapest(found), asked.usd_per_chip_hour
    report = {
        "price_usd_per_chip_hour": usd,
        "replicas": [load_report(load, usd) for load in found],
        "best": load_report(best, usd),
        "published_over_predicted": judged_report(
            judged(model_kind(request.run.params, request.run.active_params))
        ),
        "assumed": asked.assumed,
    }
    if request.cluster.chips:
        report["cluster"] = _cluster(best, request.cluster.chips)
    return View("\n".join(_lines(asked, found, best)), report)


def load_report(load: Load, usd_per_chip_hour: float) -> dict[str, Any]:
    """A replica at full load as a JSON object."""
    replica, held = load.replica, room(load.replica)
    return {
        "replica_chips": replica.chips,
        "attention": replica.attention,
        "weights": replica.weights,
        "cache": replica.cache,
        "prompt_tokens": load.prompt,
        "output_tokens": load.output,
        "weight_bytes": replica.weight_bytes,
        "weight_bytes_per_chip": held.weights,
        "cache_bytes_per_sequence": cache_bytes(replica, load.prompt + load.output),
        "cache_room_bytes_per_chip": held.cache,
        "batch": load.batch,
        "step_s": load.step.seconds,
        "step_parts_s": {part.name: part.seconds for part in load.step.parts},
        "prefill_s": load.first.seconds,
        "prefill_chip_share": load.prefill_chip_s / load.request_chip_s,
        "bound": load.step.binding,
        "output_tokens_per_s_chip": load.output_tokens_per_s_chip,
        "seconds_per_answer": load.seconds_per_answer,
        "usd_per_million_input": load.usd_per_million_input(usd_per_chip_hour),
        "usd_per_million_output": load.usd_per_million_output(usd_per_chip_hour),
    }


def judged_report(found: Judged) -> dict[str, Any]:
    """How far published runs were from such predictions."""
    return {"low": found.low, "middle": found.middle, "high": found.high, "rows": found.rows}


def judged_line(found: Judged) -> str:
    """The same as a line."""
    return (
        f"published {found.rows} runs took {found.low:g} to {found.high:g} times what these "
        f"formulas say, {found.middle:g} in the middle ({found.about})"
    )


def _cluster(best: Load, chips: int) -> dict[str, float]:
    replicas = chips // best.replica.chips
    used = replicas * best.replica.chips
    return {
        "chips": chips,
        "replicas": replicas,
        "output_tokens_per_s": used * best.output_tokens_per_s_chip,
        "requests_per_s": used / best.request_chip_s,
    }


def _lines(asked: Asked, found: list[Load], best: Load) -> list[str]:
    replica, request = best.replica, asked.request
    each = cache_bytes(replica, best.prompt + best.output)
    lines = [
        f"serving   {format_count(request.run.params, 2)} in {replica.weights} is "
        f"{format_bytes(replica.weight_bytes)}; a request of {best.prompt:,.0f} + "
        f"{best.output:,.0f} tokens caches {format_bytes(each)}",
        *_table(asked, found),
        f"verdict   {_verdict(asked, best)}",
        judged_line(judged(model_kind(request.run.params, request.run.active_params))),
    ]
    if asked.assumed:
        lines.append(f"assumed   {'; '.join(asked.assumed)}")
    return lines


def _table(asked: Asked, found: list[Load]) -> list[str]:
    usd = asked.usd_per_chip_hour
    head = [
        "CHIPS",
        "SPLIT",
        "BATCH",
        "STEP",
        "PREFILL",
        "TOKENS/S/CHIP",
        "$/M IN",
        "$/M OUT",
        "BOUND BY",
    ]
    rows = [
        [
            f"{load.replica.chips}",
            load.replica.attention if load.replica.chips > 1 else "-",
            f"{load.batch:,}",
            f"{load.step.seconds * 1e3:.1f} ms",
            f"{load.first.seconds * 1e3:.0f} ms",
            f"{load.output_tokens_per_s_chip:,.0f}",
            f"{load.usd_per_million_input(usd):.3f}",
            f"{load.usd_per_million_output(usd):.2f}",
            load.step.binding,
        ]
        for load in found
    ]
    return columns(head, rows)


def _verdict(asked: Asked, best: Load) -> str:
    name, chips = asked.request.cluster.chip.name.upper(), best.replica.chips
    usd = asked.usd_per_chip_hour
    split = ", attention by data," if best.replica.attention == "data" else ""
    words = (
        f"replicas of {chips} {name}{split} serve {best.batch:,} requests at once, "
        f"${best.usd_per_million_input(usd):.3f} and ${best.usd_per_million_output(usd):.2f} for a "
        f"million tokens in and out at ${usd:.2f} an hour; {best.step.binding} binds; prompts take "
        f"{best.prefill_chip_s / best.request_chip_s:.0%} of the chips' time"
    )
    if not asked.request.cluster.chips:
        return words
    whole = _cluster(best, asked.request.cluster.chips)
    return f"{words}; {whole['replicas']} of them: {whole['output_tokens_per_s']:,.0f} tokens/s"
