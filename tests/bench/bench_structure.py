"""Counts of the training core's structure, from one `sabia pretrain` in this process.

    python tests/bench/bench_structure.py MODEL

MODEL is a Hugging Face checkpoint directory that gives the tokenizer. Printed: own modules with
code that are loaded after a small run (core and kernels, and with cli), the most frames of our own
files from the loop's `train` (not counted) to a function of kernels that multiplies matrices, with
BF16, --remat full and a LoRA, parameters typed `Any`, and returns of `dict[str, Any]`, both in core
and kernels.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from code_lines import code_lines

ROOT = Path(__file__).resolve().parent.parent.parent
PRODUCTS = ("linear", "matmul", "mm", "addmm", "bmm")


def main() -> None:
    model = Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        tokens = sys.argv[2]
        made = frames(model, tokens) if "--frames" in sys.argv else modules(tokens)
        Path(tokens).with_suffix(".json").write_text(json.dumps(made))
        return
    with tempfile.TemporaryDirectory() as folder:
        texts, tokens = Path(folder, "texts.jsonl"), Path(folder, "tokens")
        rows = [{"id": str(n), "text": f"text {n} of many " * 40} for n in range(64)]
        texts.write_text("\n".join(map(json.dumps, rows)))
        subprocess.run(["sabia", "tokenize", str(texts), "--tokenizer", str(model), "--length",
                        "64", "-o", str(tokens)], check=True)  # fmt: skip
        again = [sys.executable, __file__, str(model), str(tokens)]
        counts: dict[str, int] = {}
        for more in ((), ("--frames",)):
            subprocess.run([*again, *more], check=True, stdout=subprocess.DEVNULL)
            counts |= json.loads(tokens.with_suffix(".json").read_text())
    print(json.dumps(counts | annotations()))


def modules(tokens: str) -> dict[str, int]:
    """Own modules with code after a run of a new model."""
    pretrain(tokens, "--shape", "d=64,layers=2,heads=4,ffn=96")
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    own = {Path(name) for name in files if name and name.endswith(".py")}
    loaded = Counter(
        top for path in own for top in ("core", "kernels", "cli")
        if path.is_relative_to(ROOT / top) and code_lines(path.read_text()) > 0
    )  # fmt: skip
    return {"modules": loaded["core"] + loaded["kernels"], "modules_with_cli": loaded.total()}


def frames(model: Path, tokens: str) -> dict[str, int]:
    """The most frames of our own files between `train` and a product of matrices."""
    most = 0

    def called(frame: FrameType, event: str, what: Any) -> None:
        nonlocal most
        if event == "c_call" and getattr(what, "__name__", "") in PRODUCTS:
            most = max(most, own_frames(frame))

    sys.setprofile(called)
    try:
        pretrain(tokens, "--model", str(model), "--precision", "bf16", "--remat", "full",
                 "--lora-rank", "4")  # fmt: skip
    finally:
        sys.setprofile(None)
    return {"frames": most}


def pretrain(tokens: str, *words: str) -> None:
    """Two steps in this process. RuntimeError if they fail."""
    from sabia.cli.main import main as sabia

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["sabia", "pretrain", tokens, "--steps", "2", "--batch", "2", *words, "-o",
                    folder + "/run"]  # fmt: skip
        try:
            sabia()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"sabia pretrain ended with {end.code}") from end


def own_frames(frame: FrameType | None) -> int:
    """Frames of core down to that of `train`, and one for kernels; 0 if there is no `train`."""
    count = 1
    while frame is not None:
        path = frame.f_code.co_filename
        count += path.startswith(str(ROOT / "core"))
        if frame.f_code.co_name == "train" and path.endswith("train/loop.py"):
            return count - 1
        frame = frame.f_back
    return 0


def annotations() -> dict[str, int]:
    """Parameters typed `Any` and returns of `dict[str, Any]`."""
    parameters = returns = 0
    for top in ("core", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    a = node.args
                    every = [*a.posonlyargs, *a.args, *a.kwonlyargs]
                    typed = [arg.annotation for arg in every if arg.annotation]
                    parameters += sum(ast.unparse(kind) == "Any" for kind in typed)
                    returns += bool(node.returns) and ast.unparse(node.returns) == "dict[str, Any]"
    return {"any_parameters": parameters, "dict_returns": returns}


if __name__ == "__main__":
    os.environ |= {"SABIA_RUN_RECORD": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    main()
