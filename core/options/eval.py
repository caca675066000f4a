"""Options of `sabia eval`."""

import re

from sabia.core.errors import UsageError
from sabia.core.options.chat_template import ChatTemplate, Reasoning
from sabia.core.options.model_calls import JUDGED, ApiCalls, RubricJudge
from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    number,
    quantity,
    several,
    switch,
    text,
)
from sabia.core.options.shared import (
    Backend,
    Call,
    Drafting,
    InputOptions,
    Output,
    Redo,
    RowOptions,
    Seeded,
)
from sabia.core.shards.job import check_ending

TASKS = needs("task")
ANSWERS = needs("model", "answers")
CALLS = needs("judge_url", "judge", "model")
ENDPOINT = re.compile(r"([^/=]*=)?https?://")  # an endpoint as a value of --model


class EvalOptions(
    InputOptions, Output, Seeded, RubricJudge, ApiCalls, Redo, Call, ChatTemplate, Drafting,
    Reasoning,
    group="Tasks",
    only={ApiCalls: CALLS, Drafting: needs("model"), Reasoning: needs("model")},
):  # fmt: skip
    """Options of `sabia eval`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Score rows of earlier runs to compare with; - reads stdin"
    )
    """Their models are compared with each other and with those of this run."""
    out: str | None = changed(
        Output.out, help="Score rows: FILE.parquet, or - for stdout", metavar="FILE.parquet",
        only=ANSWERS,
    )  # fmt: skip
    """If the file has scores of the same tasks, models and options, they are not computed again."""
    report: str = text(
        "Write the report as an HTML page", "FILE.html", only=needs("inputs", "model", "answers"),
        recorded=False, group="Input and output", common=True,
    )  # fmt: skip
    """It contains charts, also over checkpoints (models whose names differ in the number at the
    end), tables, what calls have cost, and the items with their answers, without scripts and
    external files."""
    gate: str = text(
        "File of the largest falls allowed against a baseline", "FILE.toml|NAME",
        only=needs("inputs", "model", "answers"), recorded=False, group="Input and output",
        common=True,
    )  # fmt: skip
    """`baseline = "NAME"` and `[[rule]]` tables with `max_drop` and a pattern for one of
    `capability`, `task` and `rubric_item`; `*` makes a check of each. Optional: `metric`;
    `confidence` (0.95); `undecided = "fail"`; `repeats`, names of models that differ from the
    baseline by the seed only, whose largest difference is shown as noise; and `[capabilities]`,
    lists of tasks by name. `capabilities` is a gate that comes with sabia: none of a model named
    `original` may fall by more than 5 points. A check is red if a larger fall is shown, green if it
    is excluded, and else says how many items would tell. If one is red the exit code is 3."""
    contaminated: tuple[str, ...] = several(
        "Documents that hold items of the tasks, as dedup --decontaminate marks them", "FILE",
        only=needs("inputs", "model", "answers"), recorded=False, group="Input and output",
    )  # fmt: skip
    """Their column `contamination` names the items, whose scores are then shown apart from those of
    the others; with `--min-k` also how well its figures tell them from the others."""
    index: str = text(
        "Benchmark index for dedup --decontaminate: write or compare", "FILE.parquet",
        only=TASKS, recorded=False, group="Input and output",
    )  # fmt: skip
    """If the file does not exist it is written from the tasks; this needs no model. If it exists, a
    warning names the tasks that are not in it or have other items than it: training data was not
    cleaned of them. `--force` writes it again."""
    task: tuple[str, ...] = several(
        "Task file, folder of them, or a name",
        "FILE.toml|FILE.yaml|FOLDER[/NAME]|NAME",
        common=True,
        recorded=False,
    )
    """YAML files are tasks of lm-evaluation-harness, with their own meaning; a key that cannot be
    honoured is an error that names it. A file of a `group` stands for its tasks, which lie in its
    folder or below, and is reported with the mean that its `aggregate_metric_list` asks for.
    `FOLDER/NAME` is the task, the group or the `tag` of this name in the YAML files of a folder and
    below.
    `--json` has the results of YAML tasks also as lm-evaluation-harness writes them, in `lm_eval`
    by model. The names are `bluex`, `capabilities`, `capitu`, `enem`, `gpqa`, `gsm8k`, `harmbench`,
    `healthbench_br`, `humaneval`, `ifeval`, `magis_bench`, `marca`, `math`, `mbpp`, `mmlu_pro`,
    `oab_bench`, `pcdt_qa`, `poeta` (the 44 tasks of PoETa v2, and their normalised mean), `prosa`,
    `ruler` (13), `tiebe` and `xstest`: definitions that come with sabia, without data; give the
    authors' file or folder by `--data`, and without it learn which. One of several goes by its own
    name, as `ruler_vt`. Those of `poeta` ask and score as their authors do, from a clone of
    PoETaV2/PoETaV2 with the data.
    `capabilities` (function calls, maths, and a code in a long context, for models with a chat
    template) has its data."""
    data: tuple[str, ...] = several("Data of a task", "TASK=PATH", only=TASKS, recorded=False)
    """For a TOML task or a NAME: the file in place of its `data`, or the folder of one so named.
    For a YAML task: a Parquet or JSON lines file that has the rows of each split, or a folder with
    files named after the splits (`test.jsonl`, `test-00000-of-00001.parquet`). The name of a data
    set as TASK stands for all tasks that use it. The default is what the task names itself, or what
    a local cache of Hugging Face has; nothing is downloaded."""
    trust_task_code: bool = switch("Run the Python code that YAML tasks name", only=TASKS)
    """It is what their `!function` names: code of the file's author, with your rights."""
    shard: str | None = changed(
        RowOptions.shard, help="Items to score: slice I of N, the Slurm task's slice, or all",
        only=needs("model"),
    )  # fmt: skip
    """`1/4` scores every fourth item of each task, from the second on. With `auto`, each task of a
    Slurm array (or of `srun -n N`) scores a slice, and with `all` all items; each needs a file of
    its own in `-o`. The rows of all slices, as INPUT of a later call, give the report of the whole
    run; if those of a slice are missing, it is named and the exit code is 1."""
    limit: int = integer(
        "Number of items to take from each task", 0, least=0, unset="all", only=ANSWERS
    )
    """They are the first ones of its data."""
    model: tuple[str, ...] = several(
        "Model to evaluate: a directory, or an endpoint and model", "[LABEL=]DIR|URL#MODEL",
        only=TASKS, group="Model", common=True, recorded=False,
    )  # fmt: skip
    """A directory contains a model and its tokenizer. A URL is that of an OpenAI-compatible server,
    up to `/v1`, followed by `#` and the model's name there. `LABEL=` in front sets the name in the
    report."""
    chat: str = changed(ChatTemplate.chat, only=needs("model"))
    """A value that is JSON, such as `false` or `3`, has its type; any other is text. `date` is the
    date that the template's `strftime_now` gives, by default today's (UTC). A server gets the
    variables as `chat_template_kwargs`."""
    answers: tuple[str, ...] = several(
        "File of answers to score, instead of a model", "[NAME=]FILE", only=TASKS, group="Model"
    )
    """Each row has `id` or `item_id`, `response` (or `completion`, `text`, `answer`), and
    optionally `model`. `NAME=` in front names the model of rows without one; the default is the
    file's name."""
    backend: str = changed(Backend.backend, recorded=True, only=needs("model"), group="Model")
    mesh: str = text(
        "Devices per mesh axis, such as data=4 or fsdp=2,tensor=2", "AXIS=N,…",
        only=needs("model"), recorded=False, group="Model",
    )  # fmt: skip
    """The axes are `data` (each replica of the model has its own items), `fsdp` and `tensor`
    (models that need several devices: their weights are split as in training) and `expert`.
    torch: one process per device (`torchrun --nproc-per-node N -m sabia.cli.main eval
    --mesh data=N …`); the first one calls judges and endpoints and writes the rows, which are those
    of one process. All must have the same `--judge-cache`. JAX: one process; a CPU is presented as
    virtual devices. Answers in words are generated under torch, with `data` and `tensor` only; a
    quantized model is split over `tensor` only, each process keeping its part of what is
    stored."""
    dtype: str = choice(
        "Number format of models in directories", "float32", "bfloat16", only=needs("model"),
        group="Model",
    )  # fmt: skip
    min_k: float = quantity(
        "share", "Measure whether models have read the items: by this share of their tokens", 0.0,
        unset="not measured", only=needs("model"), group="Model",
    )  # fmt: skip
    """For each question, without examples, the mean log-probability of its least likely tokens
    (Min-K%; 20% is usual) and, of models in directories, of the same in standard deviations
    (Min-K%++). Endpoints must give the log-probabilities of prompts (`echo`); the first token of a
    text is not counted there. With the task's key `paraphrase` also the bits a byte that
    paraphrases have more than the question, with `canary` the bits of exposure of this text among
    255 of its form."""
    samples: int | None = integer(
        "Number of sampled answers to each item", None, least=1, unset="the task's",
        only=needs("model"), group="Sampling",
    )  # fmt: skip
    temperature: float | None = number(
        "Sampling temperature; 0 is greedy", None, least=0, unset="the task's",
        only=needs("model"), group="Sampling",
    )  # fmt: skip
    best_of: bool = switch(
        "Have the judge grade the samples, and score the one it likes best", only=JUDGED,
        group="Sampling",
    )  # fmt: skip
    """For tasks with right answers and several samples an item: the judge, which does not see the
    right answer, gives each sample points. The table and the chart of samples then show best@k, the
    share of items of which the best graded of k samples is right, beside pass@k and majority@k."""
    seed: int = changed(Seeded.seed, only=ANSWERS)
    judge_url: tuple[str, ...] = changed(RubricJudge.judge_url, only=ANSWERS)
    judge: str = changed(RubricJudge.judge, only=ANSWERS)
    judge_labels: str = text(
        "Verdicts of people on some answers, to correct the judge's scores", "FILE",
        only=needs("inputs", "model", "answers"), recorded=False, group="Judge",
    )  # fmt: skip
    """Rows (JSON lines, JSON, CSV or Parquet) with `item_id` and `verdict` (met or unmet, or
    points), and `task`, `model`, `sample` and the rubric's `item` where there are several. The
    report then has the judge's sensitivity and specificity, and scores corrected by
    prediction-powered inference with their intervals (arXiv 2601.05420): of the answers all of
    whose rubric items have a label, which must be a random part of all."""
    judge_cache: str = changed(RubricJudge.judge_cache, only=CALLS)
    """Finished calls to endpoints of `--model`, and what models in directories have computed, are
    cached there too, as they come: after a kill the same command computes only the rest. `--force`
    computes the results of models in directories again."""
    max_unknown: float = changed(RubricJudge.max_unknown, only=ANSWERS)
    max_missing: float = quantity(
        "share", "Fraction of a task's samples without a score, above which the exit code is 1",
        0.0, recorded=False, only=ANSWERS, group="Sampling",
    )  # fmt: skip
    """A sample has no score if it has no answer (the text ends inside of the reasoning, a server
    refuses the request, a file of answers lacks the item) or no verdict. It is not counted as
    wrong; the report shows the value if all such samples were wrong, and if all were right. The
    rows are written in either case."""

    def check(self) -> None:
        """Refuse options that apply to no model of this call. UsageError."""
        super().check()
        check_ending(self.out, "--out")
        endpoints = [bool(ENDPOINT.match(model)) for model in self.model]
        if not (self.judge_url or self.judge or any(endpoints)):
            self.refuse(ApiCalls.table, "only with --judge-url or an endpoint as --model")
        if all(endpoints):
            of_directories = ("backend", "dtype", *Drafting.table)
            self.refuse(of_directories, "only with a model directory as --model")
        if not (self.task or self.inputs):
            raise UsageError("--task: is missing (expected it, or score rows as INPUT)")
        if self.task and not (self.model or self.answers or self.index):
            raise UsageError("--model: is missing (expected it, or --answers, with --task)")
        divided = self.shard not in (None, "all")
        for flag, given in (("--gate", self.gate), ("--answers", self.answers)):
            if divided and given:
                raise UsageError(f"{flag}: not with --shard, but in a call with all rows as INPUT")
        if self.index and not self.index.endswith(".parquet"):
            raise UsageError(f"--index: {self.index} (expected a file ending in .parquet)")
