"""What several answers to one question agree on, segment by segment.

A segment is a sentence, a line without one, or a fenced block. A model supports a segment of
another one's answer if the segment of its own that is most similar has the same facts: numbers with
their signs and units, dates, comparisons and operations in the same order, as many negations, and
no other name. Where there are facts, one of the two must have all content words of the other, so
that a number is not taken for that of another thing. Similarity is the F1 score of the words,
numbers left out (as in SQuAD, Rajpurkar et al. 2016). A number with one separator before three
digits (1,234 or 1.234) has no certain value and is equal to the same notation only; words such as
"three" are numbers, too.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from sabia.core.judge.numbers import readings
from sabia.core.text.rewrite.stated_facts import date_spans, new_names
from sabia.core.text.sentences import split_lines

_FENCE = re.compile(r"\s*(```|~~~)")
_MARKER = re.compile(r"(\(?)(\d{1,3})([.)]\s+)(?=\S)")  # of an item of a numbered list
_BULLETS = re.compile(r"\s*(?:[-*+>•–#]+\s+)+")
_WORD = re.compile(
    r"(?<!\w)[-+\u2212]?(?=\d|\.\d)[.\w]\w*(?:[.,/:]\d\w*)*|\w+|[%°$€£¥+×÷=<>≤≥≠^\u2212]"
)
_COUNTED = (
    "zero", "", "two dois duas dos", "three três tres", "four quatro cuatro", "five cinco",
    "six seis", "seven sete siete", "eight oito ocho", "nine nove nueve", "ten dez diez",
    "eleven onze once", "twelve doze doce", "thirteen treze trece", "fourteen catorze quatorze "
    "catorce", "fifteen quinze quince", "sixteen dezesseis dezasseis dieciséis", "seventeen "
    "dezessete dezassete diecisiete", "eighteen dezoito dieciocho", "nineteen dezenove dezanove "
    "diecinueve", "twenty vinte veinte",
)  # fmt: skip
_LARGE = {
    30: "thirty trinta treinta", 40: "forty quarenta cuarenta", 50: "fifty cinquenta cincuenta",
    60: "sixty sessenta sesenta", 70: "seventy setenta", 80: "eighty oitenta ochenta",
    90: "ninety noventa", 100: "hundred hundreds cem cento cien ciento", 1000: "thousand thousands "
    "mil", 10**6: "million millions milhão milhões millón millones", 10**9: "billion billions "
    "bilhão bilhões", 12: "dozen dozens dúzia dúzias docena", 0.5: "half metade meio meia mitad",
    0.25: "quarter", 1: "once", 2: "twice double dobro doble", 3: "triple triplo",
}  # fmt: skip
NUMBERS = {word: float(n) for n, words in enumerate(_COUNTED) for word in words.split()} | {
    word: float(value) for value, words in _LARGE.items() for word in words.split()
}
_UNITS = """
km m cm mm mi mile miles foot feet ft inch inches yard yards metre metres meter meters kilometre
kilometres kilometer kilometers metro metros quilômetro quilômetros kg g mg ton tons tonne tonnes lb
pound pounds ounce ounces grama gramas quilo quilos tonelada toneladas l ml litre litres liter
liters litro litros second seconds minute minutes hour hours day days week weeks month months year
years century centuries segundo segundos minuto minutos hora horas dia dias semana semanas mês meses
ano anos século séculos año años c f k degrees graus w kw mw gw kwh v hz khz mhz ghz bit bits byte
bytes kb mb gb tb percent usd eur brl dollar dollars euro euros real reais peso pesos cents
"""
UNITS = frozenset(_UNITS.split())
_NEGATIONS = """
not no t never none nor neither without cannot não nunca nem nenhum nenhuma sem jamais ni sin ningún
ninguna
"""  # t: of isn't
NEGATIONS = frozenset(_NEGATIONS.split())
_FUNCTION = """
the and for was were are has had its with from this that then than have been will also each all que
para com uma por mas são foi tem como los las una del con
"""
FUNCTION_WORDS = frozenset(_FUNCTION.split())
CONTENT_CHARS = 3  # of a shorter word
_PLAIN = re.compile(r"[-+\u2212]?(?:\d[\d.,]*|\.\d+)(?:e[-+]?\d+)?(?:/\d+)?")
Fact = str | float | frozenset[tuple[int | None, ...]]


@dataclass(frozen=True)
class Segment:
    """`text`, and the white space `before` it. marker: the number of an item of a list in it."""

    before: str
    text: str
    marker: str = ""

    @cached_property
    def body(self) -> str:
        """The text without bullets and without the number of a list item."""
        text = self.text[_bullets(self.text) :]
        marked = _MARKER.match(text) if self.marker else None
        return text[marked.end() :] if marked else text

    @cached_property
    def undated(self) -> str:
        """The body with 0 for each date, whose month is no name."""
        text, at = "", 0
        for start, end, _ in date_spans(self.body):
            text, at = f"{text}{self.body[at:start]}0", end
        return text + self.body[at:]

    @cached_property
    def _read(self) -> tuple[Counter[str], tuple[Fact, ...]]:
        words, facts = Counter[str](), list[Fact]()
        at, number_end = 0, -1
        for start, end, date in [*date_spans(self.body), (len(self.body), len(self.body), None)]:
            for match in _WORD.finditer(self.body, at, start):
                word = match[0].casefold()
                between = self.body[number_end : match.start()] if number_end >= 0 else "."
                fact = _fact(word, follows=not between.strip(" -\u00a0\u202f"))
                if fact is None:
                    words[word] += 1
                else:
                    facts.append(fact)
                    number_end = match.end()
            if date is not None:
                facts.append(date)
            at = end
        return words, tuple(facts)

    @property
    def words(self) -> Counter[str]:
        """Its words, folded, without those that are numbers or their units."""
        return self._read[0]

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Its numbers, units, operations and dates, in order."""
        return self._read[1]

    @cached_property
    def content(self) -> frozenset[str]:
        """Its words that name something."""
        long = {word for word in self.words if len(word) >= CONTENT_CHARS}
        return frozenset(long - FUNCTION_WORDS)

    @cached_property
    def negations(self) -> int:
        """How many words negate."""
        return sum(count for word, count in self.words.items() if word in NEGATIONS)


