"""Recipe reason-first by rules: conclusions that precede their reasoning are moved after it.

A conclusion is a sentence that announces a result ("The answer is", "A resposta é", "Resultado:"),
or one that draws a result directly after a question ("Therefore", "Portanto"). Its reasoning is the
sequence of steps that follows it ("First", "Primeiro", "Because", an equation), in its line and in
the next lines, up to the next question or conclusion. Only such pairs change, and only the order of
sentences: none is dropped or edited, and a text without the pattern stays the same byte for byte.
Rewriting is idempotent. The patterns are English and Portuguese.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sabia.core.text.sentences import SplitLine, join_lines, split_line, split_lines

VERSION = 1
_MARKS = r"^[\s*_#>\-–—•(\[\"“'«]*"
_PAST_PARTICIPLE = (
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
    + _PAST_PARTICIPLE,
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
_CONTINUES = re.compile(
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
MAX_OTHER = 2  # consecutive sentences without a sign of reasoning that a run may hold

QUESTION, CONCLUSION, DRAWN, OPENING, STEP, OTHER = range(6)


@dataclass(frozen=True)
class Conclusion:
    """Sentence `sentence` of line `line`, with the characters of its reasoning before and after it.

    The reasoning after it ends with sentence `end_sentence` of line `end_line`.
    """

    line: int
    sentence: int
    before_chars: int
    after_chars: int
    end_line: int
    end_sentence: int

    @property
    def position(self) -> float | None:
        """Share of its reasoning that precedes it, 0 to 1; None where it has none."""
        total = self.before_chars + self.after_chars
        return self.before_chars / total if total else None


@dataclass(frozen=True)
class Rewritten:
    """The new text, and the positions of the conclusions before and after (0 to 1 each)."""

    text: str
    moved: int
    before: tuple[float, ...]
    after: tuple[float, ...]


def rewrite(text: str) -> Rewritten:
    """Move every conclusion that precedes its reasoning; see the module's docstring."""
    if not _ANYWHERE.search(text):
        return Rewritten(text, 0, (), ())
    lines, breaks = split_lines(text)
    located = list(conclusions(lines))
    before, moved, new = _positions(located), 0, text
    for _ in range(MAX_PASSES):  # a move can bring another conclusion before the reasoning
        misplaced = [one for one in reversed(located) if one.after_chars and not one.before_chars]
        count = sum(_move(lines, breaks, one) for one in misplaced)
        if not count:
            return Rewritten(new, moved, before, _positions(located))
        new, moved = join_lines(lines, breaks), moved + count
        lines, breaks = split_lines(new)
        located = list(conclusions(lines))
    return Rewritten(text, 0, before, before)  # no fixed point: leave the text as it is


def positions(text: str) -> tuple[float, ...]:
    """For each conclusion with reasoning: the share of the reasoning that precedes it."""
    if not _ANYWHERE.search(text):
        return ()
    return _positions(list(conclusions(split_lines(text)[0])))


def _positions(located: list[Conclusion]) -> tuple[float, ...]:
    shares = (one.position for one in located)
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
    return STEP if _CONTINUES.match(sentence) else OTHER


def conclusions(lines: list[SplitLine]) -> Iterator[Conclusion]:
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


def _run(lines: list[SplitLine], kinds: list[list[int]], i: int, j: int) -> list[tuple[int, int]]:
    """(line, sentence) of the reasoning after conclusion (i, j), in order; [] without any."""
    here = _run_in_line(lines[i], kinds[i], j + 1)
    if here < j + 1 and j + 1 < len(kinds[i]):
        return []
    run = [(i, index) for index in range(j + 1, here + 1)]
    if here == len(kinds[i]) - 1:  # it may continue in the next lines
        for number in range(i + 1, len(lines)):
            reasoning = " ".join(lines[a].sentences[b] for a, b in run)
            if not _continues(lines[number], kinds[number], reasoning):
                break
            run += [(number, index) for index in range(len(kinds[number]))]
    return run


def _run_in_line(line: SplitLine, kinds: list[int], start: int) -> int:
    """Index of the last sentence of the run that begins at `start`; start - 1 if none does."""
    if start >= len(kinds) or kinds[start] != OPENING:
        return start - 1
    last, others = start, 0
    for index in range(start + 1, len(kinds)):
        if kinds[index] in (QUESTION, CONCLUSION, DRAWN):
            break
        sign = kinds[index] in (OPENING, STEP) or _DIGIT.search(line.sentences[index])
        last, others = (index, 0) if sign else (last, others + 1)
        if others > MAX_OTHER:
            break
    return last


def _continues(line: SplitLine, kinds: list[int], run: str) -> bool:
    """Whether a whole line continues the reasoning `run`, or opens it where `run` is empty.

    After a calculation, a line that only begins with "Next" or "Then" and has no number probably
    changes the subject.
    """
    if not kinds or any(kind in (QUESTION, CONCLUSION, DRAWN) for kind in kinds):
        return False
    step = kinds[0] == STEP and (not _DIGIT.search(run) or bool(_DIGIT.search(str(line))))
    return kinds[0] == OPENING or (bool(run) and step)


def _move(lines: list[SplitLine], breaks: list[str], conclusion: Conclusion) -> bool:
    """Move one conclusion after its reasoning, in place; False where a sentence would be lost."""
    line = lines[conclusion.line]
    if conclusion.end_line == conclusion.line:
        order = list(line.sentences)
        order.insert(conclusion.end_sentence, order.pop(conclusion.sentence))
        whole = replace(line, sentences=tuple(order))
        if _same_sentences([line], [whole]):
            lines[conclusion.line] = whole
            return True
    return _move_to_own_line(lines, breaks, conclusion)


def _move_to_own_line(lines: list[SplitLine], breaks: list[str], conclusion: Conclusion) -> bool:
    """Make the conclusion a line of its own after the last line of its reasoning."""
    line, end = lines[conclusion.line], conclusion.end_line
    alone = SplitLine("", (line.sentences[conclusion.sentence],), (), "")
    if len(line.sentences) == 1:  # it already is one: move the line with the break after it
        lines.insert(end, lines.pop(conclusion.line))
        breaks.insert(end - 1, breaks.pop(conclusion.line))
        return True
    if end == conclusion.line and conclusion.end_sentence != len(line.sentences) - 1:
        return False
    index, gap = conclusion.sentence, min(conclusion.sentence, len(line.gaps) - 1)
    rest = replace(
        line,
        sentences=line.sentences[:index] + line.sentences[index + 1 :],
        gaps=line.gaps[:gap] + line.gaps[gap + 1 :],
    )
    if not _same_sentences([line], [rest, alone]):
        return False
    lines[conclusion.line] = rest
    lines.insert(end + 1, alone)
    breaks.insert(end, breaks[conclusion.line] if end > conclusion.line else "\n")
    return True


def _same_sentences(old: list[SplitLine], new: list[SplitLine]) -> bool:
    """Whether the new lines, split again, hold the same sentences (two can merge into one)."""
    expected = sorted(sentence for line in old for sentence in line.sentences)
    return expected == sorted(s for line in new for s in split_line(str(line)).sentences)
