"""Items of a YAML task: the requests that lm-evaluation-harness makes of each row, byte for byte.

A template is the name of a column, Jinja, a constant or code. Few-shot examples are drawn row by
row from one random generator, with the harness' own seed for the seed 0. Message boundaries are
delimited as there: no delimiter is added where either side has white space.
"""

import ast
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment

from sabia.core.bench.harness.splits import Row, Splits
from sabia.core.bench.harness.yaml_file import Function, Template, YamlTask
from sabia.core.bench.items import Item
from sabia.core.errors import BadData, SabiaError

FEWSHOT_SEED = 1234  # the harness' default


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    made = SandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    made.filters["regex_replace"] = lambda text, pattern, repl, count=0: re.sub(
        pattern, repl, text, count=count
    )
    return made


@lru_cache(maxsize=1024)
def _template(text: str) -> jinja2.Template:
    return _environment().from_string(text)


def rendered(template: str, row: Row) -> str:
    """A template with the columns of a row. BadData."""
    try:
        return _template(template).render(**row)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, re.error) as error:
        raise BadData(f"template {template!r:.60}: {error}") from error


class Prompts:
    """The requests of a task's rows. shots: the number of few-shot examples."""

    def __init__(self, task: YamlTask, splits: Splits, shots: int, seed: int) -> None:
        self.task, self.splits, self.shots = task, splits, shots
        self.rows = splits.rows(task.test_split or task.validation_split or "", task.process_docs)
        if not self.rows:
            raise BadData(f"{task.task}: no row to evaluate")
        self.columns = self.rows[0].keys()
        self.random = random.Random(FEWSHOT_SEED + seed)
        self.pool = self._pool() if shots else []

    @cached_property
    def many_contexts(self) -> bool:
        """Whether each choice is a context of its own, before one continuation."""
        return self.task.doc_to_choice is not None and isinstance(self.text(self.rows[0]), int)

    def items(self, limit: int = 0) -> list[Item]:
        """One item for each row, of at most `limit` rows."""
        rows = self.rows[: limit or None]
        return [self._item(row, number) for number, row in enumerate(rows)]

    def text(self, row: Row, template: Template = None) -> Any:
        """The question; an index with choices is the gold context of several."""
        template = self.task.doc_to_text if template is None else template
        value = self._value(template, row)
        if isinstance(template, str) and template not in self.columns and value.isdigit():
            return int(value) if self.task.doc_to_choice is not None else value
        return value

    def target(self, row: Row, template: Template = None) -> Any:
        """The answer: text, an index, or a list of one of these."""
        template = self.task.doc_to_target if template is None else template
        value = self._value(template, row)
        if not isinstance(template, str) or template in self.columns:
            return value
        if value.isdigit() and self.task.doc_to_choice is not None:
            return int(value)
        if len(value) >= 2 and value[0] == "[" and value[-1] == "]":
            with suppress(SyntaxError, ValueError):
                return ast.literal_eval(value)
        return value

    def choices(self, row: Row, template: Template = None) -> list[str]:
        """The choices of a row."""
        template = self.task.doc_to_choice if template is None else template
        if isinstance(template, Mapping):
            return list(template.values())
        value = self._value(template, row)
        if isinstance(template, str) and template not in self.columns:
            try:
                value = ast.literal_eval(value)
            except (SyntaxError, ValueError) as error:
                raise BadData(f"doc_to_choice gives {value!r:.60}, which is not a list") from error
        if not isinstance(value, list) or not all(isinstance(choice, str) for choice in value):
            raise BadData(f"doc_to_choice gives {value!r:.60} (expected a list of texts)")
        return value

    def _value(self, template: Template, row: Row) -> Any:
        if isinstance(template, Function):
            return template(row)
        if not isinstance(template, str):
            return template
        return row[template] if template in self.columns else rendered(template, row)

    def _pool(self) -> list[Row]:
        task, process = self.task, self.task.shot_key("process_docs")
        if task.shots_from is not None:
            return self.splits.rows(task.shots_from, process)
        samples = task.fewshot_config.get("samples")
        if samples is not None:
            return samples() if isinstance(samples, Function) else list(samples)
        split = task.training_split or task.validation_split or task.test_split or ""
        return self.splits.rows(split, task.process_docs)

    def _drawn(self, row: Row) -> Sequence[Row]:
        task, pool, count = self.task, self.pool, self.shots
        itself = task.shots_from == task.test_split  # the row may be in the pool
        others = (other for other in pool if not itself or other != row)
        if task.fewshot_config.get("sampler", "default") == "first_n":
            drawn = list(islice(others, count))
        elif len(pool) < count + itself:
            drawn = []
        elif not itself:
            drawn = self.random.sample(pool, count)
        else:
            drawn = [o for o in self.random.sample(pool, count + 1) if o != row][:count]
            if len(drawn) < count and len(left := list(others)) >= count:
                drawn = self.random.sample(left, count)
        if len(drawn) < count:
            raise BadData(f"{len(pool)} rows for {count} few-shot examples")
        return drawn

    def _item(self, row: Row, number: int) -> Item:
        try:
            return self._made(row, number)
        except (SabiaError, KeyError, TypeError, IndexError, AttributeError) as error:
            reason = str(error) or type(error).__name__
            raise BadData(f"{self.task.task}, row {number}: {reason}") from error

    def _made(self, row: Row, number: int) -> Item:
        task, gold = self.task, self.target(row)
        before = self._before(row)
        prefix = None if task.gen_prefix is None else self._value(task.gen_prefix, row)
        choices = self.choices(row) if task.doc_to_choice is not None else []
        made = Item(f"{number}", choices=tuple(choices), fields=row, gold=gold)
        if task.output_type == "loglikelihood_rolling":
            return replace(made, text=str(gold))
        if self.many_contexts:
            contexts = [before + turn(text, prefix, "") for text in choices]
            pairs = [(context, f"{task.target_delimiter}{gold}") for context in contexts]
            every = self._with_unconditional(pairs, choices)
            return replace(made, text=contexts[0], pairs=every, gold=self.text(row))
        question = self.text(row)
        if not isinstance(question, str):
            raise BadData(f"doc_to_text gives {question!r:.60} (expected text)")
        context = before + turn(question, prefix, task.target_delimiter)
        query = task.doc_to_decontamination_query
        asked = self._value(query, row) if task.should_decontaminate and query else question
        made = replace(made, text=context, query=str(asked))
        if task.output_type == "multiple_choice":
            pairs = [(context, f"{task.target_delimiter}{choice}") for choice in choices]
            return replace(made, pairs=self._with_unconditional(pairs, choices))
        if task.output_type == "loglikelihood":
            return replace(made, pairs=((context, gold),))
        return made

    def _with_unconditional(
        self, pairs: list[tuple[str, str]], choices: Sequence[str]
    ) -> tuple[tuple[str, str], ...]:
        if "acc_mutual_info" not in self.task.metrics:
            return tuple(pairs)
        return (*pairs, *(("", f"{self.task.target_delimiter}{choice}") for choice in choices))

    def _before(self, row: Row) -> str:
        """The description and the few-shot examples."""
        task = self.task
        described = str(self._value(task.description, row)) if task.description else ""
        shots = self._drawn(row) if self.shots else ()
        return described + "".join(map(self._shot, shots))

    def _shot(self, row: Row) -> str:
        task = self.task
        question = self.text(row, task.shot_key("doc_to_text"))
        answer = self.target(row, task.shot_key("doc_to_target"))
        of_shots = task.shot_key("doc_to_choice")
        choices = self.choices(row, of_shots) if of_shots else None
        if self.many_contexts and choices is not None:
            question, choices = choices[question], None
        prefix = task.shot_key("gen_prefix")
        prefix = self._value(prefix, row) if prefix else None
        if choices and isinstance(answer, int):
            answer = choices[answer]
        if isinstance(answer, list):
            answer = answer[0]
        delimiter = task.shot_key("target_delimiter")
        if answer is None or answer == "":
            return turn(question, prefix, delimiter)
        if not isinstance(answer, str) or not isinstance(question, str):
            raise BadData(f"an example has the answer {answer!r:.40} to {question!r:.40}")
        between = delimiter if not prefix or _apart(question, prefix) else ""
        shown = joined(prefix, answer)
        return f"{question}{between}{shown}{task.shot_key('fewshot_delimiter')}"


def turn(question: str, prefix: str | None, delimiter: str) -> str:
    """A question, and what its answer begins with."""
    if not prefix:
        return question
    return question + (delimiter if _apart(question, prefix) else "") + prefix


def joined(prefix: str | None, text: str) -> str:
    """Both with a space between them where neither has white space there."""
    if not prefix:
        return text
    return f"{prefix} {text}" if _apart(prefix, text) else prefix + text


def _apart(before: str, after: str) -> bool:
    return before != "" and not (before[-1].isspace() or after[:1].isspace())
