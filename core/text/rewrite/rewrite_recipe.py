"""Recipes of `sabia rewrite`: TOML files that say what a model is asked and what it may answer.

`recipes/` has those of the package, which describe every key. A file names one of them as its
`base` (default: reason-first) and has its values for the keys of tables that it leaves out. A
recipe on the base of reason-first needs a `prompt` of its own.
"""

import hashlib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.files import read_toml
from sabia.core.judge.rewards import parse_reward
from sabia.core.options.option import unknown
from sabia.core.text.rewrite.segments import Limits

BASE, ENDING = "reason-first", ".toml"
SEPARATORS = {"blank-lines": r"(\n[ \t]*\n\s*)", "lines": r"(\n\s*)", "nowhere": r"((?!))"}
RULES = ("", "reason-first")
ROUNDING = 1e-9  # 2/3 of 3 models are two
EQUAL = 1e-9  # a score that is lower by less is high enough


@dataclass(frozen=True)
class Pieces:
    """How a document is cut into pieces, which are rewritten one by one."""

    at: str
    most_chars: int
    tokens_per_char: float

    def __post_init__(self) -> None:
        if self.at not in SEPARATORS:
            raise ValueError(f"at = {self.at!r} (expected one of {', '.join(SEPARATORS)})")
        if self.most_chars < 1 or not 0 < self.tokens_per_char < math.inf:
            raise ValueError("most-chars or tokens-per-char is not above 0")

    @cached_property
    def separator(self) -> re.Pattern[str]:
        """What stands between two parts that may be in different pieces, as its one group."""
        return re.compile(SEPARATORS[self.at])


@dataclass(frozen=True)
class Filters:
    """Which documents are rewritten."""

    min_chars: int
    max_chars: float
    languages: tuple[str, ...]
    matches: str

    def __post_init__(self) -> None:
        if not 0 <= self.min_chars <= self.max_chars:
            raise ValueError(f"min-chars = {self.min_chars}, max-chars = {self.max_chars:g}")
        try:
            _ = self.pattern
        except re.error as error:
            raise ValueError(f"matches = {self.matches!r}: {error}") from error

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The compiled `matches`."""
        return re.compile(self.matches)

    def excluded(self, text: str) -> str:
        """The key of the first filter that a text does not pass; empty if it passes all."""
        if len(text) < self.min_chars:
            return "min-chars"
        if len(text) > self.max_chars:
            return "max-chars"
        if self.languages:
            from sabia.core.text.classify.language import names_of

            if names_of([text])[0] not in self.languages:
                return "languages"
        return "" if self.pattern.search(text) else "matches"


@dataclass(frozen=True)
class Checks:
    """What a rewritten text must pass; see `faithfulness`."""

    length: tuple[float, ...]
    numbers: float
    new_numbers: float
    dates: bool
    names: bool
    words: float
    language: bool
    repetition: float
    refusals: bool

    def __post_init__(self) -> None:
        if len(self.length) != 2 or not 0 <= self.length[0] <= self.length[1]:
            raise ValueError(f"length = {list(self.length)} (expected the least and the most)")
        for name in ("numbers", "words", "repetition"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} = {value:g} (expected 0 to 1)")
        if not self.new_numbers >= 0:
            raise ValueError(f"new-numbers = {self.new_numbers:g} (expected 0 or more)")


@dataclass(frozen=True, kw_only=True)
class AnyRecipe:
    """A recipe on any base; `digest` is a hash of all of it but the name."""

    name: str
    digest: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Recipe(AnyRecipe):
    """A recipe on the base of reason-first."""

    prompt: str
    rules: str
    pieces: Pieces
    filters: Filters
    checks: Checks

    @property
    def prompt_hash(self) -> str:
        """128-bit hash of the instructions, 32 hex digits."""
        return _hash(self.prompt)


def _check_sampling(temperature: float, **counts: int) -> None:
    """Raise ValueError for a temperature below 0 or infinite, and for counts below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name.replace('_', '-')} = {value} (expected 1 or more)")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature = {temperature:g} (expected 0 or more)")


@dataclass(frozen=True)
class Samples:
    """How many answers are sampled, how they are graded, and which are kept."""

    count: int
    keep: int
    reward: str
    min_score: float
    temperature: float
    max_tokens: int

    def __post_init__(self) -> None:
        parse_reward(self.reward)
        _check_sampling(
            self.temperature, count=self.count, keep=self.keep, max_tokens=self.max_tokens
        )
        if not 0 <= self.min_score <= 1:
            raise ValueError(f"min-score = {self.min_score:g} (expected 0 to 1)")


@dataclass(frozen=True, kw_only=True)
class BestOf(AnyRecipe):
    """A recipe on the base of best-of."""

    samples: Samples


