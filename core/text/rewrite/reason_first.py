"""Recipe reason-first by rules: conclusions that stand before their reasoning are moved behind it.

A conclusion is a sentence that announces a result ("The answer is", "A resposta é", "Resultado:")
or draws one right behind a question ("Therefore", "Portanto"); its reasoning is the run of steps
that follows it ("First", "Primeiro", "Because", an equation), in its line and in the lines after
it, up to the next question or conclusion. Only such pairs are touched: sentences are permuted, none
is dropped or changed, what is already in order stays, and a text without the pattern comes back as
it was, byte for byte. Rewriting twice is rewriting once. Words: English and Portuguese.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sabia.core.text.sentences import Line, join_lines, split_line, split_lines

VERSION = 1
_MARKS = r"^[\s*_#>\-–—•(\[\"“'«]*"
_FOUND = (
    r"(?!\s*(?:\w+\s+){0,2}(?:found|obtained|computed|calculated|given|reached|obtid|encontrad"
    r"|calculad|dad[oa] p|achad))"
)
_ANNOUNCES = re.compile(
    _MARKS
    + r"(?:(?:so|thus|hence|therefore|then|então|assim|logo|portanto)\b,?\s+)?"
    + r"(?:(?:the|our|my|its|a|o|sua|seu|nossa|nosso)\s+)?"
    + r"(?:final\s+|correct\s+|right\s+)?"
    + r"(?:answer|result|resposta|resultado|gabarito|solution\s+is|solução\s+é|conclusão\s+é)"
    + r"(?:\s+(?:final|correta|correto|certa|certo))?"
    + r"(?:[*_]*\s*[:=]|\s+(?:is|was|equals|é|era|foi|será)\b|(?<=is)\b|(?<=é)\b)"
    + _FOUND,
    re.IGNORECASE,
)
_DRAWS = re.compile(
    _MARKS + r"(?:therefore|thus|hence|consequently|in conclusion|portanto|logo|por conseguinte"
    r"|consequentemente|em conclusão|conclui-se)\b",
    re.IGNORECASE,
)
_QUESTION = re.compile(r"\?[\"'”’»)\]*_]*$")
_EXERCISE = re.compile(
    _MARKS + r"(?:exercise|problem|question|example|exercício|problema|questão|pergunta|exemplo)"
    r"\s*\d*\s*[:.)]",
    re.IGNORECASE,
)
_OPENS = re.compile(
    _MARKS + r"(?:first(?:ly)?|step|because|since|to (?:see|get|find|solve|show|reach)"
    r"|let(?:'s| us| me)|here(?:'s| is) (?:why|how)|this is because|the reason"
    r"|we (?:start|begin|first|add|subtract|multiply|divide|have|know)|(?:begin|start) (?:by|with)"
    r"|(?:explanation|reasoning|solution|working|proof|steps|explicação|justificativa|resolução"
    r"|solução|raciocínio|demonstração|passos)\s*:"
    r"|primeir[oa](?:mente)?|passo|porque|pois|já que|uma vez que|visto que"
    r"|para (?:ver|obter|achar|resolver|chegar|mostrar|encontrar)|vamos|vejamos|veja (?:por|como)"
    r"|isso (?:acontece|ocorre) porque|o motivo|come(?:ce|çamos|çando)|somamos|subtraímos"
    r"|multiplicamos|dividimos|\(?\d{1,2}[.)]\s)",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    _MARKS + r"(?:second(?:ly)?|third(?:ly)?|then|next|now|after|finally|lastly|so\b|also|note"
    r"|recall|given|as\b|we\b|that|this|it\b|write|carry|add|subtract|multiply|divide"
    r"|segundo|terceiro|depois|em seguida|a seguir|agora|por fim|finalmente|por último|então|assim"
    r"|note|observe|lembre|dado|como\b|temos|isso|escreva|some|subtraia|multiplique|divida)\b",
    re.IGNORECASE,
)
_EQUATION = re.compile(r"\d\s*[-+−–×x*/÷·^]\s*\d[^=?]*=\s*[-−]?\d", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_ANYWHERE = re.compile(
    r"answer|result|resposta|gabarito|solution is|solução é|conclusão é|therefore|thus|hence"
    r"|consequently|in conclusion|portanto|logo|por conseguinte|em conclusão|conclui-se",
    re.IGNORECASE,
)
MAX_PASSES = 16
ASIDE = 2  # sentences without a sign of reasoning that a run may hold in a row

QUESTION, CONCLUSION, DRAWN, OPENING, STEP, OTHER = range(6)


@dataclass(frozen=True)
class Conclusion:
    """A conclusion at (line, place) and its reasoning: characters before it, and the run behind it,
    which ends with sentence `end_place` of line `end_line` (nothing behind: after_chars 0)."""

    line: int
    place: int
    before_chars: int
    after_chars: int
    end_line: int
    end_place: int

    @property
    def position(self) -> float | None:
        """Share of its reasoning that stands before it, 0 to 1; None where it has none."""
        total = self.before_chars + self.after_chars
        return self.before_chars / total if total else None


@dataclass(frozen=True)
class Rewritten:
    """The text and where its conclusions stood before and stand after (0 to 1 each)."""

    text: str
    moved: int
    before: tuple[float, ...]
    after: tuple[float, ...]


def rewrite(text: str) -> Rewritten:
    """Moves every conclusion that stands before its reasoning; see the module's promise."""
    if not _ANYWHERE.search(text):
        return Rewritten(text, 0, (), ())
    lines, breaks = split_lines(text)
    found = list(conclusions(lines))
    before, moved, new = _positions(found), 0, text
    for _ in range(MAX_PASSES):  # a move can bring another conclusion in front of the reasoning
        wrong = [one for one in reversed(found) if one.after_chars and not one.before_chars]
        count = sum(_move(lines, breaks, one) for one in wrong)
        if not count:
            return Rewritten(new, moved, before, _positions(found))
        new, moved = join_lines(lines, breaks), moved + count
        lines, breaks = split_lines(new)
        found = list(conclusions(lines))
    return Rewritten(text, 0, before, before)  # conclusions without end: not a text to put right


