"""The source of a paragraph to Markdown: escaped text, code spans, formulas, line breaks.

Formulas are read from MathML: its annotation in TeX (or `alttext`), which KaTeX writes too, else
its elements (`mathml`); from the scripts of MathJax 2, and from the alternative text of images
whose class names TeX, as MediaWiki and WordPress write them.
"""

import re
from collections.abc import Iterator

from sabia.core.web.extraction.markdown import markup, mathml
from sabia.core.web.extraction.markdown.markup import MARKUP, attribute, closing, name_of, plain

_CODE = frozenset(("code", "kbd", "samp", "tt"))
_RAISED = frozenset(("sup", "sub"))
_LONGEST_RAISED = 40  # characters
_SPACE = re.compile(r"\s+")
_SPECIAL = re.compile(r"[\\`*_<&]")
_ESCAPED = re.compile(
    r"(\$\$[^$]++\$\$|\$(?=\S)[^$\n]++(?<=\S)\$(?!\d)"  # formulas stay
    r"|\\\((?:(?!\\[()]).)*+\\\)|\\\[(?:(?!\\[\[\]]).)*+\\\])"
    r"|`|(?<!\s)\*|\*(?!\s)|(?<!\w)_|_(?!\w)|<(?=[A-Za-z/!?])|&(?=#?\w+;)|\\(?=\||\Z)"
)
_LINE_START = re.compile(r"#{1,6}(?=\s|$)|~~~|=+$|[:| ]*-[-:| ]*$")
_TICKS = re.compile("`+")
_TEX_SCRIPT = re.compile(rb"""type\s*=\s*["']?\s*math/tex""", re.IGNORECASE)
_TEX_IMAGE = re.compile(r"(?:^|\s)(?:tex|latex|mwe-math-fallback-image\S*)(?:\s|$)")
_KATEX_DISPLAY = b"katex-display"
_ANNOTATION = re.compile(rb"<annotation\b[^<>]*\bapplication/x-tex\b[^<>]*>([^<]*+)", re.IGNORECASE)
_DISPLAY_STYLE = re.compile(r"\{\\(?:displaystyle|textstyle) ?(.*)\}", re.DOTALL)
_TEX_COMMENT = re.compile(r"(?<!\\)%.*")
_DISPLAY = re.compile(rb"mode=display|\bdisplay\s*=\s*[\"']?block|\w-display\b", re.IGNORECASE)
# one of these is on the page
FORMULA_SIGNS = (b"<math", b"math/tex", b"latex", b'"tex', b"'tex", b"=tex", b"mwe-math")


def inline(data: bytes, start: int, end: int) -> str:
    """Markdown of a part of the page; lines are separated by line feeds, none is empty."""
    if data.find(b"<", start, end) < 0:
        return " ".join(escaped(plain(data[start:end])).split())
    out = _Inline(data, end)
    out.read(start)
    return out.finished()


def escaped(text: str) -> str:
    """Text whose marks mean themselves in CommonMark."""
    if not _SPECIAL.search(text):
        return text
    return _ESCAPED.sub(lambda match: match[1] or "\\" + match[0], text)


def line_starts_escaped(text: str) -> str:
    """The same lines, none of which begins a heading or is an underline or a row of dashes."""
    return "\n".join("\\" + line if _LINE_START.match(line) else line for line in text.split("\n"))


def code_span(text: str) -> str:
    """A code span of one line; its fence is longer than any run of backticks within."""
    fence = "`" * (longest_ticks(text) + 1)
    blank = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{blank}{text}{blank}{fence}"


def longest_ticks(text: str) -> int:
    """The length of the longest run of backticks."""
    return max(map(len, _TICKS.findall(text)), default=0) if "`" in text else 0


