"""The child of `maths`: reads two answers of mathematics and compares them by SymPy.

    python -m sabia.core.judge.maths_child MEMORY_BYTES

Answers come from models, so nothing is evaluated as Python: `_Reader` builds SymPy's objects from
tokens. It reads LaTeX and plain notation: fractions, roots, powers, functions, constants, lists and
sets, intervals and their unions, tuples, matrices, equations, inequalities and plus-minus. Symbols
are real. Decimals are exact numbers, but two numbers of which one is written as a decimal are equal
within a relative 1e-6. Expressions with symbols are equal if they agree to 30 digits at points
drawn at random, so no proof by `simplify`, which may not end, is needed where they are defined.
"""

import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy as sp

from sabia.core.sandbox.limits import serve

REL_TOLERANCE = 1e-6
DIGITS, POINTS = 50, 6
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d*)?|\.\d+|[a-zA-Z]+|\*\*|<=|>=|\S")
_WRITTEN = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u221a": r"\sqrt ", "\u2264": r"\le ",
    "\u2265": r"\ge ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2205": r"\emptyset ",
    "\u00b2": "^2", "\u00b3": "^3", "\u00b1": r"\pm ", "\u2208": r"\in ", "{,}": ",",
    r"\lvert": "|", r"\rvert": "|", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\dfrac": r"\frac",
    r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\%": "", "%": "", r"\$": "", "$": "",
    r"\leq": r"\le", r"\geq": r"\ge",
}  # fmt: skip
_DROPPED = re.compile(
    r"(?<!\\)\\(?:left|right|[bB]ig+[lr]?|displaystyle|limits|quad|qquad|[,;:! ])(?![a-zA-Z])|~|"
    r"\^\s*(?:\\circ|\{\s*\\circ\s*\})"
)
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mbox)\s*\{([^{}]*)\}")
_STYLE = re.compile(r"\\(?:mathrm|mathbf|mathbb|operatorname)\s*\{([^{}]*)\}")
_GROUPS = re.compile(r"(?<![\d.,(\[{])\d{1,3}(?:,\d{3})+(?![\d,)\]}])")
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sin": sp.sin, "cos": sp.cos, "tan": sp.tan, "cot": sp.cot, "sec": sp.sec, "csc": sp.csc,
    "arcsin": sp.asin, "arccos": sp.acos, "arctan": sp.atan, "asin": sp.asin, "acos": sp.acos,
    "atan": sp.atan, "sinh": sp.sinh, "cosh": sp.cosh, "tanh": sp.tanh, "ln": sp.log,
    "log": sp.log, "exp": sp.exp, "abs": sp.Abs, "Abs": sp.Abs,
}  # fmt: skip
_CONSTANTS = {
    "pi": sp.pi, "infty": sp.oo, "infinity": sp.oo, "inf": sp.oo, "oo": sp.oo, "e": sp.E, "i": sp.I,
    "emptyset": sp.S.EmptySet, "varnothing": sp.S.EmptySet, "R": sp.S.Reals,
}  # fmt: skip
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta",
    "iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi",
    "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega",
)  # fmt: skip
_RELATIONS: dict[str, Callable[..., Any]] = {
    "=": sp.Eq, "<": sp.Lt, ">": sp.Gt, "<=": sp.Le, ">=": sp.Ge, r"\le": sp.Le, r"\ge": sp.Ge,
    r"\lt": sp.Lt, r"\gt": sp.Gt, r"\neq": sp.Ne, r"\ne": sp.Ne,
}  # fmt: skip
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", "|": "|"}
_ENDS = frozenset((")", "]", "}", r"\}", "|", ",", ";", "&", r"\\", r"\end", r"\cup", r"\cap",
                   r"\setminus", "+", "-", r"\pm", r"\in", *_RELATIONS))  # fmt: skip


class UnreadableError(ValueError):
    """The text is no mathematics that is read here."""


