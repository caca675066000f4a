"""Task files of lm-evaluation-harness (YAML), read unchanged.

A file may `include` others, whose keys it replaces. Keys, defaults and meaning are those of
lm-evaluation-harness 0.4.13; a key or value that cannot be honoured is an error that names it.
`!function module.name` is Python code next to the file, which runs only if the caller trusts it.
"""

import difflib
import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from sabia.core.errors import UsageError
from sabia.core.files import unreadable

ENDINGS = (".yaml", ".yml")
SAMPLERS = ("default", "first_n")
FORMATS = ("json", "parquet")  # values of dataset_path that name a format, with data_files
DEFAULT_METRICS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "loglikelihood_rolling": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    "generate_until": ("exact_match",),
}
OUTPUT_TYPES = tuple(DEFAULT_METRICS)
# in tasks, and refused: other inputs than text, templates of a package that is not used, and code
# in place of the data set, the metrics or the whole task
REFUSED = ("doc_to_image", "doc_to_audio", "use_prompt", "custom_dataset", "class", "unsafe_code",
           "process_results")  # fmt: skip
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("do_sample", "temperature", "top_p", "until", *LENGTHS)
DEFAULT_LENGTH = 256


@dataclass(frozen=True)
class Function:
    """Code that a file names; it is imported when it is first called."""

    file: str
    name: str
    digest: str

    @cached_property
    def _code(self) -> Any:
        spec = importlib.util.spec_from_file_location(Path(self.file).stem, self.file)
        if spec is None or spec.loader is None:
            raise UsageError(f"{self.file}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, self.name):
            raise UsageError(f"{self.file}: no function {self.name!r}")
        return getattr(module, self.name)

    def __call__(self, *given: object, **named: object) -> Any:
        return self._code(*given, **named)


Template = str | int | list[Any] | dict[str, Any] | Function | None


@dataclass(frozen=True)
class MetricSettings:
    """An entry of metric_list: a name and its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    function: Function | None = None


@dataclass(frozen=True)
class FilterSettings:
    """An entry of filter_list: functions with their settings, applied in turn."""

    name: str
    steps: tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True)
class YamlTask:
    """A task file with its defaults; fields are its keys, in the harness' own meaning."""

    task: str
    output_type: str = "generate_until"
    task_alias: str = ""
    tag: Any = None
    dataset_path: str | None = None
    dataset_name: str | None = None
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    training_split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    fewshot_split: str | None = None
    process_docs: Function | None = None
    doc_to_text: Template = None
    doc_to_target: Template = None
    doc_to_choice: Template = None
    description: str = ""
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    fewshot_config: dict[str, Any] = field(default_factory=dict)
    num_fewshot: int = 0
    metric_list: tuple[MetricSettings, ...] = ()
    generation_kwargs: dict[str, Any] = field(default_factory=dict)
    repeats: int = 1
    filter_list: tuple[FilterSettings, ...] = ()
    should_decontaminate: bool = False
    doc_to_decontamination_query: Template = None
    gen_prefix: str | None = None
    metadata: Any = None
    path: str = ""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics."""
        return tuple(metric.name for metric in self.metric_list)

    @property
    def temperature(self) -> float:
        """Of sampling; 0 is greedy, also where do_sample is false."""
        given = self.generation_kwargs
        return 0.0 if given.get("do_sample") is False else float(given.get("temperature", 0.0))

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        until = self.generation_kwargs.get("until", self.fewshot_delimiter)
        return tuple(until) if isinstance(until, list) else (until,)

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of an answer."""
        given = (self.generation_kwargs.get(name) for name in LENGTHS)
        return int(next((n for n in given if n is not None), DEFAULT_LENGTH))

    def shot_key(self, key: str) -> Any:
        """A key as it holds for few-shot examples."""
        return self.fewshot_config[key] if key in self.fewshot_config else getattr(self, key)

    @property
    def shots_from(self) -> str | None:
        """The split of few-shot examples, if one is named."""
        return self.fewshot_config.get("split", self.fewshot_split)


SHOT_KEYS = (
    "sampler", "split", "samples", "process_docs", "doc_to_text", "doc_to_choice", "doc_to_target",
    "gen_prefix", "fewshot_delimiter", "target_delimiter",
)  # fmt: skip


def is_yaml(path: str | Path) -> bool:
    """Whether a file has the ending of YAML."""
    return Path(path).suffix in ENDINGS


def read_yaml(path: Path, trust: bool, option: str = "--task", seen: tuple[Path, ...] = ()) -> dict:
    """The keys of a file with those that it includes. UsageError."""
    path = path.resolve()
    if path in seen:
        raise UsageError(f"{option}: {path} includes itself")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise unreadable(option, path, error) from error
    try:
        keys = yaml.load(text, Loader=_loader(path, trust))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: not YAML ({reason})") from error
    if not isinstance(keys, dict):
        raise UsageError(f"{path}: {keys!r:.40} (expected the keys of a task)")
    included = keys.pop("include", None) or []
    whole: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        other = read_yaml(path.parent / str(name), trust, option, (*seen, path))
        other.pop("task_list", None)
        whole |= other
    return whole | keys


def _loader(path: Path, trust: bool) -> Any:
    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Function:
        module, _, name = str(loader.construct_scalar(node)).rpartition(".")
        if not trust:
            line = node.start_mark.line + 1
            raise UsageError(
                f"{path}, line {line}: !function {module}.{name} is Python code of the task; "
                "--trust-task-code runs it"
            )
        file = path.parent / f"{module.replace('.', '/')}.py"
        try:
            return Function(str(file), name, hashlib.blake2b(file.read_bytes()).hexdigest())
        except OSError as error:
            raise unreadable(f"{path}: !function", file, error) from error

    class Loader(yaml.SafeLoader):
        """One that knows !function of this file."""

    Loader.add_constructor("!function", function)
    return Loader


def task_of(keys: Mapping[str, Any], path: str) -> YamlTask:
    """The task of the keys of a file. UsageError for what cannot be honoured."""
    known = {f.name: f for f in fields(YamlTask) if f.name != "path"}
    given: dict[str, Any] = {}
    for key, value in keys.items():
        if key in REFUSED and value not in (None, False):
            raise UsageError(f"{path}: {key} is not supported")
        if key in (*REFUSED, "group", "group_alias", "task_list"):
            continue
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{path}: no key {key!r} in a task of lm-evaluation-harness{hint}")
        if value is not None:
            given[key] = value
    if "task" not in given:
        raise UsageError(f"{path}: no task (expected the name of the task)")
    output = given.get("output_type", "generate_until")
    if output not in OUTPUT_TYPES:
        raise UsageError(f"{path}: output_type {output!r} (expected {', '.join(OUTPUT_TYPES)})")
    given["metric_list"] = _metrics(given.get("metric_list"), output, path)
    given["filter_list"] = _filters(given.get("filter_list"), path)
    for name, wanted in _types().items():
        if name in given and not isinstance(given[name], wanted):
            raise UsageError(f"{path}: {name} = {given[name]!r:.60} (expected {_named(wanted)})")
    task = YamlTask(**given, path=path)
    _check(task, path)
    return task


@lru_cache(maxsize=1)
def _types() -> dict[str, tuple[type, ...]]:
    """The types of a key's values by the annotation of its field; none where it is Any."""
    hints = get_type_hints(YamlTask)
    return {
        name: tuple(
            get_origin(one) or one
            for one in (get_args(hint) if isinstance(hint, UnionType) else (hint,))
            if one is not NoneType
        )
        for name, hint in hints.items()
        if hint is not Any
    }


def _named(types: tuple[type, ...]) -> str:
    names = {str: "text", dict: "keys", int: "a number"}
    return " or ".join(names.get(t, t.__name__) for t in types)


def _metrics(given: object, output: str, path: str) -> tuple[MetricSettings, ...]:
    if given is None:
        return tuple(map(MetricSettings, DEFAULT_METRICS[output]))
    made = []
    for entry in given if isinstance(given, list) else [None]:
        if not isinstance(entry, dict) or "metric" not in entry:
            raise UsageError(f"{path}: metric_list: {entry!r:.60} (expected a list with metric)")
        name, settings = entry["metric"], dict(entry)
        function = name if isinstance(name, Function) else None
        if settings.pop("hf_evaluate", False) and name != "exact_match":
            raise UsageError(f"{path}: metric_list: hf_evaluate is not supported ({name})")
        del settings["metric"]
        made.append(MetricSettings(function.name if function else str(name), settings, function))
    return tuple(made)


def _filters(given: object, path: str) -> tuple[FilterSettings, ...]:
    if given is None:
        return (FilterSettings("none", (("take_first", {}),)),)
    made = []
    entries: list[Any] = given if isinstance(given, list) else [None]
    for entry in entries:
        try:
            steps = [(str(step["function"]), {**step}) for step in entry["filter"]]
            for _, settings in steps:
                del settings["function"]
            made.append(FilterSettings(str(entry["name"]), tuple(steps)))
        except (TypeError, KeyError) as error:
            what = f"{path}: filter_list: {entry!r:.60}"
            raise UsageError(f"{what} (expected name and filter, a list with function)") from error
    return tuple(made)


def _check(task: YamlTask, path: str) -> None:
    if task.num_fewshot < 0 or task.repeats < 1:
        raise UsageError(f"{path}: num_fewshot must be 0 or more, and repeats 1 or more")
    of_files = task.dataset_kwargs if task.dataset_path in FORMATS else ()
    for name, given, known in (
        ("generation_kwargs", task.generation_kwargs, SAMPLING),
        ("dataset_kwargs", of_files, ("data_files", "trust_remote_code")),
        ("fewshot_config", task.fewshot_config, SHOT_KEYS),
    ):
        for key in given:
            if key not in known:
                raise UsageError(f"{path}: {name}: {key} is not supported")
    if task.fewshot_config.get("sampler", "default") not in SAMPLERS:
        sampler = task.fewshot_config["sampler"]
        raise UsageError(f"{path}: sampler {sampler!r} (expected {', '.join(SAMPLERS)})")
    if not (task.test_split or task.validation_split):
        raise UsageError(f"{path}: no test_split and no validation_split")
    needed = ["doc_to_target"] + (["doc_to_text"] if task.output_type != OUTPUT_TYPES[2] else [])
    needed += ["doc_to_choice"] if task.output_type == "multiple_choice" else []
    for key in needed:
        if getattr(task, key) is None:
            raise UsageError(f"{path}: no {key} (a task of output_type {task.output_type} has one)")
