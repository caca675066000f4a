"""Views of generation: serving, an evaluation, GRPO steps.

Serving shows replicas that hold the model, their speed, and the cost of tokens; an evaluation shows
answers and verdicts, chip-hours and dollars; GRPO the parts of a step, its bottleneck, and the cost
of all steps.
"""

import math
from dataclasses import replace
from typing import Any

from sabia.core.plan.money.prices import cost_usd
from sabia.core.plan.output.report import View, fields
from sabia.core.plan.output.table import Cell, columns, table_of, words
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.serving import asked
from sabia.core.plan.serving.asked import GrpoStep, ServingRequest
from sabia.core.plan.serving.decode import cache_bytes, published_ratio
from sabia.core.plan.serving.traffic import Load, cache_room, cheapest, workspace_bytes

LOADS: dict[str, Cell] = {
    "CHIPS": "{replica_chips}",
    "SPLIT": lambda load: load["attention"] if load["replica_chips"] > 1 else "-",
    "BATCH": "{batch:,}",
    "STEP": lambda load: f"{load['step_s'] * 1e3:.1f} ms",
    "PREFILL": lambda load: f"{load['prefill_s'] * 1e3:.0f} ms",
    "TOKENS/S/CHIP": "{output_tokens_per_s_chip:,.0f}",
    "$/M IN": "{usd_per_million_input:.3f}",
    "$/M OUT": "{usd_per_million_output:.2f}",
    "BOUND BY": "{bound}",
}
BILLS: dict[str, Cell] = {
    "EVALUATION": "{part}",
    "CALLS": "{calls:count}",
    "TOKENS IN": "{input_tokens:count}",
    "TOKENS OUT": "{output_tokens:count}",
    "CHIP-HOURS": lambda bill: f"{bill['chip_hours']:,.1f}" if bill["replica_chips"] else "api",
    "COST": "{cost_usd:money}",
}


def serve(request: PlanRequest) -> View:
    """Serve the request's model on its chip. Raises UsageError, Infeasible."""
    serving, chips = ServingRequest(request), request.cluster.chips
    possible = asked.possible_loads(serving)
    best, usd = cheapest(possible), serving.usd_per_chip_hour
    replica, chosen, cluster = best.replica, load_report(best, usd), dict[str, Any]()
    replicas = [load_report(load, usd) for load in possible]
    report: dict[str, Any] = {"price_usd_per_chip_hour": usd, "replicas": replicas, "best": chosen}
    settings, test_time = serving.settings, list[str]()
    if settings.requests:
        busy = math.ceil(settings.requests * best.request_chip_s / replica.chips * (1 - 1e-12))
        chips = busy * replica.chips
    if settings.thinking_tokens or settings.samples:
        test_time, report["test_time"] = _test_time(serving, best, usd)
    if chips:
        used = chips // replica.chips * replica.chips
        cluster["cluster"] = {
            "chips": chips,
            "replicas": chips // replica.chips,
            "output_tokens_per_s": used * best.output_tokens_per_s_chip,
            "requests_per_s": used / best.request_chip_s,
            "usd_per_hour": usd * chips,
        }
    given = {
        "chip": request.cluster.chip.name.upper(),
        "split": ", attention by data," if replica.attention == "data" else "",
        "cluster": words("serving_cluster", cluster["cluster"]) if cluster else "",
    }
    head = words("serving", chosen, params=request.run.params)
    verdict = words("serving_verdict", chosen, usd=usd, **given)
    lines = [head, *table_of(LOADS, replicas), *test_time, verdict]
    view = _view(serving, request.run.kind, lines, report)
    return View(view.text, view.report | cluster)


def _test_time(
    serving: ServingRequest, best: Load, usd: float
) -> tuple[list[str], dict[str, float]]:
    """A request with thinking and samples, beside one answer without either."""
    plain = serving.settings.replace(thinking_tokens=None, samples=None)
    alone = ServingRequest(replace(serving.request, settings=plain))
    once = cheapest(asked.possible_loads(alone))
    each_usd, once_usd = (cost_usd(load.request_chip_s, usd) for load in (best, once))
    figures = {
        "samples": float(best.samples),
        "generated_tokens_per_sample": best.output,
        "usd_per_request": each_usd,
        "usd_per_plain_request": once_usd,
        "times_plain": best.request_chip_s / once.request_chip_s,
        "seconds_per_answer": best.seconds_per_answer,
        "plain_seconds_per_answer": once.seconds_per_answer,
    }
    thinking = serving.settings.thinking_tokens or 0
    line = words("test_time", figures, thinking=thinking, output=once.output)
    return [line], figures


def _view(serving: ServingRequest, kind: str, lines: list[str], report: dict[str, Any]) -> View:
    """Lines and figures, with the ratio of published runs to predictions, and assumptions."""
    published = published_ratio(kind)
    wide = "" if published.is_band else "; too wide to plan by"
    lines.append(words("published", published=published, wide=wide))
    if serving.assumed:
        lines.append(f"assumed   {'; '.join(serving.assumed)}")
    known_figures = {"published_over_predicted": fields(published, "low middle high rows")}
    return View("\n".join(lines), report | known_figures | {"assumed": serving.assumed})


