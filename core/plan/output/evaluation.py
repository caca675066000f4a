"""The view of an evaluation: answers and verdicts, chip-hours and dollars."""

from typing import Any

from sabia.core.plan.compute import model_kind
from sabia.core.plan.money.bills import short_money
from sabia.core.plan.output.serving import judged_line, judged_report
from sabia.core.plan.output.table import columns
from sabia.core.plan.output.view import View
from sabia.core.plan.request import Request
from sabia.core.plan.serving.asked import Asked, evaluation
from sabia.core.plan.serving.evaluation import Bill, Evaluation
from sabia.core.plan.serving.formats import judged
from sabia.core.units import format_count


def see(request: Request) -> View:
    """One evaluation of the request's model. Raises UsageError, Infeasible."""
    asked = Asked(request)
    suite, found = evaluation(asked)
    usd, run = asked.usd_per_chip_hour, request.run
    report = {
        "items": suite.items,
        "answers": suite.answers,
        "price_usd_per_chip_hour": usd,
        "chip_hours": found.chip_hours,
        "api_usd": found.api_usd,
        "cost_usd": found.cost_usd(usd),
        "parts": [_bill(bill, usd) for bill in found.bills],
        "published_over_predicted": judged_report(
            judged(model_kind(run.params, run.active_params))
        ),
        "assumed": asked.assumed,
    }
    return View("\n".join(_lines(asked, found, usd)), report)


def _bill(bill: Bill, usd_per_chip_hour: float) -> dict[str, Any]:
    return {
        "part": bill.name,
        "calls": bill.calls,
        "input_tokens": bill.input_tokens,
        "output_tokens": bill.output_tokens,
        "chip_hours": bill.chip_s / 3600,
        "replica_chips": bill.load.replica.chips if bill.load else None,
        "cost_usd": bill.cost_usd(usd_per_chip_hour),
    }


def _lines(asked: Asked, found: Evaluation, usd: float) -> list[str]:
    rows = [
        [
            bill.name,
            format_count(bill.calls),
            format_count(bill.input_tokens),
            format_count(bill.output_tokens),
            f"{bill.chip_s / 3600:,.1f}" if bill.load else "api",
            short_money(bill.cost_usd(usd)),
        ]
        for bill in found.bills
    ]
    head = ["EVALUATION", "CALLS", "TOKENS IN", "TOKENS OUT", "CHIP-HOURS", "COST"]
    run = asked.request.run
    dearest = max(found.bills, key=lambda bill: bill.cost_usd(usd))
    lines = [
        *columns(head, rows),
        f"verdict   {short_money(found.cost_usd(usd))} an evaluation, {found.chip_hours:,.1f} "
        f"chip-hours; {dearest.name} cost the most",
        judged_line(judged(model_kind(run.params, run.active_params))),
    ]
    if asked.assumed:
        lines.append(f"assumed   {'; '.join(asked.assumed)}")
    return lines
