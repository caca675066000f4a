"""A plan for xpk (TPUs on Google's Kubernetes) and for SkyPilot (any cloud).

xpk starts the command once on every host of a slice, and GKE tells each who it is
(TPU_WORKER_HOSTNAMES), which sabia reads. SkyPilot runs the task's `run` on every node with
SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS: on GPUs a process is started for each with what torchrun
would tell it (torchrun itself ends with 1 whatever its processes end with), on TPU hosts these
become the names that sabia reads. Both start a run again that ends with 75.
Option names are those of AI-Hypercomputer/xpk src/xpk/parser/workload.py (2026-06) and of
SkyPilot's YAML reference and managed jobs (2026-11).
"""

import json
import shlex
from pathlib import PurePosixPath

from sabia.core.plan.output.launch import INTERRUPTED, LaunchPlan, name_for, slice_of

_PORT = 29500
_MANY = 1000  # of preemptions, which are no errors: no sensible run meets as many
_SETUP = "command -v sabia || { echo sabia is missing: install it here or set image_id; exit 1; }"
_MOUNT = "/outputs"  # where storage lies that outlives the nodes


def xpk(plan: LaunchPlan) -> str:
    """A shell script with one `xpk workload create`. Raises UsageError but for TPU slices."""
    image = plan.image or '"${XPK_IMAGE:?docker image that has sabia}"'
    options = [
        '--cluster="${XPK_CLUSTER:?name of the cluster}"',
        f"--workload={plan.name}",
        f"--tpu-type={slice_of(plan, 'xpk')}",
        "--num-slices=1",
        "--no-use-parallel-containers",  # sabia is one process a host
        f"--docker-image={image}",
        *["--spot"] * plan.spot,
        f"--max-restarts={_MANY if plan.spot else plan.restarts}",
        f"--restart-on-exit-codes={INTERRUPTED}",
        f"--termination-grace-period-seconds={plan.lead_s}",
        f"--command={shlex.quote(plan.line)}",
        '"$@"',
    ]
    lines = (
        "#!/bin/bash",
        f"# {plan.about}; what is read and written must lie where all hosts see it",
        "# further options (--project, --zone, --storage=NAME, --priority) go behind the script",
        " \\\n  ".join(["xpk workload create", *options]),
    )
    return "\n".join(lines) + "\n"


def skypilot(plan: LaunchPlan) -> str:
    """A task file for `sky jobs launch`. Raises UsageError on chips without a SkyPilot name."""
    tpu = plan.chip.family == "TPU"
    run = _on_tpus(plan) if tpu else _on_gpus(plan)
    lines = [
        f"# {plan.about}; start with: sky jobs launch {plan.name}.yaml",
        f"name: {plan.name}",
        "workdir: .",
        f"num_nodes: {1 if tpu else plan.nodes}",
        "resources:",
        *(f"  {line}" for line in _resources(plan, tpu)),
        "  job_recovery:",
        f"    max_restarts_on_errors: {plan.restarts}",
        f"    recover_on_exit_codes: [{INTERRUPTED}]",
        "file_mounts:",
        f"  {_MOUNT}:",
        f"    {_bucket(plan)}",
        "    mode: MOUNT_CACHED",
        "setup: |",
        f"  {_SETUP}",
        "run: |",
        *(f"  {line}" for line in run),
    ]
    return "\n".join(lines) + "\n"


def _resources(plan: LaunchPlan, tpu: bool) -> list[str]:
    if tpu:
        lines = [f"accelerators: {slice_of(plan, 'skypilot', 'skypilot')}"]
    else:
        name = name_for(plan.chip, "skypilot", "skypilot")
        lines = [f"accelerators: {name}:{plan.node_chips}"]
    lines.append(f"use_spot: {str(plan.spot).lower()}")
    lines += [f"infra: {json.dumps(plan.infra)}"] if plan.infra else []
    return lines + ([f"image_id: {json.dumps('docker:' + plan.image)}"] if plan.image else [])


def _bucket(plan: LaunchPlan) -> str:
    """An existing bucket, or the name of one that SkyPilot makes and keeps."""
    return f"source: {json.dumps(plan.bucket)}" if plan.bucket else f"name: {plan.name}-outputs"


def _line(plan: LaunchPlan) -> str:
    """The command, its outputs on the storage that outlives the nodes."""
    return plan.line_to(str(PurePosixPath(_MOUNT) / plan.outputs))


def _on_gpus(plan: LaunchPlan) -> list[str]:
    line = _line(plan)
    if plan.chips == 1:
        return [line]
    return [
        'export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1) MASTER_PORT=' + str(_PORT),
        f"here={plan.node_chips}",
        "export WORLD_SIZE=$((SKYPILOT_NUM_NODES * here))",
        "for ((n = 0; n < here; n++)); do",
        f"  RANK=$((SKYPILOT_NODE_RANK * here + n)) LOCAL_RANK=$n {line} &",
        "  processes+=($!)",
        "done",
        "code=0",
        'for process in "${processes[@]}"; do',
        "  wait $process || code=$?",
        "done",
        "exit $code",
    ]


def _on_tpus(plan: LaunchPlan) -> list[str]:
    return [
        'export TPU_WORKER_HOSTNAMES=$(echo "$SKYPILOT_NODE_IPS" | paste -sd,)',
        "export TPU_WORKER_ID=$SKYPILOT_NODE_RANK",
        _line(plan),
    ]
