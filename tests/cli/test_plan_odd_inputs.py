"""plan-cluster on odd values and files: one short line, a known exit code, no internal error."""

import json
import random
from pathlib import Path

import pytest
from plan_calls import Called, call, called
from plan_odd import damaged_file, near_line, odd_line

MOST = 500 + len("sabia plan-cluster: warning: ")


def fault(done: Called) -> str:
    """What is wrong with how a call ended; empty if nothing is."""
    if done.code not in (0, 1, 2, 3, 65):  # 1: of the file system
        return f"exit code {done.code}: {done.stderr[-300:]}"
    if "internal error" in done.stderr or "Traceback" in done.stderr:
        return done.stderr[-3000:]
    lines = done.stderr.splitlines()
    if lines and lines[-1].startswith('{"error"'):  # of --json: its parts are the message again
        lines[-1] = json.loads(lines[-1])["error"]["message"]
    longest = max(lines, key=len, default="")
    return f"a message of {len(longest)} characters: {longest[:300]}" if len(longest) > MOST else ""


def fuzz(seed: int, count: int, folder: Path) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        lines = [(odd_line(rng), ""), (near_line(rng), ""), damaged_file(rng, folder)]
        for words, stdin in lines:
            said = fault(called(words, stdin))
            assert not said, (words, said)


def test_random_command_lines_and_files_are_answered_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz(0, 25, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 101))
def test_many_random_command_lines_and_files(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz(seed, 34, tmp_path)


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
        ("--budget /dev/zero", "longer than 16 MB"),
        ("--config /dev/zero", "longer than 16 MB"),
        (f"--model {'x' * 5000}", "File name too long"),
    ],
)
def test_values_that_were_accepted_are_refused(words, hint):
    done = call(words)
    assert done.code in (1, 2, 65) and hint in done.stderr and not fault(done)


ODD_FIELDS = (
    {"hidden_size": 10**30}, {"hidden_size": 1e300}, {"num_hidden_layers": 1e11},
    {"num_hidden_layers": 10**400},
    {"model_type": [[]]}, {"model_type": {}},
    {"model_type": "exaone4", "sliding_window_pattern": [[]]},
)  # fmt: skip


@pytest.mark.parametrize("config", ["[" * 100_000, *map(json.dumps, ODD_FIELDS)])
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
