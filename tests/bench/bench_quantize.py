"""Quantization beside llm-compressor, its memory by depth, and methods on held-out records.

    python tests/bench/bench_quantize.py peers CHECKS --peer PYTHON --model DIR --tokens FILE
    python tests/bench/bench_quantize.py memory [--layers 2 24]
    python tests/bench/bench_quantize.py methods RECORDS --model DIR
    python tests/bench/bench_quantize.py bits RECORDS --model DIR …
    python tests/bench/bench_quantize.py usage TEXTS [--seeds 0 1 2]
    python tests/bench/bench_quantize.py rewards [--seeds 0 1 2]

`peers`: CHECKS holds quantize_peers.py; PYTHON is that of a virtual environment with llmcompressor.
GPTQ W4A16 of both in turn on the same token rows: output error of all matrices (by that script) and
CPU seconds of the whole commands. `memory`: peak resident memory, divergence included, of a model
with each number of layers. `methods`: divergence on held-out records by format, rounding and
smoothing; learned rounding; `--bits` at the size of `mixed`. `bits`: `--bits` at the size of one
4-bit format everywhere (groups of 32, NVFP4), to nearest and by GPTQ, for each model. `usage`: with
TEXTS/machado/*.txt and TEXTS/shakespeare/*.txt, models trained on both languages, calibrated on
records with 3 % English as they come, and chosen to be like a use that is half English: divergence
on other records by language; then on Portuguese records alone. `rewards`: a model learns sums by
sft, and then by grpo, once without and once with training for 4 bits; the rewards on held-out sums,
sampled with three seeds and greedy, of both models and their quantized forms. Run under
`flock /tmp/bench.lock`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SABIA = [sys.executable, "-m", "sabia.cli.main", "quantize"]
METHODS = (
    *((name, rounding, smooth) for name in ("w4a16", "w4a16-asym", "mxfp4a16", "nvfp4a16")
      for rounding in ("rtn", "gptq") for smooth in ("none", "awq")),
    ("w4a16", "learned", "none"),
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


def bits(options: argparse.Namespace) -> None:
    every = ("--formats", "mxfp4a16,w4a16,w4a16:32,nvfp4a16,w8a16,bf16")
    kinds = {
        "w4a16 g32": ("w4a16", "--group-size", "32"),
        "nvfp4a16": ("nvfp4a16",),
        "--bits 4.5": ("w4a16", "--bits", "4.5"),
        "--bits 4.5, all formats": ("w4a16", "--bits", "4.5", *every),
    }
    for model in options.models:
        options.model = model
        for rounding in ("rtn", "gptq"):
            for name, words in kinds.items():
                report = quantized(options, "--recipe", *words, "--rounding", rounding,
                                   "--samples", "64", "--held-out", "64")  # fmt: skip
                size = sum(row["size_bytes"] for row in report["layers"])
                kl = report["divergence"]["kl_nats"]
                print(f"{options.model} {rounding} {name}: KL {kl:.5f}, {size} bytes", flush=True)


def documents(files: Iterable[Path], language: str) -> list[dict[str, str]]:
    """Records of about 1,500 characters, each of whole lines."""
    made: list[dict[str, str]] = []
    for file in sorted(files):
        text = ""
        for line in file.read_text("utf-8").splitlines(keepends=True):
            text += line
            if len(text) >= 1500:
                made.append({"id": f"{file.stem}-{len(made)}", "text": text, "source": language})
                text = ""
    return made


def usage(options: argparse.Namespace) -> None:
    spoken = {
        language: documents((options.texts / folder).glob("*.txt"), language)
        for language, folder in (("pt", "machado"), ("en", "shakespeare"))
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def write(name: str, rows: Iterable[dict[str, str]]) -> Path:
            path = root / f"{name}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
            return path

        apart = {x: rows[::8] for x, rows in spoken.items()}  # neither trained nor calibrated on
        other = {x: [row for n, row in enumerate(rows) if n % 8] for x, rows in spoken.items()}
        used = write("used", [*apart["pt"][:40], *apart["en"][:40]])
        held = write("held", [*apart["pt"][40:], *apart["en"][40:]])
        few = write("few", [*other["pt"], *other["en"][: len(other["pt"]) * 3 // 97]])
        none = write("none", other["pt"])
        both = [*other["pt"], *other["en"]]
        sabia("tokenize", write("both", both), "-o", root / "t", "--length", "256",
              "--vocab-size", "1024", "-q")  # fmt: skip
        for seed in options.seeds:
            shape = "d=128,layers=3,heads=4,tied=false"
            sabia("pretrain", root / "t", "--shape", shape, "--steps", options.steps, "--batch",
                  "16", "--lr", "0.003", "--seed", seed, "-o", root / f"run{seed}",
                  "-q")  # fmt: skip
            model = root / f"run{seed}" / "final"
            for name, records, more in (("as they come", few, ()), ("like the use", few, (used,)),
                                        ("no English", none, (used,))):  # fmt: skip
                out = root / f"q{seed}"
                like = [x for path in more for x in ("--usage", path)]
                told = sabia("quantize", records, "--model", model, "--recipe", "w4a16",
                             "--samples", "48", "--held-out", "0", "--seed", seed, "--force",
                             "-o", out, *like).stderr  # fmt: skip
                verified = sabia("quantize", held, "--model", model, "--verify", out,
                                 "--held-out", "200", "--length", "512", "--json")  # fmt: skip
                groups = json.loads(verified.stdout)["divergence"]["by_source"]
                parts = ", ".join(f"{x} {groups[x]['kl_nats']:.5f}" for x in sorted(groups))
                print(f"seed {seed}, {name}: KL {parts}", flush=True)
                for line in told.splitlines():
                    if "calibration" in line:
                        print(f"  {line}", flush=True)


REWARDED = {
    "grpo": {"w4a16": ("--recipe", "w4a16"), "mixed": ("--recipe", "mixed"),
             "w4a16, to nearest": ("--recipe", "w4a16", "--rounding", "rtn")},
    "grpo for 4 bits": {"as trained": (), "mixed": ("--recipe", "mixed")},
}  # fmt: skip


def rewards(options: argparse.Namespace) -> None:
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            subprocess.run(
                [sys.executable, "-m", "sabia.examples.little_web", "--seed", str(seed), "--labels",
                 "labels.jsonl", "--sft", "sft.parquet", "--corrupt", "0.65", "--n", "32000",
                 "--prompts", "prompts.parquet", "--eval", "sums.parquet", "--eval-n",
                 "600"], cwd=root, check=True, capture_output=True,
            )  # fmt: skip
            tasks = []
            for name in ("sums.toml", "greedy.toml"):
                text = Path(__file__).parents[2].joinpath("examples/tasks", name).read_text("utf-8")
                (root / name).write_text(text, "utf-8")
                tasks += ["--task", root / name]
            same = ("--seed", seed, "-q")
            sabia("tokenize", root / "labels.jsonl", "-o", root / "t", "--length", "256",
                  "--vocab-size", "512", "-q")  # fmt: skip
            shape = "d=128,layers=4,heads=4,ffn=384"
            sabia("pretrain", root / "t", "--shape", shape, "--steps", "40", "--batch", "16",
                  "--lr", "2e-3", "-o", root / "base", *same)  # fmt: skip
            sabia("sft", root / "sft.parquet", "--model", root / "base/final", "--no-pack",
                  "--batch", "32", "--steps", options.steps, "--lr", "8e-4", "-o", root / "sft",
                  *same)  # fmt: skip
            for name, forms in REWARDED.items():
                precision = ("--precision", "qat-int4") if name != "grpo" else ()
                sabia("grpo", root / "prompts.parquet", "--model", root / "sft/final", "--steps",
                      "80", "--prompts", "32", "--group", "16", "--lr", "2e-4", "--schedule",
                      "wsd", "--decay", "30", "--max-new-tokens", "8", *precision, "-o",
                      root / name, *same)  # fmt: skip
                for form, words in forms.items():
                    told = sabia("quantize", root / "sft.parquet", "--model", root / name / "final",
                                 *words, *tasks, "--seed", seed, "-o", root / "q",
                                 "--force").stderr  # fmt: skip
                    print(f"seed {seed}, {name}, {form}:")
                    for line in told.splitlines():
                        if "exact_match" in line or "original →" in line:
                            print(f"  {line.partition(': ')[2]}", flush=True)


def sabia(*words: Any) -> subprocess.CompletedProcess[str]:
    command = [*SABIA[:-1], *map(str, words)]  # rows on stdout are no text
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)


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
    sized = parts.add_parser("bits")
    sized.add_argument("records")
    sized.add_argument("--model", dest="models", required=True, nargs="+")
    like = parts.add_parser("usage")
    like.add_argument("texts", type=Path)
    like.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    like.add_argument("--steps", type=int, default=150)
    rewarded = parts.add_parser("rewards")
    rewarded.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    rewarded.add_argument("--steps", type=int, default=1400, help="of sft")
    given = parser.parse_args()
    run = {"peers": peers, "memory": memory, "methods": methods, "bits": bits, "usage": usage}
    run |= {"rewards": rewards}
    run[given.part](given)
