"""What `sabia quantize` says of the rounding of each component."""

from typing import Any

from sabia.core.recipes.quantize_report import how_rounded


def row(module: str, scheme: str, method: str, tokens: int) -> dict[str, Any]:
    kinds = {"component": "mlp", "module": module, "scheme": scheme}
    return kinds | {"method": method, "tokens": tokens}


def test_too_few_tokens_are_told_of_formats_that_others_are_calibrated_in() -> None:
    rows = [row("a", "w4a16 g128", "gptq", 900), row("b", "w8a16", "rtn", 900)]
    assert list(how_rounded(rows)) == ["mlp: 1 w4a16 g128 by GPTQ, 1 w8a16 to nearest"]
    (line,) = how_rounded([*rows, row("c", "w4a16 g128", "rtn", 5)])
    assert line.endswith("; few tokens reached c (5)")
    assert "few" not in next(how_rounded([row("c", "w4a16 g128", "rtn", 0)]))
