"""A benchmark task as a TOML file; an unknown key is an error that names it.

A task defines its rows, the prompt of a row, the right answer and how answers are scored. Templates
are Jinja (sandboxed; an undefined name is an error); keys that name a column (id, answer, choices,
text, rubric, maximum) may hold a template instead. Paths are relative to the file, or URLs. A file
of several tasks has a table `[tasks.NAME]` for each, whose keys stand before those of the file.
"""

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from sabia.core.bench.harness.yaml_file import YamlTask
from sabia.core.bench.statistics import finite
from sabia.core.errors import UsageError
from sabia.core.files import read_toml
from sabia.core.judge.verifiers import VERIFIERS
from sabia.core.shards.stores import mirrors

Kind = Literal["multiple_choice", "exact_match", "rubric", "perplexity", "loglikelihood"]
KINDS = ("multiple_choice", "exact_match", "rubric", "perplexity")
NORMALIZERS = ("case", "punctuation", "accents", "articles", "digit_groups")
SAMPLERS = ("first", "random", "sequence")
SCORINGS = ("items", "points", "pairs")
GRADED = ("turns", "conversation")
TOOLS = ("lookup", "python")
SPLITS = ("development", "held-out")
PICKS = ("first", "last")
METRICS_OF_REFUSALS = ("refusal", "over_refusal")
METRICS_OF_CHECKS = ("exact_match,loose", "checks", "checks,loose")
METRICS_OF_LABELS = ("f1_macro", "pearson")
METRICS_OF = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes"),
    "exact_match": ("exact_match", "f1", *METRICS_OF_LABELS, "conversation", *METRICS_OF_CHECKS),
    "rubric": ("share", "points", *METRICS_OF_REFUSALS, "win_rate"),
    "perplexity": ("bits_per_byte", "byte_perplexity", "word_perplexity", "token_perplexity"),
}
_PROMPTED, _GENERATED = KINDS[:3], KINDS[1:3]
# keys that act in some kinds of tasks only
KEYS_OF_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("prompt", "system", "chat", "delimiter", "separator"), _PROMPTED),
    **dict.fromkeys(("shots", "shots_data", "shots_sampler", "target"), _PROMPTED),
    **dict.fromkeys(("shots_where", "heading"), _PROMPTED),
    **dict.fromkeys(("max_new_tokens", "temperature", "top_p", "samples", "stop"), _GENERATED),
    **dict.fromkeys(("turns", "graded", "tools", "max_steps"), _GENERATED),
    **dict.fromkeys(("lookup", "lookup_key", "lookup_text", "lookup_about"), _GENERATED),
    **dict.fromkeys(("extract", "extract_pick", "normalize", "verifier"), ("exact_match",)),
    **dict.fromkeys(("checks", "check_arguments", "labels", "references"), ("exact_match",)),
    **dict.fromkeys(("rubric", "scoring", "maximum"), ("rubric",)),
    **dict.fromkeys(("group", "guessing"), ("multiple_choice", "exact_match")),
    "choices": ("multiple_choice",),
    "answer": ("multiple_choice", "exact_match"),
    "text": ("perplexity",),
}


