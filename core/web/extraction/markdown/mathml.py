"""Presentation MathML to TeX, for formulas of pages without their TeX source.

The elements are those of MathML Core (W3C) and the old `mfenced` and `mmultiscripts`. What has no
meaning in TeX, such as colours and spaces, is left out; of an element that is not known its content
is kept. A formula that is nested deeper than DEEPEST has no TeX.
"""

import re
import unicodedata

from sabia.core.web.extraction.markdown.markup import MARKUP, attribute, name_of, plain

DEEPEST = 60
_SIGNS = {
    "×": "times", "·": "cdot", "⋅": "cdot", "÷": "div", "±": "pm", "∓": "mp", "≤": "le", "≥": "ge",
    "≠": "ne", "≈": "approx", "≡": "equiv", "∼": "sim", "∝": "propto", "∞": "infty", "∂": "partial",
    "∇": "nabla", "∑": "sum", "∏": "prod", "∫": "int", "∮": "oint", "∈": "in", "∉": "notin",
    "⊂": "subset", "⊆": "subseteq", "∪": "cup", "∩": "cap", "∅": "emptyset", "→": "to",
    "←": "leftarrow", "↔": "leftrightarrow", "⇒": "Rightarrow", "⇔": "Leftrightarrow",
    "∀": "forall", "∃": "exists", "¬": "neg", "∧": "wedge", "∨": "vee", "⊕": "oplus",
    "⊗": "otimes", "∘": "circ", "⋯": "cdots", "…": "dots", "⟨": "langle", "⟩": "rangle",
    "‖": "|", "∥": "parallel", "⊥": "perp", "ℏ": "hbar", "ℓ": "ell", "{": "{", "}": "}", "#": "#",
    "$": "$", "%": "%", "&": "&", "_": "_", "\\": "backslash",
}  # fmt: skip
_AS_THEY_ARE = {"−": "-", "′": "'", "∗": "*", "~": r"\sim ", "^": r"\hat{}", "\u00a0": " ",
                **dict.fromkeys("\u2061\u2062\u2063\u2064\u200b", "")}  # fmt: skip
_FUNCTIONS = frozenset((
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan",
    "exp", "log", "ln", "lim", "max", "min", "sup", "inf", "det", "dim", "gcd", "ker", "deg", "arg",
    "Pr",
))  # fmt: skip
_LIMITS = frozenset((r"\sum", r"\prod", r"\lim", r"\max", r"\min", r"\sup", r"\inf", r"\int"))
_ACCENTS = {"¯": "bar", "‾": "overline", "ˉ": "bar", "^": "hat", "ˆ": "hat", "~": "tilde",
            "˜": "tilde", "→": "vec", "⃗": "vec", "˙": "dot", "¨": "ddot",
            "⏞": "overbrace", "⏟": "underbrace", "_": "underline"}  # fmt: skip
_RESERVED, _ESCAPED = re.compile(r"[{}$%#&_]"), r"\\\g<0>"
_CAPITALS = frozenset("ΓΔΘΛΞΠΣΥΦΨΩ")
_LEFT_OUT = frozenset(("annotation", "annotation-xml", "mphantom", "maligngroup", "malignmark"))
_VOID = frozenset(("mspace", "mprescripts", "none", "mglyph"))


class _Element:
    def __init__(self, name: str, attributes: bytes = b"") -> None:
        self.name, self.attributes = name, attributes
        self.parts: list[_Element] = []
        self.text = ""


def tex_of(data: bytes, start: int, end: int) -> str:
    """TeX of the content of a `math` element; '' if it has none."""
    root = _tree(data, start, end)
    return " ".join(_row(root).split()) if root else ""


def _tree(data: bytes, start: int, end: int) -> _Element | None:
    """The element with the content from start to end; None if it is nested too deep."""
    open_elements, position = [_Element("math")], start
    while match := MARKUP.search(data, position, end):
        open_elements[-1].text += plain(data[position : match.start()])
        position, name = match.end(), name_of(match).rpartition(":")[2]
        if name and match[1]:
            at = next((n for n in range(len(open_elements) - 1, 0, -1)
                       if open_elements[n].name == name), 0)  # fmt: skip
            del open_elements[at or len(open_elements) :]
        elif name:
            element = _Element(name, match[3])
            open_elements[-1].parts.append(element)
            if name not in _VOID and not match[3].rstrip().endswith(b"/"):
                open_elements.append(element)
                if len(open_elements) > DEEPEST:
                    return None
    open_elements[-1].text += plain(data[position:end])
    return open_elements[0]


def _row(element: _Element) -> str:
    if not element.parts and element.text.strip():
        return _letters(element.text.strip())
    return " ".join(filter(None, map(_tex, element.parts)))


