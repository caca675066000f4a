"""The planner's batch script on a real Slurm: it starts, is cut short, goes on and finishes."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from little_run import losses, tokens_once
from one_node import OneNode, ask, job_state, start_again, wait_until

from sabia.core.plan.chips import find_chip
from sabia.core.plan.output.launch import LaunchPlan, launch_script
from sabia.core.spec import new_config

pytestmark = pytest.mark.slurm
CPU = replace(find_chip("h100"), name="cpu", family="CPU", node_chips=2)


def emitted(folder: Path, name: str, chips: int, *more: str) -> LaunchPlan:
    """A plan of the little corpus, its script written to `folder`."""
    command = ("pretrain", str(tokens_once(folder)), "--shape", "d=64,layers=2,heads=2",
               "--steps", "300", "--batch", "8", *more)  # fmt: skip
    plan = LaunchPlan(name, CPU, chips, command, wall_s=300, outputs=str(folder / name))
    (folder / f"{name}.sbatch").write_text(launch_script("slurm", plan))
    return plan


def test_an_emitted_job_of_two_processes_is_cut_short_and_finishes(
    node: OneNode, tmp_path: Path
) -> None:
    plan = emitted(tmp_path, "cut", 2, "--mesh", "data=2")
    whole = plan.words_to(str(tmp_path / "whole"))
    alone = [word.replace("data=2", "data=1") for word in whole]
    subprocess.run(["sabia", *alone], check=True, cwd=tmp_path)
    job = ask("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "cut.sbatch"))
    metrics, log = tmp_path / "cut" / "metrics.jsonl", tmp_path / f"cut-{job}.log"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, 180)
    ask("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: job_state(job) in ("PENDING", "COMPLETED"), 120)
    assert job_state(job) == "PENDING", log.read_text()
    start_again(job)
    assert "restart 1" in log.read_text()
    assert losses(tmp_path / "cut")[-1] == pytest.approx(losses(tmp_path / "whole")[-1], abs=1e-4)


def test_a_preempted_job_saves_and_goes_on(node: OneNode, tmp_path: Path) -> None:
    """As a preemption with PreemptMode=REQUEUE does: TERM, then the job queues again."""
    emitted(tmp_path, "preempted", 1)
    job = ask("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "preempted.sbatch"))
    metrics, log = tmp_path / "preempted" / "metrics.jsonl", tmp_path / f"preempted-{job}.log"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, 180)
    ask("scontrol", "requeue", job)
    wait_until(lambda: job_state(job) == "PENDING", 120)
    start_again(job)
    assert "resuming at step" in log.read_text()


def test_what_the_planner_prints_runs(node: OneNode, tmp_path: Path) -> None:
    """From a config.json and a corpus to a finished run, with no word changed between."""
    tokens_once(tmp_path)
    shape = {"hidden": 64, "layers": 2, "heads": 2, "vocab": 320}
    (tmp_path / "config.json").write_text(json.dumps(new_config("llama", **shape)))
    asked = ["plan-cluster", "--model", "config.json", "--chip", "cpu", "--chips", "2", "--price",
             "1", "--tokens", "40K", "--seq", "64", "--batch-tokens", "512", "--precision", "fp32",
             "--fixed-layout", "data=2", "--emit", "slurm"]  # fmt: skip
    printed = subprocess.run(
        ["sabia", *asked], check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ).stdout
    (tmp_path / "plan.sbatch").write_text(printed)
    done = subprocess.run(["sbatch", "--wait", "plan.sbatch"], cwd=tmp_path)
    (log,) = tmp_path.glob("sabia-*.log")
    assert done.returncode == 0, log.read_text()
    assert "on data=2" in log.read_text()
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