@dataclass(frozen=True)
class Task:
    """One task; fields are the keys of the file.

    prompt: template of the question; without it rows carry `messages`. chat: prompt and shots go
    through the chat template (always so for messages). target: template of the answer of a shot.
    data: a file, a pattern of names, or FOLDER/@SPLIT, a split of a data set by the names of its
    files. source: where the data come from, for messages. rows: column or template of the list of
    rows in each object that is read, or names of columns with dots between them: lists in the
    elements of lists, whose rows have the values of all of these.
    where: a Jinja expression that rows must satisfy. metric: the headline metric of the report.
    capability: tasks of the same one are also reported together. group: tasks of the same one are
    also reported with the mean of (value - guessing) / (1 - guessing): guessing is the value that
    guesses have. cluster: column or template of
    what items have in common (a text, an author), so that they are not independent. split: a
    held-out task has its scorings counted. paraphrase: column or template of other wordings of the
    question (one, or a list), and canary: a text with a code that all files of the data have, for
    eval --min-k.

    references: column or template of a list of right answers; that with the best score counts, and
    `answer` is the one that examples show.
    shots_sampler: `random` draws the examples of an item by its id, without the item; `sequence`
    shuffles the rows and then draws the examples of each item in turn, by one generator of the seed
    42 (+ --seed), as lm-evaluation-harness did before 0.4. shots_where: what examples must satisfy,
    in place of `where`; it may name `item`, the row that is asked. heading: template before each
    example and the question, which names its `number`. labels: the answers that the metric f1_macro
    is the mean of, or the ends of the scale of pearson, which an answer that is no number stands
    furthest apart on: the lowest for the answer, the highest for the reference.

    joined: a JSON file beside the data, or in a folder above, that templates name `joined`: an
    object, or rows, of which the one is taken that has the row's value in the column `joined_on`.
    each: column or template of a list that gives an item for each element, which templates name
    `each` (and `each_number`).
    turns: column or template of the list of a user's turns, `turn` (and `turn_number`) in
    templates; the model's own answers stand between them. Each turn is an item, or all are one
    whose answers are graded together (graded = "conversation"). tools: what the model may call in
    at most `max_steps` steps before each answer: `python` (a program in the sandbox, which reads
    what it printed) and `lookup` (rows of a Parquet file, see `core.judge.lookup`).

    checks: column
    or template of names of instruction checks (`instruction_checks`) or verifiers, which an answer
    must all pass in place of a comparison with `answer`; check_arguments: that of their arguments,
    one object each (a verifier's is its `reference`). yaml: the task
    file of lm-evaluation-harness that it was made of, which then decides prompts and metrics.
    """

    name: str
    kind: Kind
    data: str
    source: str = ""
    rows: str = ""
    id: str = "id"
    description: str = ""
    capability: str = ""
    group: str = ""
    guessing: float = 0.0
    cluster: str = ""
    split: str = "development"
    joined: str = ""
    joined_on: str = ""
    each: str = ""
    turns: str = ""
    graded: str = "turns"
    tools: tuple[str, ...] = ()
    max_steps: int = 8
    lookup: str = ""
    lookup_key: str = "id"
    lookup_text: str = "text"
    lookup_about: str = ""
    paraphrase: str = ""
    canary: str = ""
    where: str = ""
    limit: int = 0
    prompt: str = ""
    system: str = ""
    chat: bool = False
    delimiter: str = " "
    choices: tuple[str, ...] | str = ""
    answer: str = "answer"
    target: str = ""
    references: str = ""
    shots: int = 0
    shots_data: str = ""
    shots_sampler: str = "first"
    shots_where: str = ""
    heading: str = ""
    separator: str = "\n\n"
    metric: str = ""
    extract: str = ""
    extract_pick: Literal["first", "last"] = "last"
    normalize: tuple[str, ...] = ()
    verifier: str = "exact"
    checks: str = ""
    check_arguments: str = ""
    labels: tuple[str, ...] = ()
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    stop: tuple[str, ...] = ()
    rubric: str = "rubric"
    scoring: str = "items"
    maximum: str = "maximum"
    text: str = "text"
    path: str = field(default="", compare=False)
    yaml: YamlTask | None = None

    @property
    def generates(self) -> bool:
        """True if the model generates text."""
        return self.kind in ("exact_match", "rubric")

    def resolve(self, name: str) -> Path:
        """The local path of a file that the task's names: a URL, or relative to it."""
        return mirrors.beside(self.path, name)

    @property
    def lookup_path(self) -> Path:
        """The file of the tool `lookup`: beside the data where these are elsewhere."""
        beside = self.resolve(self.data).parent / self.lookup
        return beside if beside.exists() else self.resolve(self.lookup)


def load_tasks_of(path: str, option: str = "--task") -> list[Task]:
    """The tasks of a TOML file that an option names; raises UsageError for an invalid file."""
    keys = read_toml(option, path)
    tables = keys.pop("tasks", None)
    if tables is None:
        return [task_from(keys, path)]
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UsageError(f"{option}: {path}: tasks = {tables!r:.40} (expected [tasks.NAME] tables)")
    return [task_from({**keys, **table, "name": name}, path) for name, table in tables.items()]


def task_from(values: dict[str, Any], path: str = "") -> Task:
    """The task of a dictionary of keys."""
    where = path or "task"
    known = {f.name for f in fields(Task)} - {"path", "yaml"}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{where}: no key {key!r} in a task{hint}")
    for key in ("name", "kind", "data"):
        if key not in values:
            raise UsageError(f"{where}: no {key} (expected name, kind and data in every task)")
    lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    defaults = {f.name: f.default for f in fields(Task)}
    for key, value in lists.items():
        default = defaults[key] if isinstance(defaults[key], bool | int | float | tuple) else ""
        wanted = (int, float) if isinstance(default, float) else type(default)
        fits = isinstance(value, wanted) and isinstance(value, bool) is isinstance(default, bool)
        if not fits and not (key == "choices" and isinstance(value, tuple)):
            kind = "list" if isinstance(default, tuple) else type(default).__name__
            raise UsageError(f"{where}: {key} = {value!r} (expected a {kind})")
    task = Task(**lists, path=path)
    _check(task, values.keys(), where)
    _check_that_all_act(task, values.keys(), where)
    return task


