"""Split text into lines and sentences, and join them again without losing a byte.

A sentence ends with . ! ? or … (and closing quotes or brackets) before white space and a capital,
digit or opening mark. Abbreviations, decimal numbers and the number of a list item do not end one.
All parts joined are always the text.
"""

import re
from dataclasses import dataclass

LINE_BREAK = re.compile(r"([ \t\r\f\v]*\n\s*)")
SENTENCE_END = re.compile(
    r"(?:[.!?…]+[\"'”’»)\]*_]*)(\s+)(?=[\"'“‘«(\[*_¿¡]*[^\W_a-zà-öø-ÿ]|[\"'“‘«(\[¿¡])"
)
_ABBREVIATED = """
dr dra mr mrs ms sr sra prof profa st jr vs etc cf fig figs eq eqs no nos vol ed eds art arts approx
aprox ex obs pág págs pag pags cap caps inc ltd al e.g i.e p.ex
"""
ABBREVIATIONS = frozenset(_ABBREVIATED.split())
LAST_WORD = re.compile(r"([^\s(\[“\"]*)\.$")
LIST_NUMBER = re.compile(r"\(?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,5})[.)]$")


@dataclass(frozen=True)
class SplitLine:
    """`lead + s[0] + gaps[0] + s[1] + … + tail`; no sentences in an empty line."""

    lead: str
    sentences: tuple[str, ...]
    gaps: tuple[str, ...]
    tail: str

    def __str__(self) -> str:
        parts = [self.lead]
        for number, sentence in enumerate(self.sentences):
            parts += [self.gaps[number - 1] if number else "", sentence]
        return "".join([*parts, self.tail])


def split_lines(text: str) -> tuple[list[SplitLine], list[str]]:
    """(lines, the breaks between them: one fewer)."""
    parts = LINE_BREAK.split(text)
    return [split_line(part) for part in parts[::2]], parts[1::2]


def join_lines(lines: list[SplitLine], breaks: list[str]) -> str:
    """The inverse of `split_lines`."""
    parts = [str(lines[0])]
    for line, line_break in zip(lines[1:], breaks, strict=True):
        parts += [line_break, str(line)]
    return "".join(parts)


def split_line(text: str) -> SplitLine:
    """The sentences of a text without line breaks."""
    body = text.strip()
    if not body:
        return SplitLine(text, (), (), "")
    lead = text[: len(text) - len(text.lstrip())]
    sentences: list[str] = []
    gaps, start = [], 0
    for end in SENTENCE_END.finditer(body):
        sentence = body[start : end.start(1)]
        if _is_unfinished(sentence, first=not sentences):
            continue
        sentences.append(sentence)
        gaps.append(end[1])
        start = end.end(1)
    sentences.append(body[start:])
    return SplitLine(lead, tuple(sentences), tuple(gaps), text[len(lead) + len(body) :])


def sentences(text: str) -> list[str]:
    """All sentences of a text in order."""
    return [sentence for line in split_lines(text)[0] for sentence in line.sentences]


def _is_unfinished(sentence: str, first: bool) -> bool:
    """Whether the stop at the end belongs to a list number, an abbreviation or an initial."""
    if first and LIST_NUMBER.fullmatch(sentence):
        return True
    match = LAST_WORD.search(sentence)
    word = match[1] if match else ""
    initial = len(word) == 1 and word.isupper() and word not in "AIEO"
    return match is not None and (word.lower() in ABBREVIATIONS or initial)