def formulas(data: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of each formula in a part of the page, in order; KaTeX's sign that a formula is
    displayed belongs to it."""
    position, begin = start, -1
    while match := MARKUP.search(data, position, end):
        name, position = name_of(match), match.end()
        if match[1] or not name:
            continue
        if _KATEX_DISPLAY in match[3]:
            begin = match.start()
        if name in markup.RAW or name == "math":
            position = closing(data, name, position, end)[1]
        if (
            name == "math"
            or (name == "script" and _TEX_SCRIPT.search(match[3]))
            or (name == "img" and _TEX_IMAGE.search(attribute(match[3], "class")))
        ):
            yield match.start() if begin < 0 else begin, position
            begin = -1


class _Inline:
    """Markdown of a part of the page that ends at `end`, built tag by tag."""

    def __init__(self, data: bytes, end: int) -> None:
        self.data, self.end = data, end
        self.parts: list[str] = []
        self.code: list[str] = []  # of the open code span, or one that just ended
        self.inside = 0  # open elements of _CODE
        self.raised: list[tuple[str, int]] = []  # open elements of _RAISED: name, first part
        self.display, self.tex = False, ""

    def read(self, position: int) -> None:
        """Text and tags from a position on."""
        while match := MARKUP.search(self.data, position, self.end):
            self._text(position, match.start())
            position = self._tag(match)
        self._text(position, self.end)

    def finished(self) -> str:
        """The Markdown."""
        self.inside = 0
        self._end_code()
        lines = (" ".join(line.split()) for line in "".join(self.parts).split("\n"))
        return "\n".join(line for line in lines if line)

    def _text(self, start: int, end: int) -> None:
        if start >= end:
            return
        text = _SPACE.sub(" ", plain(self.data[start:end]))
        if self.inside:
            self.code.append(text)
            return
        self._end_code()
        if text.strip():
            self.tex, self.display = "", False
        self.parts.append(escaped(text))

    def _tag(self, match: re.Match[bytes]) -> int:
        """Read a tag; returns where to go on."""
        name, ends, position = name_of(match), bool(match[1]), match.end()
        if name in _CODE:
            self.inside = max(self.inside + (-1 if ends else 1), 0)
        elif name == "br" or name in markup.BLOCK:
            self._end_code()
            (self.code if self.inside else self.parts).append("\n")
        elif name in _RAISED and not self.inside:
            self._raise(name, ends)
        elif ends:
            pass
        elif name == "img":
            if _TEX_IMAGE.search(attribute(match[3], "class")):
                self._formula(attribute(match[3], "alt"), match[3])
        elif name in markup.RAW or name in markup.UNSEEN:
            inner, after = closing(self.data, name, position, self.end)
            if name == "math":
                self._formula(_tex_of(self.data, match, inner), match[3])
            elif name == "script" and _TEX_SCRIPT.search(match[3]):
                self._formula(self.data[position:inner].decode("utf-8", "replace"), match[3])
            position = after
        elif name in markup.MAYBE_HIDDEN:
            self.display |= _KATEX_DISPLAY in match[3]
            if markup.hidden(match[3]) or b"MathJax_Preview" in match[3]:
                inner, position = closing(self.data, name, position, self.end)
                for start, _end in formulas(self.data, match.end(), inner):
                    inside = MARKUP.match(self.data, start, inner)
                    assert inside
                    self._tag(inside)
        return position

    def _raise(self, name: str, ends: bool) -> None:
        if not ends:
            self._end_code()
            self.raised.append((name, len(self.parts)))
        elif self.raised and self.raised[-1][0] == name:
            first = self.raised.pop()[1]
            self._end_code()
            text = "".join(self.parts[first:])
            if text.strip() and len(text) <= _LONGEST_RAISED and not re.match(r"\s*\[|.*\n", text):
                self.parts[first:] = [f"<{name}>{text.strip()}</{name}>"]

    def _formula(self, tex: str, attributes: bytes) -> None:
        tex = " ".join(_TEX_COMMENT.sub("", tex.replace("\0", "")).split())
        whole = _DISPLAY_STYLE.fullmatch(tex)
        tex = whole[1].strip() if whole else tex
        if not tex or tex == self.tex:  # an image that repeats the MathML before it
            return
        self._end_code()
        display = self.display or bool(_DISPLAY.search(attributes))
        self.parts.append(f"\n$${tex}$$\n" if display else f"${tex}$")
        self.tex, self.display = tex, False

    def _end_code(self) -> None:
        if not self.code or self.inside:
            return
        text, self.code = "".join(self.code), []
        spans = [" ".join(line.split()) for line in text.split("\n")]
        middle = "\n".join(code_span(span) if span else "" for span in spans)
        before, after = (" " if edge.isspace() else "" for edge in (text[:1], text[-1:]))
        self.parts.append(before + middle + after)


def _tex_of(data: bytes, match: re.Match[bytes], end: int) -> str:
    """The TeX of the `math` element whose tag is `match` and whose content ends at `end`."""
    annotation = _ANNOTATION.search(data, match.end(), end)
    if annotation:
        return plain(annotation[1])
    return attribute(match[3], "alttext") or mathml.tex_of(data, match.end(), end)