def _check(task: Task, given: Collection[str], where: str) -> None:
    one_of: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
        ("kind", (task.kind,), KINDS),
        ("shots_sampler", (task.shots_sampler,), SAMPLERS),
        ("scoring", (task.scoring,), SCORINGS),
        ("graded", (task.graded,), GRADED),
        ("tools", task.tools, TOOLS),
        ("split", (task.split,), SPLITS),
        ("extract_pick", (task.extract_pick,), PICKS),
        ("verifier", (task.verifier,), tuple(VERIFIERS)),
        ("normalize", task.normalize, NORMALIZERS),
        ("metric", (task.metric,) if task.metric else (), METRICS_OF.get(task.kind, ())),
    )
    for key, values, allowed in one_of:
        for value in values:
            if value not in allowed:
                raise UsageError(f"{where}: {key} {value!r} (expected one of {', '.join(allowed)})")
    if task.kind == "multiple_choice" and not task.choices:
        raise UsageError(f"{where}: no choices (a list, or the column that holds one)")
    for key in ("answer", "extract", "normalize", "verifier"):
        if task.checks and key in given:
            raise UsageError(f"{where}: {key} has no effect with checks")
    if task.metric in METRICS_OF_CHECKS and not task.checks:
        raise UsageError(f"{where}: metric {task.metric} needs checks")
    by_turns = bool(task.turns) and task.graded == "turns"
    if task.metric == "conversation" and not by_turns:
        raise UsageError(f'{where}: metric conversation needs turns and graded = "turns"')
    of_words = task.metric in ("f1", *METRICS_OF_LABELS)
    if of_words and task.checks:
        raise UsageError(f"{where}: metric {task.metric} has no effect with checks")
    if task.metric in METRICS_OF_LABELS and len(task.labels) < 2:
        raise UsageError(f"{where}: metric {task.metric} needs labels (a list of two or more)")
    if task.metric == "pearson":
        for label in task.labels:
            if finite(label) is None:
                raise UsageError(f"{where}: labels: {label!r} (expected numbers for pearson)")
    if task.verifier == "code" and (task.normalize or of_words):
        key = "normalize" if task.normalize else f"metric {task.metric}"
        raise UsageError(f"{where}: {key} has no effect with verifier code (programs are run)")
    try:
        re.compile(task.extract)
    except re.error as error:
        reason = f"is not a valid pattern ({error})"
        raise UsageError(f"{where}: extract {task.extract!r} {reason}") from error
    if "lookup" in task.tools and not task.lookup:
        raise UsageError(f"{where}: no lookup (expected the Parquet file of this tool)")
    if task.tools and task.max_steps < 1:
        raise UsageError(f"{where}: max_steps = {task.max_steps} (expected 1 or more)")
    if task.each and task.shots:
        raise UsageError(f"{where}: shots has no effect with each")
    if task.tools and task.prompt and not task.chat:
        raise UsageError(f"{where}: tools are called in a chat (chat = true)")
    if task.scoring == "pairs" and (task.turns or task.samples > 1):
        raise UsageError(f"{where}: pairs compare one answer to an item, without turns and samples")
    if (task.metric == "win_rate") != (task.scoring == "pairs") and task.metric:
        raise UsageError(f"{where}: metric {task.metric} and scoring {task.scoring} do not fit")
    if not 0 <= task.guessing < 1:
        raise UsageError(f"{where}: guessing = {task.guessing} (expected 0 or more, below 1)")
    for key in ("limit", "shots"):
        if getattr(task, key) < 0:
            raise UsageError(f"{where}: {key} = {getattr(task, key)} (expected 0 or more)")
    if task.samples < 1 or task.max_new_tokens < 1:
        raise UsageError(f"{where}: samples and max_new_tokens must be 1 or more")


def _check_that_all_act(task: Task, given: Collection[str], where: str) -> None:
    """Refuse keys that have no effect in the task. UsageError."""
    for key in given:
        kinds = KEYS_OF_KINDS.get(key, KINDS)
        if task.kind not in kinds:
            known = " or ".join(kinds)
            raise UsageError(
                f"{where}: {key} has no effect in a task of kind {task.kind} ({known})"
            )
    plain, shots = bool(task.prompt) and not task.chat, task.shots > 0
    joined = plain and (shots or task.kind == "multiple_choice")
    for keys, acts, needed in (
        ("chat", bool(task.prompt) or task.chat, "with prompt; messages always are a chat"),
        ("shots_data shots_sampler shots_where", shots, "with shots"),
        ("heading", plain and shots, "with shots before a plain prompt"),
        ("target", shots, "with shots"),
        ("separator", plain and shots, "with shots before a plain prompt"),
        ("delimiter", joined, "between a plain prompt and choices or the answers of shots"),
        ("extract_pick", bool(task.extract), "with extract"),
        ("labels", task.metric in METRICS_OF_LABELS, "with metric f1_macro or pearson"),
        ("check_arguments", bool(task.checks), "with checks"),
        ("maximum", task.scoring == "points", 'with scoring = "points"'),
        ("turns", bool(task.prompt) and task.chat and not shots, "in a chat of a prompt, no shots"),
        ("graded", bool(task.turns), "with turns"),
        ("lookup", "lookup" in task.tools, "with the tool of this name"),
        ("max_steps", bool(task.tools), "with tools"),
        ("lookup_key lookup_text lookup_about", bool(task.lookup), "with lookup"),
        ("joined_on", bool(task.joined), "with joined"),
        ("references", not task.checks and not task.labels, "without checks and labels"),
        ("guessing", bool(task.group), "with group"),
    ):
        for key in keys.split():
            if key in given and not acts:
                raise UsageError(f"{where}: {key} has no effect (it acts {needed})")