@dataclass(frozen=True)
class Group:
    """Items in brackets: a tuple, a point or an interval; `left` and `right` are the brackets."""

    left: str
    right: str
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Several:
    """Items in no order: a set, or values with commas between them."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Relation:
    """An equation or inequality, or a chain of inequalities."""

    parts: tuple[Any, ...]


def read(text: str) -> tuple[Any, bool]:
    """(the answer, whether it has a decimal). Raises UnreadableError."""
    for written, plain in _WRITTEN.items():
        end = "(?![a-zA-Z])" if written[-1].isalpha() else ""  # \\le but not \\left
        text = re.sub(re.escape(written) + end, plain.replace("\\", "\\\\"), text)
    if not _TEXT.sub("", text).strip():  # all of it is in a box of text
        text = _TEXT.sub(r"\1", text)
    text = _TEXT.sub(lambda m: "," if m[1].strip() in ("and", "or", "e", "ou") else " ", text)
    text = _GROUPS.sub(lambda m: m[0].replace(",", ""), _DROPPED.sub(" ", _STYLE.sub(r"\1", text)))
    tokens = _TOKEN.findall(text.strip().rstrip(".,;"))
    if not tokens:
        raise UnreadableError("nothing to read")
    decimal = any(re.search(r"\.\d", token) for token in tokens)
    if r"\pm" not in tokens:
        return _Reader(tokens).answer(), decimal
    both = [_Reader([s if t == r"\pm" else t for t in tokens]).answer() for s in "+-"]
    if any(isinstance(one, Group | Relation) for one in both):
        raise UnreadableError("plus-minus in a pair or an equation")
    items = [i for one in both for i in (one.items if isinstance(one, Several) else (one,))]
    return Several(tuple(items)), decimal


class _Reader:
    """Reads the tokens of an answer by descent."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens, self.at, self.bars = list(tokens), 0, 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        token = self.next
        if not token or (wanted and token != wanted):
            raise UnreadableError(f"{token or 'the end'!r} (expected {wanted or 'more'})")
        self.at += 1
        return token

    def answer(self) -> Any:
        items = self.items()
        if self.next:
            raise UnreadableError(f"{self.next!r} is not expected")
        return items[0] if len(items) == 1 else Several(tuple(items))

    def items(self) -> list[Any]:
        items = [self.relation()]
        while self.next in (",", ";"):
            self.take()
            items.append(self.relation())
        return items

    def relation(self) -> Any:
        parts = [self.sets()]
        if self.next == r"\in":
            self.take()
            return self.sets()
        while self.next in _RELATIONS:
            operator = self.take()
            parts += [operator, self.sets()]
        return parts[0] if len(parts) == 1 else Relation(tuple(parts))

    def sets(self) -> Any:
        value = self.sum()
        while self.next in (r"\cup", r"\cap", r"\setminus"):
            operator, other = self.take(), as_set(self.sum())
            value = as_set(value)
            if operator == r"\cup":
                value = sp.Union(value, other)
            else:
                value = value & other if operator == r"\cap" else value - other
        return value

    def sum(self) -> Any:
        sign = self.take() if self.next in ("+", "-") else "+"
        value = self.product()
        value = -number(value) if sign == "-" else value
        while self.next in ("+", "-"):
            sign, term = self.take(), number(self.product())
            value = number(value) + (term if sign == "+" else -term)
        return value

    def product(self) -> Any:
        value = self.power()
        while self.next and (self.next not in _ENDS or (self.next == "|" and not self.bars)):
            operator = self.take() if self.next in ("*", "/", r"\cdot", r"\times", r"\div") else ""
            sign = -1 if operator and self.next == "-" else 1
            if sign < 0:
                self.take()
            factor = sign * number(self.power())
            divides = operator in ("/", r"\div")
            value = number(value) / factor if divides else number(value) * factor
        return value

    def power(self) -> Any:
        value = self.atom()
        while self.next in ("^", "**", "!"):
            if self.take() == "!":
                value = sp.factorial(number(value))
            else:
                value = number(value) ** self.exponent()
        return value

    def exponent(self) -> Any:
        if self.next == "-":
            self.take()
            return -number(self.power())
        return number(self.power() if self.next != "{" else self.argument())

    def argument(self) -> Any:
        """What stands in braces, or one digit, letter or command."""
        if self.next == "{":
            self.take()
            value = self.sum()
            self.take("}")
            return number(value)
        token = self.next
        if len(token) > 1 and token.isalnum():
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return number(self.atom())

    def atom(self) -> Any:
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            value = sp.Rational(token.rstrip("."))
            return value + self.atom() if value.is_Integer and self.mixed() else value
        if token in _CLOSING:
            return self.bracketed(token)
        name = token.removeprefix("\\")
        if name in _FUNCTIONS:
            return self.function(name)
        if name == "sqrt":
            return self.root()
        if token == r"\frac":
            return self.argument() / self.argument()
        if token in (r"\binom", r"\dbinom"):
            return sp.binomial(self.argument(), self.argument())
        if token == r"\begin":
            return self.matrix()
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        if name in _GREEK:
            return self.symbol(name)
        if not token.isalpha() or len(token) > 3:
            raise UnreadableError(f"{token!r} is not known")
        if len(token) > 1:  # letters side by side are a product
            self.tokens[self.at : self.at] = token[1:]
        return _CONSTANTS.get(token[0]) if token[0] in "ei" else self.symbol(token[0])

    def symbol(self, name: str) -> Any:
        if self.next == "_":
            self.take()
            name += f"_{self.argument()}"
        return sp.Symbol(name, real=True)

    def mixed(self) -> bool:
        """Whether a proper fraction of integers follows: 2\\frac{1}{2} is 2.5."""
        following = "".join(self.tokens[self.at : self.at + 7])
        matched = re.match(r"\\frac(?:\{(\d+)\}\{(\d+)\}|(\d)(\d)(?!\d))", following)
        if not matched:
            return False
        top, bottom = (int(part) for part in matched.groups() if part is not None)
        return top < bottom

    def root(self) -> Any:
        degree: Any = sp.Integer(2)
        if self.next == "[":
            self.take()
            degree = number(self.sum())
            self.take("]")
        value = self.argument() if self.next != "(" else number(self.atom())
        return sp.root(value, degree)

    def function(self, name: str) -> Any:
        base = power = None
        if self.next == "_" and name == "log":
            self.take()
            base = self.argument()
        if self.next == "^":
            self.take()
            power = self.exponent()
        if self.next in ("(", "{", "["):
            value = number(self.atom())
        else:
            value = number(self.power())
            while (
                self.next
                and self.next not in _ENDS | {"/", "*", "("}
                and (self.next.removeprefix("\\") not in _FUNCTIONS)
            ):
                value = value * number(self.power())
        result = sp.log(value, base) if base is not None else _FUNCTIONS[name](value)
        if power is None:
            return result
        if power == -1:
            raise UnreadableError("an inverse function")
        return result**power

    def bracketed(self, left: str) -> Any:
        if left in (r"\{", "{") and self.next == _CLOSING[left]:
            self.take()
            return sp.S.EmptySet
        self.bars += left == "|"
        items = self.items()
        self.bars -= left == "|"
        if left in ("(", "[") and self.next in (")", "]"):
            right = self.take()
        else:
            right = self.take(_CLOSING[left])
        if left == "|":
            return sp.Abs(number(items[0]))
        if left == r"\{" or (left == "{" and len(items) > 1):
            return Several(tuple(items))
        if len(items) == 1 and left + right in ("()", "{}", "[]"):
            return items[0]
        return Group(left, right, tuple(items))

    def matrix(self) -> Any:
        kind = self.named()
        if kind not in ("matrix", "pmatrix", "bmatrix", "vmatrix", "Bmatrix"):
            raise UnreadableError(f"{kind} is not known")
        rows: list[list[Any]] = [[]]
        while self.next != r"\end":
            rows[-1].append(number(self.sum()))
            if self.next == "&":
                self.take()
            elif self.next == r"\\":
                self.take()
                if self.next != r"\end":
                    rows.append([])
        self.take()
        if self.named() != kind or len({len(row) for row in rows}) != 1:
            raise UnreadableError("a matrix with rows of different lengths")
        matrix = sp.ImmutableMatrix(rows)
        return matrix.det() if kind == "vmatrix" else matrix

    def named(self) -> str:
        self.take("{")
        name = self.take()
        self.take("}")
        return name