def _fact(word: str, follows: bool) -> Fact | None:
    """A word as a number, a unit or a sign; None for any other. follows: a number, directly."""
    if word in NUMBERS:
        return NUMBERS[word]
    if any(sign.isnumeric() for sign in word):
        values = readings(word) if _PLAIN.fullmatch(word) else set()
        return values.pop() if len(values) == 1 else word
    if not word.replace("_", "").isalpha():
        return word if not word.isalnum() else None
    return word if follows and word in UNITS else None


def _bullets(text: str) -> int:
    marked = _BULLETS.match(text)
    return marked.end() if marked else 0


def segments(text: str) -> list[Segment]:
    """The segments of an answer in order; `before` and `text` joined are the answer, but for white
    space at its end."""
    made = list[Segment]()
    lines, breaks = split_lines(text.rstrip())
    before, fence = "", ""
    for line, gap in zip(lines, [*breaks, ""], strict=True):
        opened = _FENCE.match(str(line))
        if fence:
            last = made[-1]
            made[-1] = replace(last, text=f"{last.text}{before}{line}")
            fence = "" if opened and opened[1] == fence else fence
            before = gap
            continue
        if opened:
            made.append(Segment(before + line.lead, str(line).strip()))
            fence, before = opened[1], line.tail + gap
            continue
        for sentence, space in zip(line.sentences, (line.lead, *line.gaps), strict=False):
            made.append(Segment(before + space, sentence))
            before = ""
        before += line.tail + gap if line.sentences else str(line) + gap
    return _with_markers(made)


