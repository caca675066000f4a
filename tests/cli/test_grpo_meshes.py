"""`sabia grpo` over several processes: every mesh axis, adapters, kills, a hung rank."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from training_cases import ENVIRONMENT, sabia, torchrun

from sabia.core.model.storage import hub
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.telemetry import metrics_path, read_rows

pytest.importorskip("torch")
SHAPES = {
    "qwen3": {"hidden": 32, "layers": 2, "heads": 2},
    "qwen3_moe": {"family": "qwen3_moe", "hidden": 32, "layers": 2, "heads": 2, "experts": 4,
                  "chosen": 2, "expert_ffn": 32},
}  # fmt: skip
OPTIONS = ("--reward", "regex", "--prompts", 4, "--group", 6, "--max-new-tokens", 4, "--steps", 4,
           "--lr", "1e-3", "--warmup", 1, "--peak-flops", "1T")  # fmt: skip
FIGURES = ("reward", "trained_tokens", "sampled_tokens", "live_groups", "loss", "grad_norm")
STEPS = ("--step-delimiter", "[A-M=]")
# of runs of several processes, once these have been measured
OF_RANKS = {"work_s_median", "work_s_max", "slowest_rank", "step_s_max", "step_s_median"}
REPLAY = ("--routing-replay", "--updates", 2)
VALUES = ("value_loss", "value_clip_fraction", "explained_variance")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of two families, and prompts whose reward is any digit."""
    place = tmp_path_factory.mktemp("grpo")
    tokenizer = train_bpe(["user assistant 37+58=095"] * 4, 300)
    tokenizer.save(place / "t")
    for name, shape in SHAPES.items():
        spec = from_config(new_config(vocab=tokenizer.vocab_size, context=64, **shape))
        hub.save_model(place / name, spec, hub.init_params(spec, 0), tokenizer_from=place / "t")
    rows = [{"id": str(n), "messages": [{"role": "user", "content": f"{n}+{n}=" * (1 + n % 3)}],
             "answer": "[0-9A-Z]"} for n in range(20)]  # fmt: skip
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def words(folder: Path, out: Path, *more: object, family: str = "qwen3") -> tuple[object, ...]:
    call = ("grpo", folder / "prompts.jsonl", "--model", folder / family, *OPTIONS, "-o", out)
    return (*call, *more)


@pytest.fixture(scope="module")
def one(folder: Path):
    """Runs of one process, by family and options."""
    runs: dict[tuple[object, ...], Path] = {}

    def of(family: str, *more: object) -> Path:
        if (family, *more) not in runs:
            out = folder / f"one-{len(runs)}"
            done = sabia(*words(folder, out, *more, family=family))
            assert done.returncode == 0, done.stderr
            runs[family, *more] = out
        return runs[family, *more]

    return of


LORA, UPDATES = ("--lora-rank", 4), ("--updates", 3)
GAE = ("--advantage", "gae", "--updates", 2)
MESHES = [
    ("fsdp=2", "qwen3", LORA),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("fsdp=2", "qwen3", ()),
        ("tensor=2", "qwen3", ()),
        ("tensor=2", "qwen3", LORA),
        ("context=2", "qwen3", ()),
        ("context=2", "qwen3", ("--beta", 0.1, "--correction", "sequence-cap")),
        ("pipe=2", "qwen3", ("--micro-tokens", 100)),
        ("context=2", "qwen3", LORA),
        ("expert=2", "qwen3_moe", ()),
        ("expert=2", "qwen3_moe", LORA),
        *((f"{axis}=2", "qwen3_moe", REPLAY) for axis in ("data", "fsdp", "expert", "tensor",
                                                            "context", "pipe")),
        ("fsdp=2,expert=2", "qwen3_moe", (*REPLAY, *LORA, "--remat", "full")),
        ("fsdp=2,context=2", "qwen3", ("--remat", "matmuls")),
        ("data=2,tensor=2", "qwen3", ("--aggregation", "seq-mean")),
        ("data=2", "qwen3", ("--micro-tokens", 30)),
        ("data=2", "qwen3", UPDATES),
        ("fsdp=2", "qwen3", UPDATES),
        *((f"{axis}=2", "qwen3", GAE) for axis in ("data", "fsdp", "tensor", "context", "pipe")),
        ("fsdp=2", "qwen3", (*GAE, *LORA, "--micro-tokens", 100)),
        *((mesh, "qwen3", STEPS) for mesh in ("data=2", "fsdp=2", "context=2")),
        ("fsdp=2", "qwen3", (*GAE, *STEPS)),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "family", "more"), MESHES)
