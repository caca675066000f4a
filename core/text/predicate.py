"""The expression language of `--where`: comparisons of columns and scores; it cannot run code.

Grammar (a subset of Python expressions): and, or, not; == != < <= > >=, chained; `x in ('a','b')`,
`'word' in text`; `x is None`; + - * /; len(column); numbers, strings, True, False, None. A name is
a column, else a score, which is true where it is not 0; `scores["a name"]` is a score, null in rows
that lack it. A row is kept when the expression is true; null (a missing value in a comparison) does
not keep it. Everything else in a syntax tree is rejected, so an expression can neither call
functions nor access attributes.
"""

import ast
from collections.abc import Callable
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import UsageError
from sabia.core.text.score_column import alike, score_names, score_values

EXAMPLE = "quality >= 0.5 and language == 'pt'"
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: pc.equal, ast.NotEq: pc.not_equal, ast.Lt: pc.less, ast.LtE: pc.less_equal,
    ast.Gt: pc.greater, ast.GtE: pc.greater_equal,
}  # fmt: skip
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: pc.add, ast.Sub: pc.subtract, ast.Mult: pc.multiply, ast.Div: pc.divide,
}  # fmt: skip


class Predicate:
    """A parsed expression. Raises UsageError when it is not in the language."""

    def __init__(self, text: str, option: str = "--where") -> None:
        self.text, self.option = text, option
        try:
            self.tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UsageError(
                f"{option}: {text!r} is not an expression (expected such as {EXAMPLE})"
            ) from error
        _check(self.tree, text, option)

    @property
    def names(self) -> set[str]:
        """Names of columns or scores that must exist."""
        inside = {id(n.value) for n in ast.walk(self.tree) if isinstance(n, ast.Subscript)}
        inside |= {id(n.func) for n in ast.walk(self.tree) if isinstance(n, ast.Call)}
        nodes = (n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and id(n) not in inside)
        return {node.id for node in nodes}

    def check_names(self, batch: pa.RecordBatch, where: str) -> None:
        """Raise UsageError for a name that is neither a column nor a score of this batch."""
        if not batch.num_rows:
            return
        known = set(batch.schema.names) | score_names(_scores(batch))
        missing = sorted(self.names - known)
        if missing:
            raise UsageError(
                f"{self.option}: {missing[0]!r} is neither a column nor a score in {where}"
                f"{alike(missing[0], known)}"
            )

    def evaluate(self, batch: pa.RecordBatch) -> np.ndarray:
        """bool[n]: the rows to keep."""
        try:
            value = _Evaluation(batch).value(self.tree)
            if isinstance(value, pa.Scalar):
                value = pa.array([value.as_py()] * batch.num_rows, pa.bool_())
            return np.asarray(pc.fill_null(value.cast(pa.bool_()), False))
        except (pa.ArrowException, TypeError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"{self.option}: {self.text!r} cannot be computed ({reason})"
            ) from error


def _scores(batch: pa.RecordBatch) -> pa.Array:
    """The column of scores; nulls where a batch has none."""
    return batch.column("scores") if "scores" in batch.schema.names else pa.nulls(batch.num_rows)


def _typed(value: Any) -> Any:
    """A column that has no values, and so no type, as one of texts."""
    return value.cast(pa.string()) if pa.types.is_null(value.type) else value


_ALLOWED = (
    ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, ast.In, ast.NotIn,
    ast.Is, ast.IsNot, ast.BinOp, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Subscript,
    ast.Call, ast.Load, *_COMPARE, *_ARITHMETIC,
)  # fmt: skip


def _check(tree: ast.AST, text: str, option: str) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or not _well_formed(node):
            part = ast.get_source_segment(text.strip(), node) if hasattr(node, "lineno") else None
            raise UsageError(
                f"{option}: {part or type(node).__name__!r} is not allowed in {text!r}"
                " (expected comparisons of columns and scores, and/or/not, in)"
            )


def _well_formed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return node.value is None or isinstance(node.value, str | int | float | bool)
    if isinstance(node, ast.Tuple | ast.List):
        return all(isinstance(item, ast.Constant) for item in node.elts)
    if isinstance(node, ast.Call):
        plain = isinstance(node.func, ast.Name) and node.func.id == "len"
        return plain and len(node.args) == 1 and not node.keywords
    if isinstance(node, ast.Subscript):
        named = isinstance(node.value, ast.Name) and node.value.id == "scores"
        return named and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    return True


class _Evaluation:
    """Evaluates subtrees on one batch, to Arrow arrays or scalars."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch

    def value(self, node: ast.AST) -> Any:
        return getattr(self, f"_{type(node).__name__.lower()}")(node)

    def _constant(self, node: ast.Constant) -> Any:
        return pa.scalar(node.value)

    def _name(self, node: ast.Name) -> Any:
        if node.id in self.batch.schema.names:
            return self.batch.column(node.id)
        return self._score(node.id)

    def _subscript(self, node: ast.Subscript) -> Any:
        assert isinstance(node.slice, ast.Constant)
        return self._score(str(node.slice.value))

    def _score(self, name: str) -> pa.Array:
        values = score_values(_scores(self.batch), name)
        return pa.array(values, mask=np.isnan(values))

    def _call(self, node: ast.Call) -> Any:
        value = _typed(self.value(node.args[0]))
        length = pc.utf8_length if pa.types.is_string(value.type) else pc.list_value_length
        return length(value)

    def _boolop(self, node: ast.BoolOp) -> Any:
        join = pc.and_kleene if isinstance(node.op, ast.And) else pc.or_kleene
        return reduce(join, (self.value(one).cast(pa.bool_()) for one in node.values))

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return pc.invert(value.cast(pa.bool_()))
        return pc.negate(value)

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Div):
            left = left.cast(pa.float64())
        return _ARITHMETIC[type(node.op)](left, right)

    def _compare(self, node: ast.Compare) -> Any:
        operands = pairwise([node.left, *node.comparators])
        parts = (self._one(op, *two) for op, two in zip(node.ops, operands, strict=True))
        return reduce(pc.and_kleene, parts)

    def _one(self, operator: ast.cmpop, left: ast.AST, right: ast.AST) -> Any:
        if isinstance(operator, ast.Is | ast.IsNot):
            if not (isinstance(right, ast.Constant) and right.value is None):
                raise TypeError("`is` can compare only with None")
            null = pc.is_null(self.value(left))
            return null if isinstance(operator, ast.Is) else pc.invert(null)
        if isinstance(operator, ast.In | ast.NotIn):
            inside = self._contains(left, right)
            return inside if isinstance(operator, ast.In) else pc.invert(inside)
        return _COMPARE[type(operator)](self.value(left), self.value(right))

    def _contains(self, left: ast.AST, right: ast.AST) -> Any:
        if isinstance(right, ast.Tuple | ast.List):
            value = _typed(self.value(left))
            chosen = [item.value for item in right.elts if isinstance(item, ast.Constant)]
            inside = pc.is_in(value, pa.array(chosen).cast(value.type))
            return pc.if_else(pc.is_valid(value), inside, pa.scalar(None, pa.bool_()))
        if isinstance(left, ast.Constant) and isinstance(left.value, str):
            return pc.match_substring(_typed(self.value(right)), left.value)
        raise TypeError("`in` needs a list of values on its right, or a quoted text on its left")
