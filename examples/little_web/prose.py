"""Prose by a small grammar: paragraphs about a topic, near-duplicates, spam.

Articles of one topic share words but not runs of words: no two of them are near-duplicates, and
`near_duplicate` makes one by few and local edits. The words are in words_en.toml and
words_pt.toml.
"""

import random
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "pt")
Topic = dict[str, Any]
_CONTRACTIONS = [
    (re.compile(rf"\b{before} {article}\b"), joined + article)
    for before, joined in (("de", "d"), ("em", "n"), ("por", "pel"))
    for article in ("o", "a", "os", "as")
]


@cache
def lexicon(language: str) -> dict[str, Any]:
    """Topics, frames, times, people, manners and slogans of `en` or `pt`."""
    path = Path(__file__).with_name(f"words_{language}.toml")
    return tomllib.loads(path.read_text("utf-8"))


def paragraphs(topic: Topic, language: str, choice: random.Random) -> list[str]:
    """An article: six to nine paragraphs of three to six sentences."""
    return [
        " ".join(sentence(topic, language, choice) for _ in range(choice.randint(3, 6)))
        for _ in range(choice.randint(6, 9))
    ]


def sentence(topic: Topic, language: str, choice: random.Random) -> str:
    """One sentence about the topic."""
    return _filled(choice.choice(lexicon(language)["frames"]), topic, language, choice)


def title(topic: Topic, language: str, choice: random.Random) -> str:
    """A headline without a full stop."""
    return _filled(choice.choice(lexicon(language)["titles"]), topic, language, choice)


def _filled(frame: str, topic: Topic, language: str, choice: random.Random) -> str:
    words = lexicon(language)
    s1, s2 = choice.sample(topic["subjects"], 2)
    a1, a2 = choice.sample(topic["actions"], 2)
    who1, who2 = choice.sample(words["people"], 2)
    time = choice.choice(words["times"])
    text = frame.format(
        s1=s1, s2=s2, a1=a1, a2=a2, who1=who1, who2=who2, time=time, name=topic["name"],
        time_low=time[0].lower() + time[1:], p1=choice.choice(topic["places"]),
        r1=choice.choice(topic["reasons"]), m1=choice.choice(words["manners"]),
    )  # fmt: skip
    for pattern, joined in _CONTRACTIONS if language == "pt" else ():
        text = pattern.sub(joined, text)
    return text[0].upper() + text[1:]


def near_duplicate(
    body: list[str], topic: Topic, language: str, choice: random.Random
) -> list[str]:
    """The same article with one sentence replaced and, half of the time, another dropped."""
    edited = [part.split(". ") for part in body]
    edited[choice.randrange(len(edited))][-1] = sentence(topic, language, choice)
    longest = max(edited, key=len)
    if choice.random() < 0.5 and len(longest) > 3:
        del longest[1]
    return [". ".join(parts) for parts in edited]


def spam(language: str, choice: random.Random) -> list[str]:
    """Paragraphs of slogans, repeated and mostly in capitals."""
    slogans = lexicon(language)["slogans"]
    return [
        " ".join(_shouted(choice.choice(slogans), choice) for _ in range(choice.randint(12, 40)))
        for _ in range(choice.randint(2, 4))
    ]


def _shouted(slogan: str, choice: random.Random) -> str:
    return (slogan.upper() if choice.random() < 0.6 else slogan) + "!" * choice.randint(1, 4)