def _with_markers(made: list[Segment]) -> list[Segment]:
    """The segments, with the numbers of items of lists: those of lines that count up."""
    at_start = [n for n, one in enumerate(made) if not n or "\n" in one.before]
    marked = [(n, _MARKER.match(made[n].text, _bullets(made[n].text))) for n in at_start]
    items = [(n, int(match[2])) for n, match in marked if match]
    runs = groupby(enumerate(items), key=lambda pair: pair[1][1] - pair[0])
    for run in (list(group) for _, group in runs):
        for _, (n, number) in run if len(run) > 1 else []:
            made[n] = replace(made[n], marker=str(number))
    return made


@dataclass(frozen=True)
class Limits:
    """quorum: how many models must support a segment. similarity: the least of two segments that
    say the same. names: whether names must agree."""

    quorum: int
    similarity: float
    names: bool


@dataclass(frozen=True)
class Supported:
    """A segment of the answer that was chosen, and the models that support it, in their order."""

    text: str
    models: tuple[str, ...]
    kept: bool


@dataclass(frozen=True)
class Agreed:
    """What the models agree on: the model whose answer was chosen, and the segments of that answer.

    text: of those that are kept. share: that of their characters.
    """

    model: str
    text: str
    segments: tuple[Supported, ...]
    share: float = field(default=0.0)


def similarity(one: Segment, two: Segment) -> float:
    """F1 of the words, 0 to 1; segments of no word are equal."""
    total = one.words.total() + two.words.total()
    return 2 * (one.words & two.words).total() / total if total else 1.0


def supports(segment: Segment, answer: Sequence[Segment], limits: Limits) -> bool:
    """Whether the segment of an answer that is most similar, or one of several, says the same."""
    total = segment.words.total()
    best, nearest = limits.similarity, list[Segment]()
    for other in answer:
        count = other.words.total()
        if 2 * min(total, count) < best * (total + count):
            continue
        value = similarity(segment, other)
        if value > best:
            best, nearest = value, [other]
        elif value == best:
            nearest.append(other)
    return any(_same(segment, other, limits) for other in nearest)


def _same(one: Segment, two: Segment, limits: Limits) -> bool:
    if one.facts != two.facts or one.negations != two.negations:
        return False
    if not (one.words or one.facts):
        return False
    if one.facts and one.content - two.content and two.content - one.content:
        return False
    pairs = ((one.undated, two.undated), (two.undated, one.undated)) if limits.names else ()
    return not any(True for source, text in pairs for _ in new_names(source, text))


def agree(answers: Mapping[str, str], limits: Limits) -> Agreed:
    """What a quorum supports of the answer, by model, of which most characters are kept; of equal
    ones, the first."""
    split = {model: segments(text) for model, text in answers.items()}
    made = [_supported(model, split, limits) for model in split]
    return max(made, key=lambda one: sum(len(s.text) for s in one.segments if s.kept))


def _supported(model: str, split: Mapping[str, Sequence[Segment]], limits: Limits) -> Agreed:
    judged = list[Supported]()
    for segment in split[model]:
        models = tuple(
            name
            for name, answer in split.items()
            if name == model or supports(segment, answer, limits)
        )
        judged.append(Supported(segment.text, models, len(models) >= limits.quorum))
    kept = sum(len(one.text) for one in judged if one.kept)
    total = sum(len(one.text) for one in judged)
    text = "".join(_joined(split[model], [one.kept for one in judged]))
    return Agreed(model, text, tuple(judged), kept / max(total, 1))


def _joined(split: Sequence[Segment], kept: Sequence[bool]) -> Iterator[str]:
    """The kept segments with the widest white space between each two; items count up."""
    space, first, last, number = "", True, 0, 0
    for segment, keep in zip(split, kept, strict=True):
        space = max(segment.before, space, key=lambda gap: gap.count("\n"))
        if segment.marker:
            number = number if int(segment.marker) == last + 1 else int(segment.marker) - 1
            last = int(segment.marker)
        if not keep:
            continue
        text = segment.text
        if segment.marker:
            number += 1
            at = _bullets(text)
            text = text[:at] + _MARKER.sub(rf"\g<1>{number}\g<3>", text[at:], count=1)
        yield text if first else space + text
        space, first = "", False
