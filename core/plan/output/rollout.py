"""The view of GRPO: a step by its parts, what binds it, and the bill of all steps."""

from typing import Any

from sabia.core.plan.money.bills import cost_usd, short_money
from sabia.core.plan.output.serving import judged_line, judged_report
from sabia.core.plan.output.table import columns
from sabia.core.plan.output.view import View
from sabia.core.plan.request import Request
from sabia.core.plan.serving.asked import Asked, AskedStep, generating_bytes, grpo_step
from sabia.core.plan.serving.formats import judged
from sabia.core.plan.serving.rollout import peak_memory
from sabia.core.units import format_bytes, format_count, format_duration


def see(request: Request) -> View:
    """Steps of GRPO on the request's model and chips. Raises UsageError, Infeasible."""
    asked = Asked(request)
    found = grpo_step(asked)
    report = _report(asked, found)
    lines = _lines(report, found)
    if asked.assumed:
        lines.append(f"assumed   {'; '.join(asked.assumed)}")
    return View("\n".join(lines), report | {"assumed": asked.assumed})


def _report(asked: Asked, found: AskedStep) -> dict[str, Any]:
    step, drawn, replica, steps = found.step, found.sampling, found.replica, asked.value("steps")
    usd, made = asked.usd_per_chip_hour, step.generation
    api_usd = found.verdicts.api_usd if found.verdicts else 0.0
    each = cost_usd(step.chip_s, usd) + api_usd
    context = drawn.prompt_tokens + drawn.lengths.mean
    generating = generating_bytes(replica, made.slots, context)
    apart = asked.settings.generation_chips or 0
    training = found.training_bytes
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
        "training_mfu": found.training_mfu,
        "generating_bytes_per_chip": generating,
        "training_bytes_per_chip": training,
        "peak_bytes_per_chip": peak_memory(generating, training) if not apart else None,
        "price_usd_per_chip_hour": usd,
        "judge_usd_per_step": api_usd,
        "cost_usd_per_step": each,
        "steps": steps,
        "cost_usd": each * steps,
        "chip_hours": step.chip_s * steps / 3600,
        "wall_s": step.seconds * steps,
        "notes": list(step.notes),
        "published_over_predicted": judged_report(judged("grpo")),
    }


def _lines(report: dict[str, Any], found: AskedStep) -> list[str]:
    step, drawn, replica = found.step, found.sampling, found.replica
    made = step.generation
    rows = [
        [name, f"{seconds:.1f} s", f"{step.shares[name]:.0%}"]
        for name, seconds in step.parts.items()
        if seconds
    ]
    rows.append(["step", f"{step.seconds:.1f} s", "100%"])
    held = (
        f"memory    {format_bytes(report['generating_bytes_per_chip'])} a chip to generate, "
        f"{format_bytes(report['training_bytes_per_chip'])} to train at "
        f"{found.training_mfu:.0%} MFU"
    )
    if report["peak_bytes_per_chip"]:
        held += "; in turn, so the larger counts"
    return [
        f"grpo      {drawn.prompts} prompts x {drawn.group} answers of "
        f"{drawn.lengths.mean:,.0f} tokens, the longest {made.longest_tokens:,.0f}; "
        f"{format_count(drawn.tokens)} tokens a step",
        f"engines   {made.replicas} x {replica.chips} chips, {made.slots} answers at once in each; "
        f"{made.tail_s:.0f} s with fewer than half of them",
        *_judge(report, found),
        *columns(["PART", "TIME", "SHARE"], rows),
        held,
        *(f"note      {note}" for note in step.notes),
        f"verdict   {step.chips} chips, {report['steps']:,} steps in "
        f"{format_duration(report['wall_s'])}, {short_money(report['cost_usd'])}; "
        f"{step.binding} binds",
        judged_line(judged("grpo")),
    ]


def _judge(report: dict[str, Any], found: AskedStep) -> list[str]:
    """A line on the judge's calls, if there is one."""
    if found.verdicts is None:
        return []
    (bill,) = found.verdicts.bills
    sizes = f"{bill.input_tokens / bill.calls:,.0f} + {bill.output_tokens / bill.calls:,.0f}"
    usd = short_money(bill.cost_usd(report["price_usd_per_chip_hour"]))
    return [f"judge     {bill.calls:,.0f} calls a step of {sizes} tokens, {usd}"]
