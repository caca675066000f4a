"""The rules of the source tree, read from its text: imports go one way, files stay small,
every file and public function says what it is for, every package is listed in the wheel."""

import ast
import collections
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("cli", "core", "kernels", "examples")
FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

TOP = {
    "options",
    "errors",
    "files",
    "units",
    "stop",
    "notes",
    "urls",
    "svg",
    "page",
    "digests",
    "file_hashes",
    "process_start",
    "results",
    "save_interval",
}
ALLOWED = {
    "sandbox": set(), "shards": {"sandbox"}, "spec": set(), "numerics": set(), "grammar": set(),
    "plan": {"spec", "numerics"}, "ops": {"spec", "numerics"},
    "model": {"ops", "spec", "numerics", "shards"},
    "parallel": {"spec", "model", "ops", "sandbox"},
    "train": {"model", "ops", "parallel", "shards", "numerics", "spec"},
    "generate": {"grammar", "model", "ops", "parallel", "spec", "text", "shards"},
    "judge": {"generate", "sandbox", "shards"}, "serve": {"generate", "grammar", "model", "text"},
    "web": {"sandbox", "shards", "generate", "text"}, "text": {"shards", "generate", "judge"},
    "bench": {"generate", "judge", "sandbox", "shards", "text", "model", "ops", "parallel", "spec"},
    "quant": {"model", "ops", "parallel", "numerics", "shards", "spec", "text", "generate"},
}  # fmt: skip


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; callers must not change it."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[str]:
    """Modules named in import statements anywhere in a file; callers must not change the list."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def package(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1].removesuffix(".py") if parts[0] == "core" else parts[0]


def imported_packages(path: Path) -> set[str]:
    matches = (re.match(r"sabia\.core\.(\w+)", name) for name in imports(path))
    return {match[1] for match in matches if match}


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[-3:-1] != ("core",)], ids=str)
def test_imports_go_one_way(path: Path) -> None:
    here = package(path)
    names = imports(path)
    assert not [n for n in names if re.match(r"(core|cli|kernels)(\.|$)", n)], "bare import"
    if path.is_relative_to(ROOT / "core"):
        assert not [n for n in names if n.startswith("sabia.cli")], "core imports cli"
        if here in ALLOWED:
            wrong = imported_packages(path) - ALLOWED[here] - TOP - {here}
            assert not wrong, f"{here} may not import {wrong}"
    if path.is_relative_to(ROOT / "kernels"):
        assert not [n for n in names if re.match(r"sabia\.(cli|core)", n)], "kernels import up"
    if not path.is_relative_to(ROOT / "cli"):
        recipes = [n for n in names if n.startswith("sabia.core.recipes")]
        assert here == "recipes" or not recipes, "only cli imports recipes"


def module_of(path: Path) -> str:
    """The dotted name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("sabia", *(parts[:-1] if parts[-1] == "__init__" else parts)))


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Module → modules of sabia that it imports anywhere, in functions too."""
    modules = {module_of(path): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        targets = {name for name in imports(path) if name in modules}
        # `from package import module` imports the module; the package itself only if a name of it
        packages = {n.rpartition(".")[0] for n in targets if n.rpartition(".")[0] in targets}
        graph[module] = targets - packages - {module}
    return graph


def test_no_import_cycles() -> None:
    """Nothing is left when modules without an importer or an import are removed in turn."""
    graph, before = import_graph(), -1
    left = set(graph)
    while len(left) != before:
        before = len(left)
        left &= {target for module in left for target in graph[module]}
        left &= {module for module in left if graph[module] & left}
    assert not {module: sorted(graph[module] & left) for module in left}


TORCH, JAX = re.compile(r"torch|triton"), re.compile(r"jax|pallas")


def test_torch_and_jax_files_never_import_each_other() -> None:
    wrong = []
    for path in FILES:
        for own, other in ((TORCH, JAX), (JAX, TORCH)):
            if own.search(path.stem) and not other.search(path.stem):
                roots = {name.split(".")[0] for name in imports(path)}
                files = {m.rsplit(".", 1)[-1] for m in import_graph()[module_of(path)]}
                wrong += [(path.name, name) for name in roots | files if other.search(name)]
    assert not wrong


# parts that a later change rebuilds, and whose files keep their names until then
PENDING = re.compile(r"train/stepper\w*\.py$")


def test_folders_are_small() -> None:
    folders = collections.Counter(
        path.parent for path in FILES if not PENDING.search(path.as_posix())
    )
    large = {str(folder): count for folder, count in folders.items() if count > 25}
    assert not large


# One name in several packages of core where the contents play the same role: the options, the
# stage and the recipe of a command.
SAME_ROLE = {"__init__", "stage", "pretrain", "quantize", "sft", "grpo", "classify_train"}


def test_a_file_name_stands_once_in_core() -> None:
    names = collections.defaultdict(list)
    for path in (p for p in FILES if p.is_relative_to(ROOT / "core")):
        if path.stem not in SAME_ROLE and "plan" not in path.relative_to(ROOT).parts:
            names[path.stem].append(str(path.relative_to(ROOT)))
    assert not [paths for paths in names.values() if len(paths) > 1]


def test_an_operator_of_torch_is_registered_once() -> None:
    """torch lets the later registration of a name replace the former one without a word."""
    text = "".join(path.read_text() for path in FILES)
    names = collections.Counter(re.findall(r"custom_op\(\s*\"([\w:]+)\"", text))
    assert names["sabia::cpu_attention"] and not [n for n, count in names.items() if count > 1]


def test_one_import_style() -> None:
    """`from module import Name` or `from package import module`; a module keeps its name."""
    modules, wrong = set(import_graph()), []
    for path in (p for p in FILES if not PENDING.search(p.as_posix()) and "plan" not in p.parts):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                wrong += [(str(path), a.name) for a in node.names if a.name.startswith("sabia")]
            elif isinstance(node, ast.ImportFrom):
                named = {f"{node.module}.{a.name}": a.asname for a in node.names if a.asname}
                wrong += [(str(path), name) for name in modules & named.keys()]
    assert not wrong


@pytest.mark.parametrize("path", FILES + TESTS, ids=str)
def test_files_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(parsed(path)), "no module docstring"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_public_functions_have_docstrings(path: Path) -> None:
    tree = parsed(path)
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    bare = [n.name for n in tree.body if isinstance(n, kinds)
            and not n.name.startswith("_") and not ast.get_docstring(n)]  # fmt: skip
    assert not bare, f"no docstring: {', '.join(bare)}"


def test_every_package_is_listed_for_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    roots = {v: k for k, v in settings["package-dir"].items()}
    listed = set()
    for init in (p for p in FILES if p.name == "__init__.py"):
        folder = init.parent.relative_to(ROOT).as_posix()
        top = next(root for root in roots if folder == root or folder.startswith(root + "/"))
        listed.add((roots[top] + folder.removeprefix(top)).replace("/", "."))
    assert listed == set(settings["packages"])


@pytest.mark.slow
def test_wheel_holds_only_the_package(tmp_path: Path) -> None:
    import zipfile

    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(words, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    strange = [n for n in names if not re.match(r"sabia/|sabia-[\d.]+\.(dist-info|data)/", n)]
    assert not strange
    assert "sabia/core/plan/data/chips.toml" in names
    assert any(n.startswith("sabia/examples/little_web/") for n in names)
    assert any(n.endswith("share/man/man1/sabia.1") for n in names)
