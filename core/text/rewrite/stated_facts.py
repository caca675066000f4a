"""Dates and names that a text states, and those of them that another text does not state.

Dates are numeric (ISO, or three numbers with / . or -) or written with an English, Portuguese or
Spanish month; each is (year, month, day) with None for what is left out. Numeric dates of which the
order of day and month is not known have both readings. A year alone is a number from 1000 to 2099.

A name is a sequence of words with a capital, in any script that has capitals, with particles such
as "da" or "van" between them, in one line without punctuation. A capital at the start of a sentence
tells nothing, so that word belongs to the name only if the source has it as part of a name.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

Date = tuple[int | None, int | None, int | None]  # year, month, day

_MONTHS = (
    "january janeiro enero", "february fevereiro febrero", "march março marzo",
    "april abril", "may maio mayo", "june junho junio", "july julho julio",
    "august agosto", "september setembro septiembre setiembre", "october outubro octubre",
    "november novembro noviembre", "december dezembro diciembre",
)  # fmt: skip
MONTHS = {name: n for n, names in enumerate(_MONTHS, 1) for name in names.split()}
_MONTH = "|".join(sorted(MONTHS, key=len, reverse=True))
_YEAR = r"(?:1\d|20)\d\d"
_OF = r"(?:(?:de|del|do|of)[^\S\n]+)?"
_WRITTEN = re.compile(
    rf"(?<![\w.,/-])(?P<d1>\d{{1,2}})(?:st|nd|rd|th|[ºo°])?[^\S\n]+{_OF}(?P<m1>{_MONTH})\b"
    rf"(?:,?[^\S\n]+{_OF}(?P<y1>{_YEAR})(?!\d|[.,]\d))?"
    rf"|\b(?P<m2>{_MONTH})[^\S\n]+(?P<d2>\d{{1,2}})(?:st|nd|rd|th)?(?!\w|[.,:]\d)"
    rf"(?:,?[^\S\n]+(?P<y2>{_YEAR})(?!\d|[.,]\d))?"
    rf"|\b(?P<m3>{_MONTH}),?[^\S\n]+{_OF}(?P<y3>{_YEAR})(?!\d|[.,]\d)",
    re.IGNORECASE,
)
_NUMERIC = re.compile(
    r"(?<![\w.,/-])(\d{1,2})([/.-])(\d{1,2})\2(\d{4}|\d{2})(?![\w/]|[.,-]\d)", re.ASCII
)
_ISO = re.compile(r"(?<![\w.,/-])(\d{4})([-/])(\d{1,2})\2(\d{1,2})(?!\d|[.,/-]\d)", re.ASCII)
_BARE_YEAR = re.compile(rf"(?<![\w.,$€£])(?:{_YEAR})(?![\w%]|[.,]\d)", re.ASCII)
_DIGITS = re.compile(r"\d+")
_SOFT_BREAK = re.compile(r"[^\S\n]*\n[^\S\n]*(?!\n)")

_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
_LINE_END = re.compile(r"([^\W\d_]+)[^\S\n]*$", re.MULTILINE)
_POSSESSIVE = re.compile(r"['’]s$")
_PARTICLES = """
da das de del della den der des di do dos du el la las le los of ten ter van von
"""
PARTICLES = frozenset(_PARTICLES.split())
_STARTS = frozenset(".!?…:;\"'“”‘’«»()[]{}<>*_#|>-–—•¿¡`=/\\\n")  # what may open a sentence
CAPITAL_NOUNS = ("de", "lb")  # languages that write each noun with a capital


def dates(text: str) -> set[frozenset[Date]]:
    """The dates of a text; of each the readings that it has."""
    return {readings for *_, readings in _date_matches(text)}


def date_spans(text: str) -> list[tuple[int, int, frozenset[Date]]]:
    """(start, end, readings) of each date of a text, in order, without overlaps."""
    spans = list[tuple[int, int, frozenset[Date]]]()
    for one in sorted(_date_matches(text), key=lambda span: (span[0], -span[1])):
        if not spans or one[0] >= spans[-1][1]:
            spans.append(one)
    return spans


def _date_matches(text: str) -> Iterator[tuple[int, int, frozenset[Date]]]:
    for match in _WRITTEN.finditer(text):
        parts = match.groupdict()
        month = MONTHS[(parts["m1"] or parts["m2"] or parts["m3"]).lower()]
        day, year = parts["d1"] or parts["d2"], parts["y1"] or parts["y2"] or parts["y3"]
        date = (int(year) if year else None, month, int(day) if day else None)
        yield *match.span(), frozenset([date])
    for match in _ISO.finditer(text):
        yield *match.span(), frozenset([(int(match[1]), int(match[3]), int(match[4]))])
    for match in _NUMERIC.finditer(text):
        first, second, year = int(match[1]), int(match[3]), int(match[4])
        readings = ((year, second, first), (year, first, second))
        possible = [one for one in readings if one[1] <= 12]
        yield *match.span(), frozenset(possible or readings[:1])


def new_date(source: str, text: str) -> str:
    """The first date of `text` that `source` does not state, as text; empty without one.

    A date is stated if one of its readings agrees with one of a date of the source in all that it
    gives, so "May 2020" is stated by "3 May 2020".
    """
    stated = {one for wrapped in _lines_joined(source) for date in dates(wrapped) for one in date}
    missing = [
        min(date, key=_order)
        for date in dates(text)
        if not any(_within(reading, known) for reading in date for known in stated)
    ]
    if missing:
        return written(min(missing, key=_order))
    known_years = set(_DIGITS.findall(source)) | {str(one[0]) for one in stated}
    years = {match[0] for match in _BARE_YEAR.finditer(text)}
    short = {one[0] for one in stated if one[0] is not None and one[0] < 100}
    return min((y for y in years - known_years if int(y) % 100 not in short), default="")


def written(date: Date) -> str:
    """A date as YYYY-MM-DD, with - for what is not given."""
    year, month, day = date
    return "-".join(
        "?" if part is None else f"{part:0{width}d}"
        for part, width in ((year, 4), (month, 2), (day, 2))
    )


def _order(date: Date) -> tuple[int, ...]:
    return tuple(-1 if part is None else part for part in date)


def _within(stated: Date, known: Date) -> bool:
    """Whether all that `stated` gives is that of `known`; a year of two digits ends one of four."""
    year, known_year = stated[0], known[0]
    if year is not None and known_year is not None and min(year, known_year) < 100:
        year, known_year = year % 100, known_year % 100
    pairs = ((year, known_year), (stated[1], known[1]), (stated[2], known[2]))
    return all(given is None or given == there for given, there in pairs)


def _lines_joined(text: str) -> tuple[str, str]:
    """The text, and the text with single line breaks as spaces."""
    return text, _SOFT_BREAK.sub(" ", text)


def _names(text: str) -> Iterator[tuple[list[str], bool]]:
    """(words of a name, whether its first word may be the start of a sentence), in order."""
    words: list[str] = []
    particles: list[str] = []
    initial, end = True, 0
    for match in _WORD.finditer(text):
        word, gap = _POSSESSIVE.sub("", match[0]), text[end : match.start()]
        joined = bool(gap) and not gap.strip(" \t\u00a0")
        if not joined and words:
            yield words, initial
            words = []
        if not joined:
            particles = []
        if word[0].isupper():
            if not words:
                initial = not end or any(sign in _STARTS for sign in gap)
                particles = []
            words += [*particles, word]
            particles = []
        elif words and word in PARTICLES:
            particles.append(word)
        else:
            if words:
                yield words, initial
            words, particles = [], []
        # a possessive ends a name
        if words and word != match[0]:
            yield words, initial
            words, particles = [], []
        end = match.end()
    if words:
        yield words, initial


@dataclass(frozen=True)
class _Known:
    """What a source has: its words in sequence, its names, and where lines end and begin."""

    sequence: str
    names: list[list[str]]
    ends: frozenset[str]  # last words of lines without punctuation
    starts: frozenset[str]  # first words of sentences

    def states(self, words: list[str]) -> bool:
        """Whether a name is stated, whole or as ends of lines before starts of sentences."""
        if self._has(words):
            return True
        if not all(f" {word} " in self.sequence for word in words):
            return False
        cuts = [0]  # where a stated part may begin, after stated parts
        for at in range(1, len(words)):
            joint = words[at - 1] in self.ends and words[at] in self.starts
            if joint and any(self._has(words[cut:at]) for cut in reversed(cuts)):
                cuts.append(at)
        return any(self._has(words[cut:]) for cut in reversed(cuts))

    def _has(self, words: list[str]) -> bool:
        in_sequence = f" {' '.join(words)} " in self.sequence
        return in_sequence or any(_in_order(words, name) for name in self.names if words[0] in name)


def new_names(source: str, text: str) -> Iterator[list[str]]:
    """The names of `text`, as words, that `source` does not state.

    A name is stated if the source has its words in sequence in any case, or if they are part of one
    name of the source in that order. Where a reordered line has no stop at its end, the name there
    and the start of the next sentence are two.
    """
    source, text = (unicodedata.normalize("NFC", one) for one in (source, text))
    every = [_POSSESSIVE.sub("", word).casefold() for word in _WORD.findall(source)]
    of_lines, of_text = (
        [([word.casefold() for word in words], initial) for words, initial in _names(one)]
        for one in _lines_joined(source)
    )
    in_names = [words for words, _ in (*of_lines, *of_text)]
    ends = frozenset(match[1].casefold() for match in _LINE_END.finditer(source))
    starts = frozenset(words[0] for words, initial in of_lines if initial)
    known = _Known(f" {' '.join(every)} ", in_names, ends, starts)
    within = {word for words in in_names for word in words}
    lower = {word for word in _WORD.findall(source) if word[0].islower()}
    for words, initial in _names(text):
        folded = [word.casefold() for word in words]
        if initial and (folded[0] not in within or folded[0] in lower):
            words, folded = _without_start(words), _without_start(folded)
        if folded and len("".join(words)) > 1 and not known.states(folded):
            yield words


def _without_start(words: list[str]) -> list[str]:
    """The name without its first word and the particles that follow it."""
    rest = words[1:]
    while rest and rest[0] in PARTICLES:
        rest = rest[1:]
    return rest


def _in_order(words: list[str], name: list[str]) -> bool:
    """Whether the words are in the name in that order."""
    rest = iter(name)
    return all(word in rest for word in words)


def new_name(source: str, text: str) -> str:
    """The first name of `text` that `source` does not state; empty without one.

    In a language that writes each noun with a capital, a single word is no name.
    """
    single = ""
    for words in new_names(source, text):
        if len(words) > 1:
            return " ".join(words)
        single = single or words[0]
    if single:
        from sabia.core.text.classify.language import names_of

        if names_of([source])[0] in CAPITAL_NOUNS:
            return ""
    return single