@dataclass(frozen=True)
class Constitution:
    """Principles of answers, and how answers are revised by them."""

    principles: tuple[str, ...]
    rounds: int
    critique: str
    revise: str
    min_gain: float
    temperature: float
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.principles or len(set(self.principles)) < len(self.principles):
            raise ValueError(
                f"principles = {list(self.principles)!r:.200} (expected one or more, all different)"
            )
        _check_sampling(self.temperature, rounds=self.rounds, max_tokens=self.max_tokens)
        for name in ("critique", "revise"):
            if "{principle}" not in (value := getattr(self, name)):
                raise ValueError(f"{name} = {value!r} (expected a text with {{principle}})")
        if not -1 <= self.min_gain <= 1:
            raise ValueError(f"min-gain = {self.min_gain:g} (expected -1 to 1)")


@dataclass(frozen=True, kw_only=True)
class ByPrinciples(AnyRecipe):
    """A recipe on the base of constitution."""

    constitution: Constitution


@dataclass(frozen=True)
class OneAnswer:
    """How each model answers."""

    max_tokens: int
    temperature: float

    def __post_init__(self) -> None:
        _check_sampling(self.temperature, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Agreement:
    """When models agree, and how much they must agree on; see `segments`."""

    quorum: float
    similarity: float
    names: bool
    kept: float

    def __post_init__(self) -> None:
        for name in ("quorum", "similarity"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} = {value:g} (expected above 0, at most 1)")
        if not 0 <= self.kept <= 1:
            raise ValueError(f"kept = {self.kept:g} (expected 0 to 1)")

    def limits(self, models: int) -> Limits:
        """The limits for a number of models. Raises UsageError if one model is a quorum."""
        quorum = math.ceil(self.quorum * models - ROUNDING)
        if quorum < 2:
            raise UsageError(
                f"--recipe: quorum = {self.quorum:g} of {models} models is one (expected two or "
                "more, so that something is agreed on)"
            )
        return Limits(quorum, self.similarity, self.names)


@dataclass(frozen=True, kw_only=True)
class Ensemble(AnyRecipe):
    """A recipe on the base of ensemble."""

    answers: OneAnswer
    agreement: Agreement


BASES: dict[str, type[AnyRecipe]] = {
    BASE: Recipe, "best-of": BestOf, "constitution": ByPrinciples, "ensemble": Ensemble,
}  # fmt: skip


def built_in() -> dict[str, str]:
    """The texts of the package's recipes, by name."""
    folder = files("sabia.core.text.rewrite") / "recipes"
    named = {file.name: file for file in folder.iterdir() if file.name.endswith(ENDING)}
    return {name.removesuffix(ENDING): named[name].read_text("utf-8") for name in sorted(named)}


def load_recipe(name: str) -> AnyRecipe:
    """The recipe of the package of this name, or that of a TOML file. Raises UsageError."""
    texts = built_in()
    if name in texts:
        return _recipe(name, {**tomllib.loads(texts[name]), "base": name}, "--recipe")
    if not name.endswith(ENDING):
        raise unknown("--recipe", name, (*texts, f"FILE{ENDING}"))
    return _recipe(Path(name).stem, read_toml("--recipe", name), f"--recipe: {name}")


def _recipe(name: str, given: Mapping[str, Any], where: str) -> AnyRecipe:
    named = given.get("base", BASE)
    if not isinstance(named, str) or named not in BASES:
        raise unknown(f"{where}: base", named, BASES)
    kinds = {one.name: one.type for one in fields(BASES[named]) if is_dataclass(one.type)}
    base = tomllib.loads(built_in()[named])
    keys = ["base", *(key for key in base if key not in kinds), *kinds]
    for key in given.keys() - set(keys):
        raise unknown(f"{where}: key", key, keys)
    tables: dict[str, Any] = {
        key: _values(kind, given.get(key, {}), base[key], f"{where}: {key}")
        for key, kind in kinds.items()
    }
    if named != BASE:
        return BASES[named](name=name, **tables, digest=_hash(str(tables)))
    prompt, rules = given.get("prompt", ""), given.get("rules", "")
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f"{where}: prompt = {prompt!r} (expected the instructions for the model)")
    if rules not in RULES:
        raise unknown(f"{where}: rules", rules, RULES[1:])
    digest = _hash(f"{prompt!r} {rules} {tables}")
    return Recipe(name=name, prompt=prompt, rules=rules, **tables, digest=digest)


def _values(kind: Any, given: object, base: Mapping[str, Any], where: str) -> object:
    """A table of a recipe; keys that are not given have the values of `base`, and all have their
    types."""
    if not isinstance(given, dict):
        raise UsageError(f"{where} = {given!r} (expected a table)")
    values: dict[str, Any] = {}
    for key in given:
        if key not in base:
            raise unknown(f"{where}: key", key, base)
    for one in fields(kind):
        key = one.name.replace("_", "-")
        value, usual = given.get(key, base[key]), base[key]
        if not _fits(value, usual):
            raise UsageError(f"{where}: {key} = {value!r} (expected a value such as {usual!r})")
        values[one.name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**values)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{where}: {error}".replace("--reward: ", "reward: ")) from error


def _fits(value: object, usual: object) -> bool:
    """Whether a value has the type of another; entries of an empty list are texts."""
    if isinstance(usual, list):
        entry = usual[0] if usual else ""
        return isinstance(value, list) and all(_fits(one, entry) for one in value)
    return type(value) is type(usual) or (isinstance(usual, float) and type(value) is int)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
