"""Options of `sabia eval`."""

import re

from sabia.core.errors import UsageError
from sabia.core.options.calls import ApiCalls, RubricJudge
from sabia.core.options.option import changed, choice, integer, needs, number, several, text
from sabia.core.options.shared import Backend, Call, InputOptions, Output, Redo, Seeded

TASKS = needs("task")
ANSWERS = needs("model", "answers")
CALLS = needs("judge_url", "model")
ENDPOINT = re.compile(r"([^/=]*=)?https?://")  # a value of --model that is no directory


class EvalOptions(
    InputOptions, Output, Seeded, RubricJudge, ApiCalls, Redo, Call, group="Tasks",
    only={ApiCalls: CALLS},
):  # fmt: skip
    """Options of `sabia eval`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Score rows of earlier runs to compare with; - reads stdin"
    )
    out: str | None = changed(
        Output.out,
        help="Score rows: FILE.parquet, or - (stdout)",
        metavar="FILE.parquet",
        only=ANSWERS,
    )
    """Scores that are already there, made from the same, are not computed again."""
    report: str = text(
        "Write the report as a page", "FILE.html", only=needs("inputs", "model", "answers"),
        recorded=False, group="Input and output", common=True,
    )  # fmt: skip
    """Charts, tables and the items that changed; no script, nothing fetched."""
    index: str = text(
        "Index of items for dedup --decontaminate: written, or compared", "FILE.parquet",
        only=TASKS, recorded=False, group="Input and output",
    )  # fmt: skip
    """Where the file is missing it is written from the tasks (no model is needed for that). Where
    it is there, tasks that are not in it or have other items than it are named, for the corpus was
    then not cleaned of them. `--force` writes it anew."""
    task: tuple[str, ...] = several("Task to evaluate", "FILE.toml", common=True, recorded=False)
    limit: int = integer("Items to take of each task", 0, least=0, unset="all", only=ANSWERS)
    model: tuple[str, ...] = several(
        "Model directory, or endpoint and model name", "[NAME=]DIR|URL#NAME", only=TASKS,
        group="Model", common=True, recorded=False,
    )  # fmt: skip
    """A directory holds a model and its tokenizer. A URL is that of an OpenAI-compatible server, up
    to `/v1`, followed by `#` and the name of its model. `NAME=` in front says what the report calls
    it."""
    answers: tuple[str, ...] = several(
        "Answers to score, written before", "[NAME=]FILE", only=TASKS, group="Model"
    )
    """Rows with `id` or `item_id`, `response` (or `completion`, `text`, `answer`), and perhaps
    `model`. `NAME=` in front names a model for rows that do not."""
    backend: str = changed(Backend.backend, recorded=True, only=needs("model"), group="Model")
    """It computes log-likelihoods; generation runs on torch."""
    dtype: str = choice(
        "Number format of local models", "float32", "bfloat16", only=needs("model"), group="Model"
    )
    samples: int | None = integer(
        "Answers to each item", None, least=1, unset="the task's", only=needs("model"),
        group="Sampling",
    )  # fmt: skip
    temperature: float | None = number(
        "Sampling temperature", None, least=0, unset="the task's", only=needs("model"),
        group="Sampling",
    )  # fmt: skip
    seed: int = changed(Seeded.seed, only=ANSWERS)
    judge_url: str = changed(RubricJudge.judge_url, only=ANSWERS)
    judge_cache: str = changed(RubricJudge.judge_cache, only=CALLS)
    """Finished calls of endpoints in `--model` are kept there too."""
    max_unknown: float = changed(RubricJudge.max_unknown, only=ANSWERS)

    def check(self) -> None:
        """Refuse what no model of this call takes. UsageError."""
        super().check()
        endpoints = [bool(ENDPOINT.match(model)) for model in self.model]
        calls = self.judge_url or any(endpoints)
        for name in self.table.keys() & self.given:
            flag = self.table[name].flag
            if name in (*ApiCalls.table, "judge_cache") and not calls:
                raise UsageError(f"{flag}: only with --judge-url or an endpoint as --model")
            if name in ("backend", "dtype") and all(endpoints):
                raise UsageError(f"{flag}: only with a model directory as --model")
        if not (self.task or self.inputs):
            raise UsageError("--task: is missing (expected it, or score rows as INPUT)")
        if self.task and not (self.model or self.answers or self.index):
            raise UsageError("--model: is missing (expected it, or --answers, with --task)")
        if self.index and not self.index.endswith(".parquet"):
            raise UsageError(f"--index: {self.index} (expected a file ending in .parquet)")
