"""Checks that a model's rewriting keeps the content of its source and adds none.

The first check that fails gives the reason. In this order: the answer is complete (finish reason)
and not empty; it is no refusal and does not talk about the task; its length is similar; it has the
numbers of the source and few new ones; it states no date and no name that the source does not
state; it has most words of the source; its language is the same; it does not repeat itself. The
limits are those of a recipe. No check needs a model.
"""

import re
from collections import Counter

from sabia.core.text.rewrite.rewrite_recipe import Checks
from sabia.core.text.rewrite.stated_facts import new_date, new_name

VERSION = 2  # raise it when other texts pass
SPARE_NEW_NUMBERS = 2  # that any text may have
SHORT_WORDS = 20  # shorter texts have no reliable language or repetition rate

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
WORD = re.compile(r"[^\W\d_]{4,}")
TOKEN = re.compile(r"\w+")
META = re.compile(
    r"\s*(?:i(?:'m| am) (?:sorry|unable)|i can(?:no|')t|as an? (?:ai|language model)|sure[,!.]"
    r"|certainly[,!.]|of course[,!.]|here(?:'s| is| are) (?:the|a|your) (?:re|new|text|version)"
    r"|(?:the )?rewritten (?:text|version)"
    r"|desculpe|lamento|não posso|como (?:um|uma) (?:ia|modelo|inteligência)|claro[,!.]"
    r"|com certeza[,!.]|aqui está|segue (?:o|a|abaixo)|(?:o )?texto reescrito)",
    re.IGNORECASE,
)
THINKING = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
FENCE = re.compile(r"^\s*```\w*\n(.*?)\n?```\s*$", re.DOTALL)


def strip_answer(answer: str) -> str:
    """The answer without the model's reasoning block and without a code fence around it."""
    text = THINKING.sub("", answer)
    fenced = FENCE.match(text)
    return (fenced[1] if fenced else text).strip()


def unfaithful(source: str, text: str, finish_reason: str | None, limits: Checks) -> str:
    """Why `text` is not a faithful rewriting of `source`; empty where it is one."""
    if finish_reason not in ("stop", None):
        return f"cut short (finish reason {finish_reason})"
    if not text.strip():
        return "empty"
    if limits.refusals and META.match(text) and not META.match(source):
        return "refusal or talk about the task"
    checks = (_length, _numbers, _dates, _names, _words, _language, _repetition)
    return next(filter(None, (check(source, text, limits) for check in checks)), "")


def _length(source: str, text: str, limits: Checks) -> str:
    ratio = len(text.strip()) / max(1, len(source.strip()))
    least, most = limits.length
    if least <= ratio <= most:
        return ""
    return f"length ratio {ratio:.2f} (expected {least:g} to {most:g})"


def _numbers(source: str, text: str, limits: Checks) -> str:
    old, new = set(NUMBER.findall(source)), set(NUMBER.findall(text))
    missing = sorted(old - new)
    if len(old) - len(missing) < limits.numbers * len(old):
        return f"number missing: {missing[0]} ({len(missing)} of {len(old)})"
    added = sorted(new - old)
    if len(added) > max(SPARE_NEW_NUMBERS, limits.new_numbers * len(old)):
        return f"new numbers: {added[0]} and {len(added) - 1} more"
    return ""


def _dates(source: str, text: str, limits: Checks) -> str:
    date = limits.dates and new_date(source, text)
    return f"new date: {date}" if date else ""


def _names(source: str, text: str, limits: Checks) -> str:
    name = limits.names and new_name(source, text)
    return f"new name: {name}" if name else ""


def _words(source: str, text: str, limits: Checks) -> str:
    wanted = {word.lower() for word in WORD.findall(source)}
    if not wanted:
        return ""
    kept = len(wanted & {word.lower() for word in WORD.findall(text)}) / len(wanted)
    return "" if kept >= limits.words else f"only {kept:.0%} of the source's words kept"


def _language(source: str, text: str, limits: Checks) -> str:
    from sabia.core.text.classify.language import UNDETERMINED, names_of

    shorter = min(len(TOKEN.findall(source)), len(TOKEN.findall(text)))
    if not limits.language or shorter < SHORT_WORDS:
        return ""
    names = names_of([source, text])
    if UNDETERMINED in names or names[0] == names[1]:
        return ""
    return f"language {names[1]} (source: {names[0]})"


def _repetition(source: str, text: str, limits: Checks) -> str:
    excess = _repeated(text) - _repeated(source)
    if excess <= limits.repetition:
        return ""
    return f"repeats itself ({excess:.0%} more than the source)"


def _repeated(text: str, n: int = 5) -> float:
    """Share of word n-grams that repeat an earlier one."""
    words = TOKEN.findall(text.lower())
    if len(words) < SHORT_WORDS:
        return 0.0
    grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    return 1 - len(grams) / sum(grams.values())
