"""A plan as a script: what it asks for, what is refused, and that the words arrive as they were."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.chips import Chip, find_chip, load_chips
from sabia.core.plan.output.launch import LaunchPlan, job_name, launch_script

ROOT = Path(__file__).parents[4]
COMMAND = ("pretrain", "tokens/", "--model", "base model/", "--mesh", "fsdp=64")


def planned(chip: str | Chip, chips: int, **fields: object) -> LaunchPlan:
    known_chip = find_chip(chip) if isinstance(chip, str) else chip
    given = {"wall_s": 6 * 3600, "mtbf_s": 1790.4} | fields
    return LaunchPlan("run-7b", known_chip, chips, COMMAND, **given)


def cpu(node_chips: int = 2) -> Chip:
    return replace(find_chip("h100"), name="cpu", family="CPU", node_chips=node_chips)


def options_of(script: str) -> dict[str, str]:
    options = re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE)
    return dict(options)


def test_every_name_is_of_a_chip_on_file() -> None:
    names = read_data("launch.toml")
    assert set(names) <= set(load_chips()) | {"cpu"}
    for chip, row in names.items():
        assert row["source"] and row["date"], chip
        assert {"tpu", "skypilot"} & row.keys(), chip


def test_slurm_asks_for_nodes_tasks_time_and_signals() -> None:
    options = options_of(launch_script("slurm", planned("h100", 64)))
    assert options["nodes"] == "8"
    assert options["ntasks-per-node"] == "8"
    assert options["gres"] == "gpu:8"
    assert options["time"] == "0-07:33:00"  # 6 h, a quarter more, and time to save
    assert options["signal"] == "B:USR1@180"
    assert options["requeue"] == ""


@pytest.mark.parametrize(
    ("chips", "nodes", "tasks"), [(1, "1", "1"), (4, "1", "4"), (8, "1", "8"), (16, "2", "8")]
)
def test_slurm_takes_a_part_of_one_node_or_whole_nodes(chips: int, nodes: str, tasks: str) -> None:
    options = options_of(launch_script("slurm", planned("h100", chips)))
    assert (options["nodes"], options["ntasks-per-node"]) == (nodes, tasks)
    assert options["gres"] == f"gpu:{tasks}"


def test_slurm_asks_for_a_long_run_in_pieces_with_time_to_save() -> None:
    plan = planned("h100", 8, wall_s=20 * 86400, save_s=400)
    options = options_of(launch_script("slurm", plan))
    assert options["time"] == "1-00:00:00"
    assert options["signal"] == "B:USR1@800"


def test_a_short_run_has_time_to_start_before_it_is_told_to_save() -> None:
    options = options_of(launch_script("slurm", planned("h100", 8, wall_s=2)))
    assert options["time"] == "0-00:13:00"


def test_a_cpu_needs_no_resource() -> None:
    assert "gres" not in options_of(launch_script("slurm", planned(cpu(), 2)))


def test_the_words_reach_the_command_as_they_were(tmp_path: Path) -> None:
    script = launch_script("slurm", planned("h100", 1, outputs="my run"))
    (tmp_path / "sabia").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "sabia").chmod(0o755)
    printed = subprocess.run(
        ["bash", "-c", script], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert printed.stdout.splitlines() == [
        *COMMAND,
        "--save-every",
        "auto",
        "--mtbf",
        "1790s",
        "-o",
        "my run",
    ]


def test_an_interval_in_the_command_stays() -> None:
    plan = replace(planned("h100", 8), command=(*COMMAND, "--save-every", "auto"))
    assert plan.words_to("run").count("--save-every") == 1


def test_the_body_is_that_of_the_example() -> None:
    example = (ROOT / "examples" / "slurm" / "train.sbatch").read_text()
    body = (ROOT / "core" / "plan" / "data" / "slurm_body.sh").read_text()
    assert example.endswith(body) and body.startswith("sabia=(sabia)")
    assert launch_script("slurm", planned("h100", 8)).endswith(body)


def started(tmp_path: Path, program: str, **variables: str) -> subprocess.Popen[str]:
    """The example's script with `sabia` replaced by a Python program."""
    (tmp_path / "sabia").write_text(f"#!{sys.executable}\n{program}")
    (tmp_path / "sabia").chmod(0o755)
    return subprocess.Popen(
        ["bash", str(ROOT / "examples" / "slurm" / "train.sbatch")], text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip


def test_a_signal_before_the_handler_is_installed_does_not_end_the_run(tmp_path: Path) -> None:
    """The program stands for the start of Python: it installs its handler later."""
    program = "print('started', flush=True)\nimport time\ntime.sleep(1)\nraise SystemExit(7)\n"
    script = started(tmp_path, program)
    assert script.stdout is not None
    assert script.stdout.readline() == "started\n"
    children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGUSR1)
    assert script.wait(30) == 7


@pytest.mark.parametrize(("limit", "warned"), [(120, True), (180, True), (181, False), (0, False)])
def test_a_time_limit_below_the_lead_is_warned_of(tmp_path: Path, limit: int, warned: bool) -> None:
    times = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": str(1000 + limit)}
    script = started(tmp_path, "", **(times if limit else {}))
    _, errors = script.communicate(timeout=30)
    assert script.returncode == 0
    assert (f"the time limit is {limit} s" in errors) is warned, errors


