"""Quantization beside llm-compressor, its memory by depth, and methods on held-out records.

    python tests/bench/bench_quantize.py peers CHECKS --peer PYTHON --model DIR --tokens FILE
    python tests/bench/bench_quantize.py memory [--layers 2 24]
    python tests/bench/bench_quantize.py methods RECORDS --model DIR

`peers`: CHECKS holds quantize_peers.py; PYTHON is that of a virtual environment with llmcompressor.
GPTQ W4A16 of both in turn on the same token rows: output error of all matrices (by that script) and
CPU seconds of the whole commands. `memory`: peak resident memory, divergence included, of a model
with each number of layers. `methods`: divergence on held-out records by format, rounding and
smoothing; learned rounding; `--bits` at the size of `mixed`. Run under `flock /tmp/bench.lock`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SABIA = [sys.executable, "-m", "sabia.cli.main", "quantize"]
METHODS = (
    ("w4a16", "rtn", "none"), ("w4a16", "gptq", "none"), ("w4a16", "learned", "none"),
    ("w4a16", "rtn", "awq"), ("nvfp4a16", "rtn", "none"), ("nvfp4a16", "gptq", "none"),
)  # fmt: skip


def peers(options: argparse.Namespace) -> None:
    ours = " ".join(SABIA) + (
        " {tokens} --model {model} --recipe w4a16 --group-size 128 --rounding gptq --held-out 0"
        " --samples 4096 --seed 0 -o {output} --json > /dev/null"
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [options.peer, options.checks / "quantize_peers.py", "run", "--model",
                   options.model, "--tokens", options.tokens, "--work", folder, "--schemes",
                   "W4A16+gptq", "--rounds", options.rounds, "--ours", ours]  # fmt: skip
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)["schemes"]
    peer, own = report["W4A16+gptq"], report["ours W4A16+gptq"]
    means = [one["output_error"]["mean"] for one in (own, peer)]
    print(
        f"output error {means[0]:.4f}, peer {means[1]:.4f}: {means[0] / means[1]:.3f} (at most 1)"
    )
    print(f"CPU seconds {own['cpu_s']:.1f}, peer {peer['cpu_s']:.1f}: "
          f"{own['ratio_ours_over_peer']:.3f} (at most 0.6)")  # fmt: skip


def memory(options: argparse.Namespace) -> None:
    """Each number of layers in a process of its own; peaks are of the largest child so far."""
    peaks = []
    for layers in options.layers:
        with tempfile.TemporaryDirectory() as folder:
            code = (
                "import json, numpy as np; from sabia.core.model.storage import hub;"
                "from sabia.core.spec import from_config, new_config;"
                f"spec = from_config(new_config(hidden=384, layers={layers}, heads=6, ffn=1024, "
                "vocab=8192, tied=True));"
                f"hub.save_model('{folder}/m', spec, hub.init_params(spec, 0));"
                "rows = np.random.default_rng(0).integers(0, 8192, (32, 256)).tolist();"
                f"open('{folder}/r.jsonl', 'w').write('\\n'.join(json.dumps({{'id': str(i), "
                "'input_ids': r, 'document_lengths': [256]}) for i, r in enumerate(rows)))"
            )
            subprocess.run([sys.executable, "-c", code], check=True)
            own = [*SABIA, f"{folder}/r.jsonl", "--model", f"{folder}/m", "--recipe", "w4a16",
                   "--held-out", "8", "-o", f"{folder}/q", "--json"]  # fmt: skip
            watch = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
                     "stdout=subprocess.DEVNULL); "
                     "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")  # fmt: skip
            made = subprocess.run([sys.executable, "-c", watch, *own], capture_output=True,
                                  text=True, check=True)  # fmt: skip
            peaks.append(int(made.stdout) / 1024)
            print(f"{layers} layers: {peaks[-1]:.0f} MiB", flush=True)
    print(f"ratio {peaks[-1] / peaks[0]:.3f} (at most 1.1)")


def quantized(options: argparse.Namespace, *more: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [*SABIA, options.records, "--model", options.model, "-o", f"{folder}/q", "--json",
                   "--length", "512", *more]  # fmt: skip
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def methods(options: argparse.Namespace) -> None:
    for recipe, rounding, smooth in METHODS:
        report = quantized(options, "--recipe", recipe, "--rounding", rounding, "--smooth", smooth)
        kl = report["divergence"]["kl_nats"]
        print(f"{recipe} {rounding} {smooth}: KL {kl:.4g} nats held out", flush=True)
    mixed = quantized(options, "--recipe", "mixed")
    bits = 8 * sum(row["size_bytes"] for row in mixed["layers"]) / weights_of(mixed)
    chosen = quantized(options, "--recipe", "mixed", "--bits", f"{bits:.4f}")
    for name, report in (("mixed", mixed), (f"--bits {bits:.3f}", chosen)):
        print(f"{name}: KL {report['divergence']['kl_nats']:.4g} nats held out")


def weights_of(report: dict[str, Any]) -> float:
    """The number of quantized weights, of rows of w4a16 and w8a16."""
    share = {"w8a16": 8.0, "w4a16": 4.0}
    total = 0.0
    for row in report["layers"]:
        name, _, group = row["scheme"].partition(" g")
        total += 8 * row["size_bytes"] / (share[name] + (16 / int(group) if group else 0))
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    beside = parts.add_parser("peers")
    beside.add_argument("checks", type=Path)
    beside.add_argument("--peer", required=True)
    beside.add_argument("--tokens", required=True)
    beside.add_argument("--rounds", type=int, default=2)
    beside.add_argument("--model", required=True)
    depth = parts.add_parser("memory")
    depth.add_argument("--layers", type=int, nargs="+", default=[2, 24])
    held = parts.add_parser("methods")
    held.add_argument("records")
    held.add_argument("--model", required=True)
    given = parser.parse_args()
    {"peers": peers, "memory": memory, "methods": methods}[given.part](given)
