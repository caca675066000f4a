"""Views of generation: serving, an evaluation, GRPO steps.

Serving shows replicas that hold the model, their speed, and the cost of tokens; an evaluation shows
answers and verdicts, chip-hours and dollars; GRPO the parts of a step, its bottleneck, and the cost
of all steps.
"""

from typing import Any

from sabia.core.plan.compute import model_kind
from sabia.core.plan.money.bills import cost_usd, short_money
from sabia.core.plan.output.report import fields
from sabia.core.plan.output.table import columns
from sabia.core.plan.output.view import View
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.serving.asked import (
    GrpoStep,
    ServingRequest,
    evaluation,
    generating_bytes,
    grpo_step,
    possible_loads,
)
from sabia.core.plan.serving.decode import cache_bytes
from sabia.core.plan.serving.evaluation import Bill, Evaluation
from sabia.core.plan.serving.formats import published_ratio
from sabia.core.plan.serving.traffic import Load, cheapest, chip_memory
from sabia.core.units import format_bytes, format_count, format_duration


def serve(request: PlanRequest) -> View:
    """Serve the request's model on its chip. Raises UsageError, Infeasible."""
    serving = ServingRequest(request)
    possible = possible_loads(serving)
    best, usd = cheapest(possible), serving.usd_per_chip_hour
    report = {
        "price_usd_per_chip_hour": usd,
        "replicas": [load_report(load, usd) for load in possible],
        "best": load_report(best, usd),
    }
    view = _view(serving, _model_kind(request), _serving_lines(serving, possible, best), report)
    if request.cluster.chips:
        view.report["cluster"] = _cluster(best, request.cluster.chips)
    return view


def _model_kind(request: PlanRequest) -> str:
    return model_kind(request.run.params, request.run.active_params)


def _view(serving: ServingRequest, kind: str, lines: list[str], report: dict[str, Any]) -> View:
    """Lines and figures, with the ratio of published runs to predictions, and assumptions."""
    published = published_ratio(kind)
    lines.append(
        f"published {published.rows} runs took {published.low:g} to {published.high:g} times the "
        f"predicted time, median {published.middle:g} ({published.about})"
    )
    if serving.assumed:
        lines.append(f"assumed   {'; '.join(serving.assumed)}")
    known_figures = {"published_over_predicted": fields(published, "low", "middle", "high", "rows")}
    return View("\n".join(lines), report | known_figures | {"assumed": serving.assumed})


def load_report(load: Load, usd_per_chip_hour: float) -> dict[str, Any]:
    """A replica at full load as a JSON object."""
    replica, held = load.replica, chip_memory(load.replica)
    return {
        "replica_chips": replica.chips,
        **fields(replica, "attention", "weights", "cache"),
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
        **fields(load, "output_tokens_per_s_chip", "seconds_per_answer"),
        "usd_per_million_input": load.usd_per_million_input(usd_per_chip_hour),
        "usd_per_million_output": load.usd_per_million_output(usd_per_chip_hour),
    }


def _cluster(best: Load, chips: int) -> dict[str, float]:
    replicas = chips // best.replica.chips
    used = replicas * best.replica.chips
    return {
        "chips": chips,
        "replicas": replicas,
        "output_tokens_per_s": used * best.output_tokens_per_s_chip,
        "requests_per_s": used / best.request_chip_s,
    }


def _serving_lines(serving: ServingRequest, possible: list[Load], best: Load) -> list[str]:
    replica, request = best.replica, serving.request
    each = cache_bytes(replica, best.prompt + best.output)
    return [
        f"serving   {format_count(request.run.params, 2)} in {replica.weights} is "
        f"{format_bytes(replica.weight_bytes)}; the KV cache of {best.prompt:,.0f} "
        f"+ {best.output:,.0f} tokens is {format_bytes(each)}",
        *_serving_table(serving, possible),
        f"verdict   {_serving_verdict(serving, best)}",
    ]


def _serving_table(serving: ServingRequest, possible: list[Load]) -> list[str]:
    usd = serving.usd_per_chip_hour
    head = ["CHIPS", "SPLIT", "BATCH", "STEP", "PREFILL", "TOKENS/S/CHIP", "$/M IN", "$/M OUT",
            "BOUND BY"]  # fmt: skip
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
        for load in possible
    ]
    return columns(head, rows)


def _serving_verdict(serving: ServingRequest, best: Load) -> str:
    name, chips = serving.request.cluster.chip.name.upper(), best.replica.chips
    usd = serving.usd_per_chip_hour
    split = ", attention by data," if best.replica.attention == "data" else ""
    words = (
        f"replicas of {chips} {name}{split} serve {best.batch:,} concurrent requests, "
        f"${best.usd_per_million_input(usd):.3f} and ${best.usd_per_million_output(usd):.2f} for a "
        f"million tokens in and out at ${usd:.2f} per hour; {best.step.binding} limits the speed; "
        f"prompts take {best.prefill_chip_s / best.request_chip_s:.0%} of the chips' time"
    )
    if not serving.request.cluster.chips:
        return words
    whole = _cluster(best, serving.request.cluster.chips)
    return f"{words}; {whole['replicas']} of them: {whole['output_tokens_per_s']:,.0f} tokens/s"