def test_a_mesh_gives_the_run_of_one_process(folder, one, tmp_path, mesh, family, more) -> None:
    out, alone = tmp_path / "run", one(family, *more)
    processes = int(np.prod([int(part[-1]) for part in mesh.split(",")]))
    done = sabia(*words(folder, out, "--mesh", mesh, *more, family=family),
                 launcher=torchrun(processes))  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows, wanted = (read_rows(metrics_path(run)) for run in (out, alone))
    assert len(rows) == len(wanted) == 4
    for row, expected in zip(rows, wanted, strict=True):
        assert row.keys() - OF_RANKS == expected.keys()
        for name in (*FIGURES, *(VALUES if "gae" in more else ())):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), (name, row)
        assert abs(row["loss"] - expected["loss"]) <= 1e-5
        assert row["logprob_gap_max"] <= 1e-4
    (spec, weights), (_, others) = (hub.load_model(run / "final") for run in (out, alone))
    for tensor in spec.tensors():
        np.testing.assert_allclose(weights[tensor.name], others[tensor.name], atol=1e-3)
    assert (out / "adapter").exists() == ("--lora-rank" in more)
    if "--routing-replay" in more:
        for row, expected in zip(rows, wanted, strict=True):
            assert row["routing_mismatch"] == pytest.approx(expected["routing_mismatch"], abs=2e-3)
    assert ("explained_variance" in rows[0]) == ("gae" in more)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2", "tensor=2", "context=2"])
def test_a_mesh_of_jax_gives_the_run_of_torch(folder, one, tmp_path, mesh) -> None:
    out, alone = tmp_path / "run", one("qwen3")
    done = sabia(*words(folder, out, "--backend", "jax", "--mesh", mesh))
    assert done.returncode == 0, done.stderr
    rows, wanted = (read_rows(metrics_path(run)) for run in (out, alone))
    for row, expected in zip(rows, wanted, strict=True):
        assert row["reward"] == expected["reward"]
        assert abs(row["loss"] - expected["loss"]) <= 1e-5
        assert row["logprob_gap_max"] <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), GAE])
def test_killed_five_times_the_weights_are_equal(folder: Path, tmp_path: Path, more) -> None:
    """kill -9 to all processes of a mesh at random times, then a run to the end."""
    more = ("--mesh", "fsdp=2", "--save-every", 1, *more)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    begun = time.monotonic()
    assert sabia(*words(folder, whole, *more), launcher=torchrun(2)).returncode == 0
    took, draw = time.monotonic() - begun, random.Random(5)
    call = [*torchrun(2), *map(str, words(folder, out, *more))]
    for _ in range(5):
        null = subprocess.DEVNULL
        run = subprocess.Popen(call, env=ENVIRONMENT, stdout=null, stderr=null,
                               start_new_session=True)  # fmt: skip
        time.sleep(draw.uniform(0.3, 1.0) * took)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        # torchrun starts its ranks in sessions of their own
        subprocess.run(["pkill", "-9", "-f", str(out)], check=False)
    done = sabia(*words(folder, out, *more), launcher=torchrun(2))
    assert done.returncode == 0, done.stderr
    name = "final/model.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_a_hung_rank_is_named(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ("--mesh", "data=2", "--steps", 100000, "--hang-timeout", "5s")
    call = [*torchrun(2), *map(str, words(folder, out, *more))]
    with open(tmp_path / "err", "w") as err:
        run = subprocess.Popen(call, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=err)
    while not (out / "metrics.jsonl").exists() or not read_rows(metrics_path(out)):
        assert run.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.1)
    ranks = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout
    stopped = [pid for pid in ranks.split()
               if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]  # fmt: skip
    os.kill(int(stopped[0]), signal.SIGSTOP)
    try:
        run.wait(300)
    finally:
        with contextlib.suppress(ProcessLookupError):  # torchrun may have killed it
            os.kill(int(stopped[0]), signal.SIGCONT)
    said = (tmp_path / "err").read_text()
    assert "rank 1" in said, said
