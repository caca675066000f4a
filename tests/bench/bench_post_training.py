"""sft, dpo and grpo beside TRL's trainers, in turns, on one thread.

    PYTHONPATH=PEERS python tests/bench/bench_post_training.py CHECKS [--work DIR] [--rounds 3]
        [--steps 10] [--warmup 2] [--cases sft-float32,sft-bfloat16,dpo-float32,grpo-float32,
        grpo-bfloat16,packed]

CHECKS is a folder with `trl_peers.py`, whose model, texts, settings and TRL runs are used; PEERS
has TRL. Conversations and both answers of a preference are cut to 256 tokens, so that both sides
see the same rows, in the same order. grpo: 4 prompts x 8 samples of 64 tokens; the reward is
whether a regular expression matches. `packed`: sft on skewed lengths (answers of 5 to 200 words),
packed beside one conversation a row, which TRL and ours pad to the longest of a batch.

Ours is a command, run for the warm-up alone and for all steps, on data of that many steps: the
difference of the CPU times is the cost of the measured steps, so that a start-up counts for nobody
and work for each row (rendering, log-probabilities of the reference) counts for both. The peak of
memory is that of the whole process. Losses are compared step by step.
"""

import argparse
import functools
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

SEED, LONGEST, PATTERN = 0, 256, "e [ab]"
CASES = (
    "sft-float32", "sft-bfloat16", "dpo-float32", "grpo-float32", "grpo-bfloat16", "packed",
)  # fmt: skip
FIGURE = {"sft": "tokens_per_cpu_second", "dpo": "pairs_per_cpu_second",
          "grpo": "samples_per_cpu_second", "packed": "tokens_per_cpu_second"}  # fmt: skip
DPO_BATCH = 4
OURS = {
    "sft": "sft {input} --length 256 --no-pack --batch 8 --lr 1e-3",
    "dpo": "sft {input} --loss dpo --length 512 --no-pack --batch 4 --lr 1e-4",
    "grpo": "grpo {input} --prompts 4 --group 8 --max-new-tokens 64 --lr 1e-5 --reward regex",
    "packed": "sft {input} --length 256 --batch 8 --lr 1e-3 --epochs 1",
}
COMMON = (
    "--schedule constant --warmup 0 --weight-decay 0 --betas 0.9,0.999 --clip-norm 1 --seed 0 "
    "--save-every 1000000 --on-spike off --peak-flops 1T --model {model} -o {output}"
)


def prepare(checks: Any, options: argparse.Namespace) -> None:
    """The model, and the data of both sides: `KIND.parquet` of TRL, `KIND-STEPS.parquet` of ours,
    whose order of rows is undone, so that a run reads them in the order of the file."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    from sabia.core.shards.order import DataOrder

    work, ends = options.work, (options.warmup, options.warmup + options.steps)
    for lengths in ("skewed", "full"):
        checks.prepare(work, options.data, lengths, ends[1] * 2)  # sft's rows are dpo's answers too
        tokenizer = AutoTokenizer.from_pretrained(work / "bench-15m")
        rows = pq.read_table(work / "chat.parquet").to_pylist()
        if lengths == "skewed":
            skewed = [cut(row, tokenizer, LONGEST) for row in rows]
    chats, prompts = rows, pq.read_table(work / "prompts.parquet").to_pylist()
    chats = [cut(row, tokenizer, LONGEST) for row in chats]
    pairs = [pair(*two) for two in zip(chats[::2], chats[1::2], strict=True)]
    pairs = [cut_pair(row, tokenizer) for row in pairs]
    prompts = [row | {"answer": PATTERN} for row in prompts]
    sizes = {"sft": (checks.SFT_BATCH, chats), "dpo": (DPO_BATCH, pairs),
             "grpo": (checks.GRPO_PROMPTS, prompts), "packed": (8, skewed)}  # fmt: skip
    units = {}
    for kind, (batch, rows) in sizes.items():
        write(work / f"{kind}.jsonl", rows[: batch * ends[1]])
        for steps in ends:
            some = rows[: batch * steps]
            shown = [{}] * len(some)
            for place, row in zip(
                DataOrder((len(some),), SEED).rows(0, len(some)), some, strict=True
            ):
                shown[place] = row
            write(work / f"{kind}-{steps}.jsonl", shown)
        measured = rows[batch * ends[0] : batch * ends[1]]
        units[kind] = len(measured) * (checks.GRPO_SAMPLES if kind == "grpo" else 1)
        if kind in ("sft", "packed"):
            units[kind] = sum(tokens(row["messages"], tokenizer) for row in measured)
    (work / "units.json").write_text(json.dumps(units))


def tokens(messages: list[dict], tokenizer: Any) -> int:
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
    return len(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False))


def cut(row: dict, tokenizer: Any, most: int) -> dict:
    """The row with the last answer's words up to `most` tokens."""
    *before, last = row["messages"]
    words = last["content"].split()
    while tokens([*before, last | {"content": " ".join(words)}], tokenizer) > most:
        words.pop()
    turns = [*before, last | {"content": " ".join(words)}]
    return {"id": row["id"], "messages": [{k: t[k] for k in ("role", "content")} for t in turns]}


def pair(first: dict, second: dict) -> dict:
    """A preference for the answer of the first conversation to its prompt over the other's."""
    *prompt, chosen = first["messages"]
    return {"id": first["id"], "prompt": prompt, "chosen": chosen["content"],
            "rejected": second["messages"][-1]["content"]}  # fmt: skip