def positions(text: str) -> tuple[float, ...]:
    """For each conclusion with reasoning: the share of the reasoning that stands before it."""
    if not _ANYWHERE.search(text):
        return ()
    return _positions(list(conclusions(split_lines(text)[0])))


def _positions(found: list[Conclusion]) -> tuple[float, ...]:
    shares = (one.position for one in found)
    return tuple(share for share in shares if share is not None)


def kind_of(sentence: str) -> int:
    """QUESTION, CONCLUSION, DRAWN (a conclusion by its connective), OPENING, STEP or OTHER."""
    if _QUESTION.search(sentence) or _EXERCISE.match(sentence):
        return QUESTION
    if _ANNOUNCES.match(sentence):
        return CONCLUSION
    if _DRAWS.match(sentence):
        return DRAWN
    if _OPENS.match(sentence) or _EQUATION.search(sentence):
        return OPENING
    return STEP if _GOES_ON.match(sentence) else OTHER


def conclusions(lines: list[Line]) -> Iterator[Conclusion]:
    """All conclusions in order, each with the reasoning that belongs to it."""
    kinds = [[kind_of(sentence) for sentence in line.sentences] for line in lines]
    flat = [(i, j) for i, line in enumerate(lines) for j in range(len(line.sentences))]
    pending, after_question, at = 0, False, 0
    while at < len(flat):
        i, j = flat[at]
        kind, at = kinds[i][j], at + 1
        if kind in (CONCLUSION, DRAWN):
            may_move = not pending and (kind == CONCLUSION or after_question)
            run = _run(lines, kinds, i, j) if may_move else []
            size = sum(len(lines[a].sentences[b]) for a, b in run)
            end = run[-1] if run else (i, j)
            yield Conclusion(i, j, pending, size, *end)
            pending, at = 0, at + len(run)
        elif kind == QUESTION:
            pending = 0
        elif kind in (OPENING, STEP) and (pending or kind == OPENING):
            pending += len(lines[i].sentences[j])
        after_question = kind == QUESTION


