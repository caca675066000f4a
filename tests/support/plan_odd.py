"""Odd command lines and damaged files for `sabia plan-cluster`, from a seed.

`odd_line` has any value for any option; `near_line` has values of the kind of each option, so that
most lines get past the reading of options; `damaged_file` is a file that was right, with one value
replaced or some of its text lost. Every option of the command is drawn but LEFT_OUT; lines may
write files, so the working directory must be a temporary one.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

from sabia.core.options.option import Option
from sabia.core.options.plan_cluster import PlanOptions

ROOT = Path(__file__).parents[2]
VALUES = ["0", "1", "-1", "1.5", "1e30", "1e-30", "nan", "inf", "", "8B", "8k", "30d", "40%", "7h",
          "x" * 5000, "é\x00", "1,2", ",", "[]", "{}", "h100", "b200,b200", "/dev/zero", "/", "99",
          "fsdp=8", "tensor=0", "megatron", "1000000000", "0.5", "16", "2", "10m"]  # fmt: skip
TABLE = PlanOptions.table
# arguments; an option that shows tracebacks; and one whose work is a measurement of seconds
LEFT_OUT = {"inputs", "debug", "measure"}
OPTIONS = [option for name, option in TABLE.items() if name not in LEFT_OUT]
# outputs are written below the working directory only
FILES = ["", "-", "x" * 300, "é\x00", "new", "a/b/c", "plans.parquet", "plans.jsonl.gz",
         "plans.arrow", "plans.csv", "charts.svg", "charts.html", "charts.png", "none/charts.svg",
         "config.json", "config.json/charts.svg", "runs.jsonl", "."]  # fmt: skip
# texts that mean something to an option
TEXTS = {
    "chip": ["b200", "h100", "a100", "v5p", "v6e", "gb300", "cpu", "l40s", "h20", "tpu-v7"],
    "compare": ["b200,h200", "h100,v5p,v6e", "a100,cpu"],
    "deadline": ["30d", "1d,2h", "400d", "10s"],
    "fixed_layout": ["tensor=8,fsdp=16", "fsdp=8", "tp=2,pp=4,virtual=2,micro-batch=1",
                     "expert=8,fsdp=8,zero=2", "context=8", "data=64,recompute=full"],
    "stack": ["sabia", "megatron", "fsdp", "maxtext", "zero-2021"],
    "price": ["2", "4.4,12", "$0.5"], "provider": ["nebius", "gcp", "aws"],
    "region": ["us", "europe"], "commitment": ["1 year", "3 years"],
    "weights": ["bf16", "fp8", "nvfp4"], "api_price": ["0.5,2"], "judge_price": ["0.5,2"],
    "budget": [str(ROOT / "examples" / "pyramid.toml")], "machine": ["none.toml"],
    "fit": ["runs.jsonl"],
    "model": ["config.json"], "config": ["machine.toml", "budget.toml", "none.toml"],
    "out": FILES, "plot": FILES, "pretrain_args": ["tokens/ --steps 5", "'", "--tokens 1B a b"],
}  # fmt: skip


def odd_line(rng: random.Random) -> list[str]:
    """Words of a line with any values."""
    words = ["--params", "8B"] if rng.random() < 0.7 else []
    for option in rng.sample(OPTIONS, rng.randrange(1, 4)):
        words += [option.flag, rng.choice(FILES if option.name == "out" else VALUES)]
    return [*words, "--search"] if rng.random() < 0.1 else words


def near_line(rng: random.Random) -> list[str]:
    """Words of a line with values of the right kind but for one in twelve, for one stage."""
    stage = rng.choice(["pretrain", "pretrain", "sft", "grpo", "serve", "eval"])
    words = ["--stage", stage, "--params", f"{10 ** rng.uniform(7, 12.5):.3g}"]
    words += ["--items", "5000"] if stage in ("sft", "eval") else []
    fitting = [option for option in OPTIONS if _fits(option, stage)]
    for option in rng.sample(fitting, rng.randrange(0, 6)):
        words += _words(option, rng)
    if rng.random() < 0.15 and stage in ("pretrain", "sft"):
        words += rng.choice([["--search"], ["--fixed-layout", rng.choice(TEXTS["fixed_layout"])]])
    return words


def _fits(option: Option, stage: str) -> bool:
    if option.name in ("params", "stage", "items", "model", "budget", "machine", "simulate"):
        return False
    return all(
        not stages or stage in stages
        for condition in option.only
        for stages in [dict(condition.values).get("stage")]
    )


def _words(option: Option, rng: random.Random) -> list[str]:
    if option.kind == "flag":
        return [option.flag]
    if rng.random() < 0.08 and option.name != "out":
        return [option.flag, rng.choice(VALUES)]
    return [option.flag, _value(option, rng)]


def _value(option: Option, rng: random.Random) -> str:
    if option.choices:
        return rng.choice(option.choices)
    size = 10 ** rng.uniform(-3, 12) if rng.random() < 0.2 else 10 ** rng.uniform(0, 4)
    values = {
        "text": rng.choice(TEXTS.get(option.name, VALUES)),
        "duration": f"{size:.2f}{rng.choice('smhdw')}",
        "share": f"{rng.uniform(0, 100):.1f}%",
        "size": f"{rng.choice([16, 80, 192])}GB",
        "length": rng.choice(["8k", "128k", "1000", "1", "10M"]),
        "money": f"${size:.2f}",
        "whole": str(max(1, round(size))),
        "integer": str(round(size)),
    }
    return values.get(option.kind, f"{size:.4g}")


ODD: list[Any] = [None, True, 0, -1, 1.5, 1e300, 10**400, "", "8B", "nan", "x" * 3000, "é\x00", [],
                  {}, [[]], {"a": {"b": []}}, ["x"], [1, 2]]  # fmt: skip
MACHINE = """name = "mine"
family = "GPU"
node_chips = 8
bf16_tflops = 900.0
measured_tflops = 600.0
hbm_gb = 80
hbm_tb_s = 3.3
scale_up_gb_s = 450
scale_up_chips = 8
nic_gb_s = 50
pcie_gb_s = 64
usd_per_chip_hour = 2.5
"""
RUNS = [
    {"run": str(n), "params": p, "tokens": t, "loss": 1.7 + 400 / p**0.34 + 410 / t**0.28}
    for n, (p, t) in enumerate((p, r * p) for p in (1e7, 3e7, 1e8) for r in (5, 20, 80))
]
LINES = [{"params": "8B"}, {"params": "70B", "chip": "h100", "search": True, "chips": 64},
         {"params": "1e12", "active": "5e10", "deadline": "30d"}]  # fmt: skip


def damaged_file(rng: random.Random, folder: Path) -> tuple[list[str], str]:
    """Words of a line that reads a damaged file of `folder`, and its standard input."""
    kind = rng.choice(["model", "model", "machine", "budget", "fit", "list"])
    if kind in ("machine", "budget"):
        path = folder / f"{kind}.toml"
        text = MACHINE if kind == "machine" else (ROOT / "examples" / "pyramid.toml").read_text()
        path.write_bytes(_lost(_replaced(text, rng), rng))
        return [f"--{kind}", str(path), *(["--params", "8B"] if kind == "machine" else [])], ""
    if kind == "model":
        path = folder / "config.json"
        families = json.loads((ROOT / "tests/core/plan/counting/families.json").read_text())
        config = rng.choice(families)["config"]
        path.write_bytes(_lost(json.dumps(_damaged(config, rng)), rng))
        return ["--model", str(path), *(["--search"] if rng.random() < 0.2 else [])], ""
    rows = [_damaged(row, rng) if rng.random() < 0.3 else row
            for row in (RUNS if kind == "fit" else LINES)]  # fmt: skip
    lost = _lost("".join(json.dumps(row) + "\n" for row in rows), rng)
    if kind == "list":
        return ["-"], lost.decode(errors="replace")
    path = folder / "runs.jsonl"
    path.write_bytes(lost)
    return ["--fit", str(path), "--params", "8B"], ""


def _damaged(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The row with one value odd, without it, or with one more."""
    key = rng.choice([*row, "x" * rng.choice([1, 3000])])
    changed = {k: v for k, v in row.items() if k != key}
    return changed if key in row and rng.random() < 0.3 else {**changed, key: rng.choice(ODD)}


def _replaced(text: str, rng: random.Random) -> str:
    """The TOML with one value odd."""
    values = list(re.finditer(r"(?<== ).*", text))
    at = rng.choice(values)
    odd = rng.choice(["true", "-1", "0", "1e300", "nan", "inf", "1" * 400, '""', '"x"', "[]",
                      "[[1]]", "{ a = 1 }", "2026-01-01", '"' + "x" * 3000 + '"', '"\\u0000"',
                      '"1.6T"', "[1, 2]"])  # fmt: skip
    return text[: at.start()] + odd + text[at.end() :]


def _lost(text: str, rng: random.Random) -> bytes:
    """One time in five the text without its end, or with some bytes of others."""
    data = text.encode()
    if rng.random() < 0.8:
        return data
    at = rng.randrange(len(data))
    return data[:at] + (b"" if rng.random() < 0.5 else rng.randbytes(4) + data[at:])
