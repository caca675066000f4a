"""Digests of the code that a stage runs: of each module's syntax tree, without what cannot change
results (comments, docstrings, positions, annotations of arguments, names of local variables).

The modules of a stage are those that its command imports, directly or not, also inside functions,
and those that it names in a text, as `import_module` does.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("cli", "core", "kernels")
DATA = {".npz", ".tsv", ".toml", ".json", ".txt", ".sh"}  # endings of files that modules read
Names = Mapping[str, str]


@functools.cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """The files of the package by the dotted names of their modules."""
    named = {}
    for path in (p for folder in FOLDERS for p in (root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        named[".".join(("sabia", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return named


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which callers must not change."""
    return ast.parse(path.read_text())


def _named(path: Path, name: str, root: Path) -> Iterator[str]:
    """Names of modules in the import statements and the texts of a file; 'x.*' for all below."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"sabia(\.\w+)+", node.value):
                yield from (node.value, f"{node.value}.*")
        elif isinstance(node, ast.JoinedStr) and len(node.values) > 1:
            first, second = node.values[:2]
            if isinstance(first, ast.Constant) and re.fullmatch(
                r"sabia\.core\.[\w.]+", str(first.value)
            ):
                yield f"{first.value}*"
            elif ast.unparse(first).strip("f'\"{}") == "__name__" and isinstance(
                second, ast.Constant
            ):
                yield f"{name}.*"


@functools.cache
def imports(root: Path = ROOT) -> dict[str, frozenset[str]]:
    """Module → modules that it imports; of a kernel, all files of its folder."""
    known, graph = modules(root), {}
    for module, path in known.items():
        found: set[str] = set()
        for name in set(_named(path, module, root)):
            if name.endswith("*"):
                found |= {one for one in known if one.startswith(name[:-1])}
            elif name in known:
                found.add(name)
        if module.startswith("sabia.kernels.") and module.endswith(".interface"):
            folder = module.rpartition(".")[0]
            found |= {one for one in known if one.startswith(f"{folder}.")}
        graph[module] = frozenset(found - {module})
    return graph


def closure(command: str, root: Path = ROOT) -> set[str]:
    """The modules of core and kernels that a command runs ('classify train')."""
    graph = imports(root)
    start = "sabia.cli." + command.replace(" ", "_").replace("-", "_")
    left = [name for name in graph[start] if not name.startswith("sabia.cli")]
    reached: set[str] = set()
    while left:
        module = left.pop()
        if module not in reached:
            reached.add(module)
            left += graph[module]
    return {name for name in reached if not name.startswith("sabia.cli")}


def digest(path: Path) -> str:
    """16 hexadecimal digits of a module's code and of the data files that it names."""
    text = path.read_text()
    tokens: list[str] = []
    _add(tree_of(path), {}, tokens)
    hashed = hashlib.blake2b("\0".join(tokens).encode("utf-8", "surrogatepass"), digest_size=8)
    for data in sorted(path.parent.rglob("*")):
        if data.suffix in DATA and data.name in text:
            hashed.update(data.read_bytes())
    return hashed.hexdigest()


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
NESTED = (*FUNCTIONS, ast.ClassDef, ast.Constant, ast.expr_context)
NAMED = (ast.Name, ast.ExceptHandler)
SKIPPED = {"type_comment", "kind", "returns", "ctx", "type_params"}


def _add(node: ast.AST, names: Names, tokens: list[str]) -> None:
    """Append a syntax tree in order; local variables by numbers."""
    if isinstance(node, FUNCTIONS):
        names = {k: v for k, v in names.items() if k not in _arguments(node)} | local_names(
            node, names
        )
    tokens.append(type(node).__name__)
    named = isinstance(node, NAMED)
    for field in node._fields:
        value = getattr(node, field, None)
        if field in SKIPPED or (value is None and not isinstance(node, ast.Constant)):
            continue
        if isinstance(value, ast.AST):
            if not isinstance(node, ast.arg):
                _add(value, names, tokens)
        elif isinstance(value, list):
            tokens.append(field)
            for one in value:
                if not isinstance(one, ast.AST):
                    tokens.append(repr(one))
                elif not _is_text(one):
                    _add(one, names, tokens)
        else:
            tokens.append(names.get(value, value) if named else repr(value))


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a docstring, of a module, class, function or option."""
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def _arguments(node: ast.AST) -> set[str]:
    return {one.arg for one in ast.walk(node.args)  # type: ignore[attr-defined]
            if isinstance(one, ast.arg)}  # fmt: skip


def local_names(function: ast.AST, outer: Names | None = None) -> dict[str, str]:
    """The variables that a function binds, with numbers in the order of their first binding.

    Those of its comprehensions count as its own; what it declares as global or nonlocal does not.
    """
    bound: dict[str, str] = {}
    free: set[str] = set(_arguments(function))
    body = function.body  # type: ignore[attr-defined]
    left = list(reversed(body if isinstance(body, list) else [body]))
    while left:
        node = left.pop()
        if isinstance(node, ast.Global | ast.Nonlocal):
            free |= set(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, "")
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.setdefault(node.name, "")
        if not isinstance(node, NESTED):
            left += reversed(list(ast.iter_child_nodes(node)))
    first = len(set((outer or {}).values()))
    own = [name for name in bound if name not in free]
    return {name: f"local {first + number}" for number, name in enumerate(own)}
