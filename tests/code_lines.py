"""Count code lines by package: without blank lines, comments, docstrings and generated files.

usage: python tests/code_lines.py [ROOT] [--total]

A docstring is any string that stands alone as a statement. A file whose first line contains
"generated" in a comment does not count. Packages are the folders of cli, core, kernels, examples
and tests; the last lines are the sums.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

TOPS = ("cli", "core", "kernels", "examples", "tests")
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
)  # fmt: skip


def code_lines(source: str) -> int:
    """Lines of a Python file that hold code."""
    first = source.partition("\n")[0]
    if first.startswith("#") and "generated" in first:
        return 0
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        alone = node.value if isinstance(node, ast.Expr) else None
        if isinstance(alone, ast.Constant) and isinstance(alone.value, str):
            lines.difference_update(range(alone.lineno, (alone.end_lineno or alone.lineno) + 1))
    return len(lines)


def by_package(root: Path) -> Counter[str]:
    """Code lines of each package below a repository's root, such as 'core/text'."""
    counts: Counter[str] = Counter()
    for top in TOPS:
        for path in sorted((root / top).rglob("*.py")):
            counts["/".join(path.parent.relative_to(root).parts[:2])] += code_lines(
                path.read_text()
            )
    return counts


def main() -> None:
    """Print the counts."""
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    counts = by_package(Path(words[0]) if words else Path(__file__).parent.parent)
    if "--total" not in sys.argv:
        for package, lines in sorted(counts.items()):
            print(f"{lines:7,}  {package}")
    for top in TOPS:
        print(f"{sum(n for p, n in counts.items() if p.split('/')[0] == top):7,}  {top} in all")


if __name__ == "__main__":
    main()