def _run(lines: list[Line], kinds: list[list[int]], i: int, j: int) -> list[tuple[int, int]]:
    """Sentences behind conclusion (i, j) that are its reasoning, in order; [] if none are."""
    here = _run_in_line(lines[i], kinds[i], j + 1)
    if here < j + 1 and j + 1 < len(kinds[i]):
        return []
    run = [(i, place) for place in range(j + 1, here + 1)]
    if here == len(kinds[i]) - 1:  # reached the end of the line: it may go on in the next ones
        for number in range(i + 1, len(lines)):
            if not _goes_on_with(lines[number], kinds[number], _text(lines, run)):
                break
            run += [(number, place) for place in range(len(kinds[number]))]
    return run


def _run_in_line(line: Line, kinds: list[int], start: int) -> int:
    """Place of the last sentence of the run that begins at `start`; start - 1 if none does."""
    if start >= len(kinds) or kinds[start] != OPENING:
        return start - 1
    last, aside = start, 0
    for place in range(start + 1, len(kinds)):
        if kinds[place] in (QUESTION, CONCLUSION, DRAWN):
            break
        sign = kinds[place] in (OPENING, STEP) or _DIGIT.search(line.sentences[place])
        last, aside = (place, 0) if sign else (last, aside + 1)
        if aside > ASIDE:
            break
    return last


def _text(lines: list[Line], run: list[tuple[int, int]]) -> str:
    return " ".join(lines[i].sentences[j] for i, j in run)


def _goes_on_with(line: Line, kinds: list[int], run: str) -> bool:
    """Whether a whole line goes on with the reasoning `run`, or opens it where that is empty.

    Among reckoning, a mere "Next" or "Then" without a number is more likely another subject.
    """
    if not kinds or any(kind in (QUESTION, CONCLUSION, DRAWN) for kind in kinds):
        return False
    step = kinds[0] == STEP and (not _DIGIT.search(run) or bool(_DIGIT.search(str(line))))
    return kinds[0] == OPENING or (bool(run) and step)


def _move(lines: list[Line], breaks: list[str], found: Conclusion) -> bool:
    """Moves one conclusion behind its run, in place; False where no form keeps all sentences."""
    line = lines[found.line]
    if found.end_line == found.line:
        order = list(line.sentences)
        order.insert(found.end_place, order.pop(found.place))
        whole = replace(line, sentences=tuple(order))
        if _same_sentences([line], [whole]):
            lines[found.line] = whole
            return True
    return _move_to_own_line(lines, breaks, found)


def _move_to_own_line(lines: list[Line], breaks: list[str], found: Conclusion) -> bool:
    """The conclusion becomes a line of its own behind the last line of the run."""
    line, end = lines[found.line], found.end_line
    alone = Line("", (line.sentences[found.place],), (), "")
    if len(line.sentences) == 1:  # it already is: the line moves with the break behind it
        lines.insert(end, lines.pop(found.line))
        breaks.insert(end - 1, breaks.pop(found.line))
        return True
    if end == found.line and found.end_place != len(line.sentences) - 1:
        return False
    rest = _without(line, found.place)
    if not _same_sentences([line], [rest, alone]):
        return False
    lines[found.line] = rest
    lines.insert(end + 1, alone)
    breaks.insert(end, breaks[found.line] if end > found.line else "\n")
    return True


def _without(line: Line, place: int) -> Line:
    sentences = line.sentences[:place] + line.sentences[place + 1 :]
    gap = min(place, len(line.gaps) - 1)
    return replace(line, sentences=sentences, gaps=line.gaps[:gap] + line.gaps[gap + 1 :])


def _same_sentences(old: list[Line], new: list[Line]) -> bool:
    """Whether the new lines, read again, hold the same sentences (a lost full stop joins two)."""
    wanted = sorted(sentence for line in old for sentence in line.sentences)
    return wanted == sorted(s for line in new for s in split_line(str(line)).sentences)