def evaluate(request: PlanRequest) -> View:
    """One evaluation of the request's model. Raises UsageError, Infeasible."""
    serving = ServingRequest(request)
    suite, result = evaluation(serving)
    usd = serving.usd_per_chip_hour
    report = {
        "items": suite.items,
        "answers": suite.answers,
        "price_usd_per_chip_hour": usd,
        "chip_hours": result.chip_hours,
        "api_usd": result.api_usd,
        "cost_usd": result.cost_usd(usd),
        "parts": [_bill(bill, usd) for bill in result.bills],
    }
    return _view(serving, _model_kind(request), _evaluation_lines(result, usd), report)


def _bill(bill: Bill, usd_per_chip_hour: float) -> dict[str, Any]:
    return {
        "part": bill.name,
        **fields(bill, "calls", "input_tokens", "output_tokens"),
        "chip_hours": bill.chip_s / 3600,
        "replica_chips": bill.load.replica.chips if bill.load else None,
        "cost_usd": bill.cost_usd(usd_per_chip_hour),
    }


def _evaluation_lines(evaluation: Evaluation, usd: float) -> list[str]:
    rows = [
        [
            bill.name,
            format_count(bill.calls),
            format_count(bill.input_tokens),
            format_count(bill.output_tokens),
            f"{bill.chip_s / 3600:,.1f}" if bill.load else "api",
            short_money(bill.cost_usd(usd)),
        ]
        for bill in evaluation.bills
    ]
    head = ["EVALUATION", "CALLS", "TOKENS IN", "TOKENS OUT", "CHIP-HOURS", "COST"]
    dearest = max(evaluation.bills, key=lambda bill: bill.cost_usd(usd))
    return [
        *columns(head, rows),
        f"verdict   {short_money(evaluation.cost_usd(usd))} per evaluation, "
        f"{evaluation.chip_hours:,.1f} chip-hours; {dearest.name} cost the most",
    ]


def grpo(request: PlanRequest) -> View:
    """Steps of GRPO on the request's model and chips. Raises UsageError, Infeasible."""
    serving = ServingRequest(request)
    grpo_result = grpo_step(serving)
    report = _grpo_report(serving, grpo_result)
    return _view(serving, "grpo", _grpo_lines(report, grpo_result), report)


def _grpo_report(serving: ServingRequest, grpo_result: GrpoStep) -> dict[str, Any]:
    step, drawn, replica, steps = (
        grpo_result.step,
        grpo_result.sampling,
        grpo_result.replica,
        serving.value("steps"),
    )
    usd, made = serving.usd_per_chip_hour, step.generation
    api_usd = grpo_result.verdicts.api_usd if grpo_result.verdicts else 0.0
    each = cost_usd(step.chip_s, usd) + api_usd
    context = drawn.prompt_tokens + drawn.lengths.mean
    generating = generating_bytes(replica, made.slots, context)
    apart = serving.settings.generation_chips or 0
    training = grpo_result.training_bytes
    return {
        "step_s": step.seconds,
        "parts_s": step.parts,
        "shares": step.shares,
        "bound": step.binding,
        "chips": step.chips,
        "generation_chips": apart or step.chips,
        "replica_chips": replica.chips,
        "replicas": made.replicas,
        "slots_per_replica": made.slots,
        "samples": drawn.samples,
        "tokens": drawn.tokens,
        "longest_answer_tokens": made.longest_tokens,
        "tail_s": made.tail_s,
        "training_mfu": grpo_result.training_mfu,
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


def _grpo_lines(report: dict[str, Any], grpo_result: GrpoStep) -> list[str]:
    step, drawn, replica = grpo_result.step, grpo_result.sampling, grpo_result.replica
    made = step.generation
    rows = [
        [name, f"{seconds:.1f} s", f"{step.shares[name]:.0%}"]
        for name, seconds in step.parts.items()
        if seconds
    ]
    rows.append(["step", f"{step.seconds:.1f} s", "100%"])
    held = (
        f"memory    {format_bytes(report['generating_bytes_per_chip'])} per chip to generate, "
        f"{format_bytes(report['training_bytes_per_chip'])} to train at "
        f"{grpo_result.training_mfu:.0%} MFU"
    )
    if report["peak_bytes_per_chip"]:
        held += "; one after the other, so the larger counts"
    return [
        f"grpo      {drawn.prompts} prompts x {drawn.group} answers of "
        f"{drawn.lengths.mean:,.0f} tokens, the longest {made.longest_tokens:,.0f}; "
        f"{format_count(drawn.tokens)} tokens a step",
        f"engines   {made.replicas} x {replica.chips} chips, {made.slots} concurrent answers each; "
        f"{made.tail_s:.0f} s with fewer than half of that",
        *_judge(report, grpo_result),
        *columns(["PART", "TIME", "SHARE"], rows),
        held,
        *(f"note      {note}" for note in step.notes),
        f"verdict   {step.chips} chips, {report['steps']:,} steps in "
        f"{format_duration(report['wall_s'])}, {short_money(report['cost_usd'])}; "
        f"bottleneck: {step.binding}",
    ]


def _judge(report: dict[str, Any], grpo_result: GrpoStep) -> list[str]:
    """A line about the judge's calls, if there is a judge."""
    if grpo_result.verdicts is None:
        return []
    (bill,) = grpo_result.verdicts.bills
    sizes = f"{bill.input_tokens / bill.calls:,.0f} + {bill.output_tokens / bill.calls:,.0f}"
    usd = short_money(bill.cost_usd(report["price_usd_per_chip_hour"]))
    return [f"judge     {bill.calls:,.0f} calls per step of {sizes} tokens, {usd}"]