def xpk_words(script: str, **variables: str) -> list[str]:
    """What xpk is called with."""
    printed = subprocess.run(
        ["bash", "-c", "xpk() { printf '%s\\n' \"$@\"; }\n" + script],
        env={"PATH": os.environ["PATH"], **variables}, capture_output=True, text=True,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.splitlines()


def test_xpk_creates_one_workload_on_one_slice() -> None:
    script = launch_script("xpk", planned("tpu-v5p", 512, spot=True))
    words = xpk_words(script, XPK_CLUSTER="big", XPK_IMAGE="registry/sabia:1")
    assert words[:2] == ["workload", "create"]
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words[2:])
    assert options["cluster"] == "big" and options["docker-image"] == "registry/sabia:1"
    assert options["tpu-type"] == "v5p-1024" and options["num-slices"] == "1"
    assert "spot" in options and options["restart-on-exit-codes"] == "75"
    expected = ["sabia", *COMMAND, "--save-every", "auto", "--mtbf", "1790s", "-o", "run"]
    assert shlex.split(options["command"]) == expected
    assert "--spot" not in launch_script("xpk", planned("tpu-v5p", 512))


def test_xpk_asks_for_what_it_was_not_told() -> None:
    script = launch_script("xpk", planned("tpu-v6e", 64))
    printed = subprocess.run(
        ["bash", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert printed.returncode != 0 and "name of the cluster" in printed.stderr


@pytest.mark.parametrize(
    ("chip", "chips", "kind"),
    [("tpu-v4", 64, "v4-128"), ("tpu-v5e", 16, "v5litepod-16"), ("tpu-v6e", 256, "v6e-256"),
     ("tpu-v7", 128, "tpu7x-256"), ("tpu-v5p", 8960, "v5p-17920"), ("tpu-v5p", 8, "v5p-16")],
)  # fmt: skip
def test_slices_are_named_as_xpk_names_them(chip: str, chips: int, kind: str) -> None:
    assert f"--tpu-type={kind} " in launch_script("xpk", planned(chip, chips))


@pytest.mark.parametrize(
    ("kind", "chip", "chips", "named"),
    [
        ("slurm", "tpu-v5p", 64, "not tpu-v5p"),
        (
            "slurm",
            "h100",
            12,
            "12 h100 are not whole nodes of 8 .expected a multiple, such as 8 or 16",
        ),
        ("xpk", "h100", 8, "no name for h100"),
        ("xpk", "tpu-v5p", 48, "48 tpu-v5p are not a slice"),
        ("xpk", "tpu-v5p", 4288, "not a slice"),  # 67 cubes in a row
        ("xpk", "tpu-v6e", 512, "expected 1, 4, 8, 16, 32, 64, 128, 256"),
        ("skypilot", "trn2", 16, "no name for trn2"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(kind: str, chip: str, chips: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        launch_script(kind, planned(chip, chips))


@pytest.mark.parametrize("model", ["", "7b", "Run", "a_b", "x" * 41, "a-", "é" * 60, "Llama 3.1"])
def test_a_job_has_a_name_that_all_launchers_take(model: str) -> None:
    name = job_name(model)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 40


def task_of(plan: LaunchPlan) -> dict:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(launch_script("skypilot", plan))


def test_skypilot_asks_for_nodes_of_gpus() -> None:
    task = task_of(planned("h100", 64, spot=True))
    assert task["num_nodes"] == 8
    wanted = task["resources"]
    assert wanted["accelerators"] == "H100:8" and wanted["use_spot"] is True
    assert wanted["job_recovery"]["recover_on_exit_codes"] == [75]
    assert task["file_mounts"]["/outputs"] == {"name": "run-7b-outputs", "mode": "MOUNT_CACHED"}


def test_skypilot_asks_for_a_slice_of_tpus() -> None:
    task = task_of(planned("tpu-v5p", 128))
    assert (task["resources"]["accelerators"], task["num_nodes"]) == ("tpu-v5p-256", 1)
    shell = task["run"].replace("sabia pretrain", "env | grep ^TPU_WORKER | sort; true")
    printed = run_task(shell, SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2", SKYPILOT_NODE_RANK="1")
    assert printed.stdout.splitlines() == [
        "TPU_WORKER_HOSTNAMES=10.0.0.1,10.0.0.2", "TPU_WORKER_ID=1",
    ]  # fmt: skip


def run_task(shell: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("ends", [0, 75])
def test_skypilot_starts_a_process_for_each_gpu_and_ends_as_they_do(
    tmp_path: Path, ends: int
) -> None:
    task = task_of(planned("h100", 16))
    (tmp_path / "sabia").write_text(
        "#!/bin/bash\n"
        'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR ${@: -1}"\n'
        f'[ "$RANK" != 11 ] || exit {ends}\n'
    )
    (tmp_path / "sabia").chmod(0o755)
    node = {"IPS": "10.0.0.1\n10.0.0.2", "RANK": "1"}
    node_variables = {f"SKYPILOT_NODE_{name}": value for name, value in node.items()}
    path = f"{tmp_path}:{os.environ['PATH']}"
    printed = run_task(task["run"], PATH=path, SKYPILOT_NUM_NODES="2", **node_variables)
    assert printed.returncode == ends, printed.stderr
    seen = sorted(line.split() for line in printed.stdout.splitlines())
    ranks = sorted([str(8 + n), str(n), "16", "10.0.0.1", "/outputs/run"] for n in range(8))
    assert seen == ranks


def test_a_single_gpu_starts_alone() -> None:
    assert task_of(planned("h100", 1))["run"].strip().startswith("sabia pretrain tokens/")


def test_emitting_imports_no_numbers() -> None:
    code = (
        "import sys\nfrom sabia.core.plan.chips import find_chip\n"
        "from sabia.core.plan.output.launch import LaunchPlan, launch_script\n"
        "launch_script('slurm', LaunchPlan('a', find_chip('h100'), 8, ('pretrain',), 60.0))\n"
        "assert not {'numpy', 'torch', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