def number(value: object) -> Any:
    """An operand of arithmetic. Raises UnreadableError for sets, tuples and relations."""
    if isinstance(value, sp.Expr | sp.MatrixBase):
        return value
    raise UnreadableError("arithmetic with what is no number")


def as_set(value: object) -> Any:
    """An interval or a set as SymPy's set. Raises UnreadableError for others."""
    if isinstance(value, sp.Set):
        return value
    if isinstance(value, Several):
        return sp.FiniteSet(*map(number, value.items))
    if isinstance(value, Group) and len(value.items) == 2 and value.left in "([":
        return sp.Interval(*value.items, value.left == "(", value.right == ")")
    if isinstance(value, Relation):
        relations = _relations(value)
        names = set().union(*(relation.free_symbols for relation in relations))
        if len(names) == 1 and not any(isinstance(relation, sp.Eq) for relation in relations):
            return sp.And(*relations).as_set()
    raise UnreadableError("no set")


def _relations(relation: Relation) -> list[Any]:
    """A chain a < b < c as a < b and b < c."""
    parts = relation.parts
    return [
        _RELATIONS[parts[k]](number(parts[k - 1]), number(parts[k + 1]), evaluate=False)
        for k in range(1, len(parts), 2)
    ]


def equal(one: sp.Expr, two: sp.Expr, decimal: bool) -> bool:
    """Whether two answers are the same."""
    one, two = _value(one, two), _value(two, one)
    if isinstance(one, Several) or isinstance(two, Several):
        return _same_items(one, two, decimal)
    if isinstance(one, Group) and isinstance(two, Group):
        same = (one.left, one.right, len(one.items)) == (two.left, two.right, len(two.items))
        return same and all(
            equal(*pair, decimal) for pair in zip(one.items, two.items, strict=True)
        )
    if isinstance(one, Relation) and isinstance(two, Relation):
        return _same_relation(one, two, decimal)
    if any(isinstance(value, sp.Set) for value in (one, two)):
        try:
            first, second = as_set(one), as_set(two)
        except UnreadableError:
            return False
        return bool(first == second or ((first - second).is_empty and (second - first).is_empty))
    if any(isinstance(value, Group | Relation) for value in (one, two)):
        return False
    matrices = [isinstance(value, sp.MatrixBase) for value in (one, two)]
    if all(matrices):
        return one.shape == two.shape and all(
            _same(*pair, decimal) for pair in zip(one, two, strict=True)
        )
    return not any(matrices) and _same(one, two, decimal)