def cut_pair(row: dict, tokenizer: Any) -> dict:
    made = {}
    for name in ("chosen", "rejected"):
        whole = {
            "id": "",
            "messages": [*row["prompt"], {"role": "assistant", "content": row[name]}],
        }
        made[name] = cut(whole, tokenizer, LONGEST)["messages"][-1]["content"]
    return row | made


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def peer(checks: Any, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one of TRL's trainers in this process."""
    kind, dtype = name.split("-")
    rows = [json.loads(line) for line in (options.work / f"{kind}.jsonl").open()]
    checks.load = functools.partial(load, checks.load, rows)
    if kind == "dpo":
        return run_dpo(checks, dtype, rows, options)
    checks.lower_case_share = matches
    return (checks.run_grpo if kind == "grpo" else checks.run_sft)(dtype, options)


def load(original: Any, rows: list[dict], work: Path, dtype: str, file: str) -> Any:
    """As in trl_peers, with our rows."""
    model, tokenizer, _ = original(work, dtype, file)
    return model, tokenizer, [row.get("messages") for row in rows]


def matches(completions: list, **_: Any) -> list[float]:
    """TRL's reward: whether the pattern matches."""
    import re

    return [float(bool(re.search(PATTERN, one[0]["content"]))) for one in completions]


def run_dpo(checks: Any, dtype: str, rows: list[dict], options: argparse.Namespace) -> dict:
    """DPOTrainer on DPO_BATCH pairs a step, with a copy of the model as its reference."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, tokenizer, _ = checks.load(options.work, dtype, "chat.parquet")
    given = checks.common_arguments(options) | {"max_length": LONGEST, "learning_rate": 1e-4}
    arguments = DPOConfig(
        per_device_train_batch_size=DPO_BATCH,
        beta=0.1,
        train_sampling_strategy="sequential",
        **given,
    )
    data = Dataset.from_list(
        [
            {"prompt": row["prompt"]}
            | {
                name: [{"role": "assistant", "content": row[name]}]
                for name in ("chosen", "rejected")
            }
            for row in rows
        ]
    )
    trainer = DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    steps, cpu, wall = checks.train(trainer, options.warmup)
    pairs = options.steps * DPO_BATCH
    figures = {"pairs_per_cpu_second": pairs / cpu, "pairs_per_wall_second": pairs / wall}
    return figures | {"units": pairs, "loss": [float(step["loss"]) for step in steps]}


def our_command(case: str) -> str:
    """The shell line of a case."""
    kind, _, dtype = case.partition("-")
    line = f"{OURS[kind]} {COMMON}" + ("" if kind == "packed" else " --steps {steps}")
    line += " --precision " + ("bf16" if dtype == "bfloat16" else "fp32")
    return f"{shlex.join([sys.executable, '-m', 'sabia.cli.main'])} {line}"


def our_rows(work: Path) -> list[dict]:
    """The metrics of the last long run, a row a step."""
    text = (work / "ours-long" / "result" / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if "lr" in row]


def compare(rounds: Any, case: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a case in turns; their figures and how far the losses are apart."""
    kind, ends = case.split("-")[0], (options.warmup, options.warmup + options.steps)
    short, long = (
        {"model": work / "bench-15m", "input": work / f"{kind}-{steps}.jsonl", "steps": steps}
        for steps in ends
    )
    given = argparse.Namespace(rounds=options.rounds, ours=our_command(case))
    if kind != "packed":
        report = rounds.compare(given, work, [case], FIGURE[kind], short, long)
        ours, theirs = our_rows(work), report[case].pop("loss")
        if kind == "grpo":  # samples are drawn otherwise: what is sampled and trained is shown
            report["ours"] |= {k: [row[k] for row in ours] for k in ("live_groups", "length")}
        else:
            pairs = zip(ours, theirs, strict=True)
            report["losses_apart"] = max(abs(row["loss"] - loss) for row, loss in pairs)
        report["memory_ratio"] = report["ours"]["peak_rss_mib"] / report[case]["peak_rss_mib"]
        return report
    units, results = json.loads((work / "units.json").read_text())[kind], {}
    lines = {"packed": given.ours, "unpacked": given.ours + " --no-pack"}
    for _ in range(options.rounds):
        for name in ("unpacked TRL", *lines):
            if name in lines:
                found = rounds.run_ours(lines[name], work, FIGURE[kind], units, short, long)
            else:
                found = rounds.run_peer(work, "packed-float32")
            results.setdefault(name, []).append(found[FIGURE[kind]])
            print(f"{name}: {found[FIGURE[kind]]:.1f} {FIGURE[kind]}", file=sys.stderr)
    pairs = {
        f"over {name}": [a / b for a, b in zip(results["packed"], rates, strict=True)]
        for name, rates in results.items()
        if name != "packed"
    }
    return results | {"ratios": pairs}


def main() -> None:
    """Read the options; run one contender (as a child), or all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    for name, default in (("warmup", 2), ("steps", 10), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("only", "result", "data"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.insert(0, str(options.checks))
    import peer_rounds
    import trl_peers

    options.data = options.data or options.checks.parent / "data"
    if options.only:
        if str(options.only) == "prepare":
            prepare(trl_peers, options)
        else:
            peer_rounds.write_result(options, peer(trl_peers, str(options.only), options))
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.work = options.work or Path(temporary)
        os.environ.setdefault("SABIA_CACHE", str(options.work / "cache"))
        with peer_rounds.work_directory(options) as work:
            for case in options.cases.split(","):
                print(json.dumps({case: compare(peer_rounds, case, work, options)}), flush=True)


if __name__ == "__main__":
    main()
