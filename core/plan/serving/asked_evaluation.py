"""From settings to a suite, its judge and what an evaluation costs."""

from sabia.core.errors import UsageError
from sabia.core.plan.counting.assumed import assumed_architecture
from sabia.core.plan.serving.asked import Asked, asked_loads
from sabia.core.plan.serving.evaluation import Evaluation, Source, Suite, api_price, evaluate
from sabia.core.plan.serving.traffic import cheapest, loads


def evaluation(asked: Asked) -> tuple[Suite, Evaluation]:
    """One evaluation as asked."""
    suite = suite_of(asked, asked.value("items"), asked.value("repeats"))
    if asked.settings.api_price is not None:
        source: Source = api_price(asked.settings.api_price.split(","), "--api-price")
    else:
        source = cheapest(asked_loads(asked)).replica
    return suite, evaluate(suite, source, judge(asked))


def suite_of(asked: Asked, items: float, repeats: float) -> Suite:
    """`items` answered `repeats` times, and the calls of a judge where one was asked for."""
    return Suite(
        items,
        asked.value("prompt_tokens"),
        asked.value("output_tokens"),
        repeats,
        asked.value("judge_calls"),
        asked.value("judge_prompt_tokens") if asked.settings.judge_calls else 0,
        asked.value("judge_output_tokens") if asked.settings.judge_calls else 0,
    )


def judge(asked: Asked) -> Source | None:
    """An API by --judge-price, own chips by --judge-params; None without --judge-calls."""
    settings = asked.settings
    if not settings.judge_calls:
        return None
    if settings.judge_price is None and settings.judge_params is None:
        raise UsageError(
            "--judge-calls: no judge is given (expected --judge-price or --judge-params)"
        )
    if settings.judge_price is not None:
        return api_price(settings.judge_price.split(","), "--judge-price")
    assert settings.judge_params is not None
    model = assumed_architecture(
        settings.judge_params, settings.judge_active or settings.judge_params
    )
    prompt, output = asked.value("judge_prompt_tokens"), asked.value("judge_output_tokens")
    chip, weights = asked.request.cluster.chip, asked.value("weights")
    return cheapest(loads(model, chip, prompt, output, weights=weights)).replica