def _tex(element: _Element) -> str:
    """TeX of one element."""
    name, parts = element.name, element.parts
    if name in _LEFT_OUT or (name in _VOID and not parts):
        return ""
    if name in ("mi", "mn", "mo", "mtext", "ms"):
        return _token(name, " ".join(element.text.split()) or _row(element))
    if name == "semantics":
        return _tex(parts[0]) if parts else ""
    if name == "msqrt":
        return rf"\sqrt{{{_row(element)}}}"
    if name == "mfenced":
        return _fenced(element)
    if name == "mtable":
        rows = [" & ".join(_row(cell) for cell in row.parts) for row in parts]
        return r"\begin{matrix} " + r" \\ ".join(rows) + r" \end{matrix}"
    if name == "mmultiscripts" and parts:
        return _multiscripts(parts)
    inside = list(map(_tex, parts))
    if name == "mfrac" and len(parts) == 2:
        if re.fullmatch(r"0(?:\.0*)?\w*", attribute(element.attributes, "linethickness")):
            return rf"\genfrac{{}}{{}}{{0pt}}{{}}{{{inside[0]}}}{{{inside[1]}}}"
        return rf"\frac{{{inside[0]}}}{{{inside[1]}}}"
    if name == "mroot" and len(parts) == 2:
        return rf"\sqrt[{inside[1]}]{{{inside[0]}}}"
    marks = {"msub": "_", "msup": "^", "munder": "_", "mover": "^"}
    if name in marks and len(parts) == 2:
        return _scripts(inside[0], {marks[name]: inside[1]}, name in ("munder", "mover"))
    if name in ("msubsup", "munderover") and len(parts) == 3:
        return _scripts(inside[0], {"_": inside[1], "^": inside[2]}, name == "munderover")
    return " ".join(filter(None, inside)) or _letters(element.text.strip())


def _token(name: str, text: str) -> str:
    if name in ("mtext", "ms"):
        return rf"\text{{{_RESERVED.sub(_ESCAPED, text)}}}" if text.strip() else ""
    if name in ("mi", "mo") and text in _FUNCTIONS:
        return "\\" + text
    if name == "mi" and len(text) > 1 and text.isascii() and text.isalpha():
        return rf"\mathrm{{{text}}}"
    return _letters(text)


def _letters(text: str) -> str:
    """Characters as TeX writes them; a command is followed by a space if a letter comes next."""
    out = "".join(map(_letter, text))
    return re.sub(r"(\\[A-Za-z]+) (?![A-Za-z])", r"\1", out)


def _letter(character: str) -> str:
    if character in _AS_THEY_ARE:
        return _AS_THEY_ARE[character]
    if sign := _SIGNS.get(character):
        return f"\\{sign} " if sign.isalpha() else f"\\{sign}"
    words = unicodedata.name(character, "").split()
    if words[:1] == ["GREEK"] and words[2:3] == ["LETTER"] and len(words) == 4:
        if words[1] == "SMALL":
            return rf"\{words[3].lower().replace('lamda', 'lambda')} "
        if character in _CAPITALS:
            return rf"\{words[3].capitalize().replace('Lamda', 'Lambda')} "
    return character


def _scripts(base: str, scripts: dict[str, str], limits: bool) -> str:
    """A base with what stands below (`_`) and above (`^`) it, as limits or as accents."""
    if limits and base not in _LIMITS:
        for mark, script in scripts.items():
            accent = _ACCENTS.get(script) or _ACCENTS.get(_UNESCAPED.get(script, ""))
            if script and accent:
                base = rf"\{accent}{{{base}}}"
            elif script:
                base = rf"\{'under' if mark == '_' else 'over'}set{{{script}}}{{{base}}}"
        return base
    simple = len(base) == 1 or re.fullmatch(r"\\[A-Za-z]+|\d+", base)
    whole = base if simple else f"{{{base}}}"
    return whole + "".join(f"{mark}{{{script}}}" for mark, script in scripts.items() if script)


_UNESCAPED = {_letters(mark): mark for mark in _ACCENTS}


def _multiscripts(parts: list[_Element]) -> str:
    before = next((n for n, part in enumerate(parts) if part.name == "mprescripts"), len(parts))
    base = _tex(parts[0])
    behind, ahead = (
        [_tex(part) for part in some] for some in (parts[1:before], parts[before + 1 :])
    )
    scripts = [f"_{{{sub}}}" * bool(sub) + f"^{{{sup}}}" * bool(sup)
               for some in (ahead, behind)
               for sub, sup in [("".join(some[::2]), "".join(some[1::2]))]]  # fmt: skip
    return ("{}" + scripts[0] if scripts[0] else "") + f"{{{base}}}" + scripts[1]


def _fenced(element: _Element) -> str:
    left, right, commas = (
        attribute(element.attributes, name) or given
        for name, given in (("open", "("), ("close", ")"), ("separators", ","))
    )
    inside = f"{_letters(commas.strip()[:1])} ".join(map(_tex, element.parts))
    return rf"\left{_letters(left)} {inside} \right{_letters(right)}"
