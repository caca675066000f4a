"""A plan as a Slurm batch script: header, the command's words, and the body of the trainer's own.

The body (data/slurm_body.sh) is that of examples/slurm/train.sbatch: one srun for all processes,
USR1 before the time limit and TERM at a preemption make sabia save and exit 75, and the job queues
again. A time limit is asked for that fits the expected time; a run that outlasts it goes on after.
"""

import math
import shlex
from importlib import resources

from sabia.core.plan.output.launch import LaunchPlan, name_for


def script(plan: LaunchPlan) -> str:
    """The text of the batch script. Raises UsageError on chips that Slurm does not rent out."""
    options = {
        "job-name": plan.name,
        "nodes": plan.nodes,
        "ntasks-per-node": plan.node_chips,
        **_resources(plan),
        "time": _clock(plan.limit_s),
        "signal": f"B:USR1@{plan.lead_s}",
        "open-mode": "append",
        "output": f"{plan.name}-%j.log",
    }
    header = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    body = resources.files("sabia.core.plan") / "data" / "slurm_body.sh"
    lines = [
        "#!/bin/bash",
        f"# {plan.about}; submit with: sbatch [--partition=…] [--account=…] {plan.name}.sbatch",
        *header,
        "#SBATCH --requeue",
        f": ${{SABIA_RESTARTS:={plan.restarts}}}",
        f"set -- {shlex.join(plan.words_to(plan.outputs))}",
    ]
    return "\n".join(lines) + "\n" + body.read_text(encoding="utf-8")


def _resources(plan: LaunchPlan) -> dict[str, str]:
    """The generic resource of each node; a CPU needs none."""
    if plan.chip.family == "CPU":
        return {}
    return {"gres": f"{name_for(plan.chip, 'slurm', 'gres')}:{plan.node_chips}"}


def _clock(seconds: float) -> str:
    """D-HH:MM:SS, in whole minutes."""
    minutes = max(1, math.ceil(seconds / 60))
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
