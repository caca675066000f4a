"""Whether a model's rewriting still says what its source says: nothing lost, nothing made up.

Checks, in this order; the first that fails is the reason: the answer is whole (finish reason), not
empty, no refusal or talk about the task, of a sensible length, every number of the source is in it
and hardly any new ones, most words of the source are in it, the language is the same, and it does
not repeat itself. They need no model; they are strict where that is cheap (numbers).
"""

import re
from collections import Counter

MIN_LENGTH_RATIO, MAX_LENGTH_RATIO = 0.6, 1.8
MIN_WORDS_KEPT = 0.6
MAX_NEW_NUMBERS = 0.2  # of the numbers of the source, and never fewer than SPARE
SPARE = 2
MAX_REPEATED = 0.2  # share of word 5-grams seen before, beyond that of the source
SHORT_WORDS = 20  # texts too short to tell their language or repetition

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


def cleaned(answer: str) -> str:
    """The answer without a model's reasoning block and a code fence around all of it."""
    text = THINKING.sub("", answer)
    fenced = FENCE.match(text)
    return (fenced[1] if fenced else text).strip()


def unfaithful(source: str, text: str, finish_reason: str | None) -> str:
    """Why `text` cannot stand for `source`; empty where it can."""
    if finish_reason not in ("stop", None):
        return f"cut short (finish reason {finish_reason})"
    if not text.strip():
        return "empty"
    if META.match(text) and not META.match(source):
        return "refusal or talk about the task"
    checks = (_length, _numbers, _words, _language, _repetition)
    return next(filter(None, (check(source, text) for check in checks)), "")


def _length(source: str, text: str) -> str:
    ratio = len(text.strip()) / max(1, len(source.strip()))
    if MIN_LENGTH_RATIO <= ratio <= MAX_LENGTH_RATIO:
        return ""
    return f"length ratio {ratio:.2f} (expected {MIN_LENGTH_RATIO} to {MAX_LENGTH_RATIO})"


def _numbers(source: str, text: str) -> str:
    wanted, found = set(NUMBER.findall(source)), set(NUMBER.findall(text))
    if missing := sorted(wanted - found):
        return f"number missing: {missing[0]} ({len(missing)} of {len(wanted)})"
    new = sorted(found - wanted)
    if len(new) > max(SPARE, MAX_NEW_NUMBERS * len(wanted)):
        return f"new numbers: {new[0]} and {len(new) - 1} more"
    return ""


def _words(source: str, text: str) -> str:
    wanted = {word.lower() for word in WORD.findall(source)}
    if not wanted:
        return ""
    kept = len(wanted & {word.lower() for word in WORD.findall(text)}) / len(wanted)
    return "" if kept >= MIN_WORDS_KEPT else f"only {kept:.0%} of the source's words kept"


def _language(source: str, text: str) -> str:
    from sabia.core.text.classify.language import UNDETERMINED, names_of

    if min(len(TOKEN.findall(source)), len(TOKEN.findall(text))) < SHORT_WORDS:
        return ""
    names = names_of([source, text])
    if UNDETERMINED in names or names[0] == names[1]:
        return ""
    return f"language {names[1]} (source: {names[0]})"


def _repetition(source: str, text: str) -> str:
    excess = _repeated(text) - _repeated(source)
    return f"repeats itself ({excess:.0%} more than the source)" if excess > MAX_REPEATED else ""


def _repeated(text: str, n: int = 5) -> float:
    """Share of word n-grams that occurred before."""
    words = TOKEN.findall(text.lower())
    if len(words) < SHORT_WORDS:
        return 0.0
    grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    return 1 - len(grams) / sum(grams.values())