def _value(value: object, other: object) -> Any:
    """x = 5 as 5 next to what is no relation, and x > 5 as a set next to an interval."""
    if isinstance(value, Relation) and not isinstance(other, Relation):
        if value.parts[1] == "=" and len(value.parts) == 3 and (
            isinstance(value.parts[0], sp.Symbol)
        ):  # fmt: skip
            return value.parts[2]
        if isinstance(other, Group | sp.Set):
            return as_set(value)
    if isinstance(value, Group) and isinstance(other, Relation):
        return as_set(value)
    return value


def _same_items(one: object, two: object, decimal: bool) -> bool:
    """Whether each item of either has an equal one in the other."""
    sides = [
        list(value.items) if isinstance(value, Several) else
        list(value) if isinstance(value, sp.FiniteSet) else [value]
        for value in (one, two)
    ]  # fmt: skip
    return all(
        any(equal(item, other, decimal) for other in others)
        for items, others in (sides, sides[::-1])
        for item in items
    )


def _same_relation(one: Relation, two: Relation, decimal: bool) -> bool:
    """Equations that differ by a factor other than 0; inequalities with the same solutions."""
    first, second = _relations(one), _relations(two)
    if all(isinstance(relation, sp.Eq) for relation in (*first, *second)):
        if len(first) != 1 or len(second) != 1:
            return False
        left, right = (relation.lhs - relation.rhs for relation in (first[0], second[0]))
        ratio = sp.simplify(left / right)
        return bool(ratio.is_number and ratio.is_finite and ratio != 0)
    return equal(as_set(one), as_set(two), decimal)


def _same(one: sp.Expr, two: sp.Expr, decimal: bool) -> bool:
    """Whether two expressions have the same value, at all points drawn if they have symbols."""
    if one == two:
        return not one.has(sp.zoo, sp.nan)
    names = sorted(one.free_symbols | two.free_symbols, key=str)
    if not names:
        close = _close(one, two, decimal)
        return bool(sp.simplify(one - two) == 0) if close is None else close
    draws = random.Random(0)
    defined = 0
    for _ in range(4 * POINTS):
        point = {name: sp.Rational(draws.randint(-9999, 9999), 1009) for name in names}
        close = _close(one.subs(point), two.subs(point), decimal)
        if close is False:
            return False
        defined += close is True
        if defined == POINTS:
            return True
    return bool(sp.simplify(one - two) == 0)


def _close(one: sp.Expr, two: sp.Expr, decimal: bool) -> bool | None:
    """Whether two numbers are equal to the digits that count; None if one is not defined."""
    if one == two and one.is_finite:
        return True
    if one.is_infinite or two.is_infinite:
        return bool(one == two)
    if one.is_Rational and two.is_Rational and not decimal:
        return False
    first, second = one.evalf(DIGITS), two.evalf(DIGITS)
    if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
        return None
    size = max(abs(first), abs(second))
    bound = REL_TOLERANCE if decimal else sp.Float(10) ** -30
    return bool(abs(first - second) <= bound * size + sp.Float(10) ** (-12 if decimal else -40))


def compared(asked: dict[str, Any], _body: bytes) -> dict[str, object]:
    """Whether the answers "text" and "reference" are equal, and why not where one is not read;
    None if it is the reference."""
    try:
        reference, exact = read(asked["reference"])
    except UnreadableError as error:
        return {"equal": None, "detail": f"the reference is not read: {error}"}
    try:
        answer, rounded = read(asked["text"])
        return {"equal": equal(answer, reference, exact or rounded), "detail": ""}
    except UnreadableError as error:
        return {"equal": False, "detail": f"the answer is not read: {error}"}


def _warm_up() -> None:
    compared({"text": "x^2 - 1", "reference": "(x + 1)(x - 1)"}, b"")


if __name__ == "__main__":
    serve(compared, int(sys.argv[1]), _warm_up)