def load_report(load: Load, usd_per_chip_hour: float) -> dict[str, object]:
    """A replica at full load as a JSON object."""
    return {
        **fields(load, "replica_chips=replica.chips replica.attention replica.weights"),
        **fields(load, "replica.cache prompt_tokens=prompt output_tokens=output"),
        "weight_bytes": load.replica.weight_bytes,
        "weight_bytes_per_chip": load.replica.chip_weight_bytes,
        "cache_bytes_per_sequence": cache_bytes(load.replica, load.prompt + load.output),
        "cache_room_bytes_per_chip": cache_room(load.replica),
        **fields(load, "batch step_s=step.seconds"),
        "step_parts_s": {part.name: part.seconds for part in load.step.parts},
        **fields(load, "prefill_s=first.seconds prefill_chip_share bound=step.binding"),
        **fields(load, "output_tokens_per_s_chip seconds_per_answer"),
        "usd_per_million_input": load.usd_per_million_input(usd_per_chip_hour),
        "usd_per_million_output": load.usd_per_million_output(usd_per_chip_hour),
    }


def evaluate(request: PlanRequest) -> View:
    """One evaluation of the request's model. Raises UsageError, Infeasible."""
    serving = ServingRequest(request)
    suite, result = asked.evaluation(serving)
    usd, total_usd = serving.usd_per_chip_hour, result.cost_usd(serving.usd_per_chip_hour)
    parts = [
        {
            "part": bill.name,
            **fields(bill, "calls input_tokens output_tokens"),
            "chip_hours": bill.chip_s / 3600,
            "replica_chips": bill.load.replica.chips if bill.load else None,
            "cost_usd": bill.cost_usd(usd),
        }
        for bill in result.bills
    ]
    dearest = max(parts, key=lambda part: part["cost_usd"])
    report = {
        **fields(suite, "items answers"),
        "price_usd_per_chip_hour": usd,
        **fields(result, "chip_hours api_usd"),
        "cost_usd": total_usd,
        "parts": parts,
    }
    lines = [*table_of(BILLS, parts), words("evaluation", report, dearest=dearest["part"])]
    return _view(serving, request.run.kind, lines, report)


def grpo(request: PlanRequest) -> View:
    """Steps of GRPO on the request's model and chips. Raises UsageError, Infeasible."""
    serving = ServingRequest(request)
    planned, usd = asked.grpo_step(serving), serving.usd_per_chip_hour
    step, drawn, replica = planned.step, planned.sampling, planned.replica
    made, steps = step.generation, serving.value("steps")
    api_usd = planned.verdicts.api_usd if planned.verdicts else 0.0
    each = cost_usd(step.chip_s, usd) + api_usd
    context = drawn.prompt_tokens + drawn.lengths.mean
    generating = replica.chip_weight_bytes + workspace_bytes(replica)
    generating += made.slots * cache_bytes(replica, context, on_chip=True)
    apart, training = serving.settings.generation_chips or 0, planned.training_bytes
    report = {
        **fields(step, "step_s=seconds parts_s=parts shares bound=binding chips"),
        "generation_chips": apart or step.chips,
        "replica_chips": replica.chips,
        **fields(made, "replicas slots_per_replica=slots"),
        **fields(drawn, "samples tokens"),
        **fields(made, "longest_answer_tokens=longest_tokens tail_s"),
        "training_mfu": planned.training_mfu,
        "generating_bytes_per_chip": generating,
        "training_bytes_per_chip": training,
        "peak_bytes_per_chip": None if apart else max(generating, training),
        "price_usd_per_chip_hour": usd,
        "judge_usd_per_step": api_usd,
        "cost_usd_per_step": each,
        "steps": steps,
        "cost_usd": each * steps,
        "chip_hours": step.chip_s * steps / 3600,
        "wall_s": step.seconds * steps,
        "notes": list(step.notes),
    }
    return _view(serving, "grpo", _grpo_lines(report, planned), report)


def _grpo_lines(report: dict[str, Any], planned: GrpoStep) -> list[str]:
    step, drawn, made = planned.step, planned.sampling, planned.step.generation
    lines = [words("grpo", drawn=drawn, made=made)]
    lines.append(words("engines", made=made, chips=planned.replica.chips))
    if planned.verdicts is not None:
        (bill,) = planned.verdicts.bills
        read, written = bill.input_tokens / bill.calls, bill.output_tokens / bill.calls
        usd = bill.cost_usd(report["price_usd_per_chip_hour"])
        lines.append(words("judge", bill=bill, read=read, written=written, usd=usd))
    rows = [[name, f"{s:.1f} s", f"{step.shares[name]:.0%}"] for name, s in step.parts.items() if s]
    rows.append(["step", f"{step.seconds:.1f} s", "100%"])
    alternate = "; one after the other, so the larger counts"
    alternate = alternate if report["peak_bytes_per_chip"] else ""
    return [
        *lines,
        *columns(["PART", "TIME", "SHARE"], rows),
        words("grpo_memory", report, alternate=alternate),
        *(f"note      {note}" for note in step.notes),
        words("grpo_verdict", report),
    ]
