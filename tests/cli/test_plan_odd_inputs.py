"""plan-cluster on odd values and files: one short line, a known exit code, no internal error."""

import json
import random

import pytest
from plan_calls import call, called

VALUES = ["0", "1", "-1", "1.5", "1e30", "1e-30", "nan", "inf", "", "8B", "8k", "30d", "40%", "7h",
          "x" * 5000, "é\x00", "1,2", ",", "[]", "{}", "h100", "b200,b200", "/dev/zero", "/", "99",
          "fsdp=8", "tensor=0", "megatron", "1000000000", "0.5", "16", "2", "10m"]  # fmt: skip
FLAGS = ["--params", "--active", "--tokens", "--seq", "--batch-tokens", "--deadline", "--chip",
         "--chips", "--nodes", "--hbm", "--utilisation", "--mfu", "--price", "--layers", "--hidden",
         "--lora-rank", "--state-recipe", "--fixed-layout", "--stack", "--micro-batch", "--preempt",
         "--restart", "--bucket-gbps", "--failure-rate", "--save-stall", "--job-limit", "--repair",
         "--spare-nodes", "--max-cost", "--serve-tokens", "--region", "--provider", "--stage",
         "--items", "--group", "--pue", "--model", "--compare", "--budget", "--plot",
         "--machine", "--fit", "--data", "--tokens-per-param", "--base-format", "--reserved",
         "--term", "--production", "--first-mfu", "--tuning", "--lora"]  # fmt: skip
MOST = 500 + len("sabia plan-cluster: warning: ")


def check(words: list[str], stdin: str = "") -> None:
    done = called(words, stdin)
    assert done.code in (0, 1, 2, 3, 65), (words, done.stderr[-300:])  # 1: of the file system
    assert "internal error" not in done.stderr and "Traceback" not in done.stderr, words
    assert max(map(len, done.stderr.splitlines()), default=0) <= MOST, words


def fuzz(seed: int, count: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        words = ["--params", "8B"] if rng.random() < 0.7 else []
        for flag in rng.sample(FLAGS, rng.randrange(1, 4)):
            words += [flag, rng.choice(VALUES)]
        check([*words, "--search"] if rng.random() < 0.1 else words)


def test_random_command_lines_are_answered_or_refused():
    fuzz(0, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 101))
def test_many_random_command_lines(seed):
    fuzz(seed, 100)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--model /dev/zero", "longer than 16 MB"),
        ("--params 8B --price 700", "per chip and hour"),
        ("--params 8B --plot no-such-folder/x.svg", "not a directory"),
        ("--params 8B --mfu 1", "may be a share or percent"),
        ("--params 8B --mfu 1.5", "may be a share or percent"),
        ("--params 8B --region mars", "no region 'mars'"),
        ("--params 8B --stage grpo --chips 8 --group 1", "expected 2"),
        ("--params 8B --stage eval --items 0", "expected 1 or more"),
    ],
)
def test_values_that_were_accepted_are_refused(words, hint):
    done = call(words)
    assert done.code in (2, 65) and hint in done.stderr


@pytest.mark.parametrize("config", ["[" * 100_000, json.dumps({"hidden_size": 10**30})])
def test_configurations_beyond_all_sense(config, tmp_path):
    path = tmp_path / "config.json"
    model = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
             "vocab_size": 100, "intermediate_size": 8}  # fmt: skip
    path.write_text(config if config[0] == "[" else json.dumps(model | json.loads(config)))
    done = call(f"--model {path}")
    assert done.code in (2, 65) and "internal" not in done.stderr


def test_a_list_of_runs_goes_on_after_a_bad_line():
    lines = '{"params": "8B"}\nnot json\n{"params": "8B", "bad": 1}\n{"params": "70B"}\n'
    done = call("- --json", lines)
    rows = json.loads(done.stdout)["rows"]
    assert done.code == 0 and [bool(row["error"]) for row in rows] == [False, True, True, False]
    assert "2 of 4 rows have no plan" in done.stderr
    assert call("- --json", "not json\n").code == 65
