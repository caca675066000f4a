"""A Slurm of one node in a scratch folder, without systemd.

munged, slurmctld and slurmd get their own key, ports and configuration. Needs root and the Debian
packages slurmctld, slurmd, slurm-client and munge.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
SETTINGS = {
    "ClusterName": "test", "SlurmUser": "root", "SlurmdUser": "root", "AuthType": "auth/munge",
    "CredType": "cred/munge", "MpiDefault": "none", "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none", "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none", "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core", "SchedulerParameters": "bf_interval=2,sched_interval=2",
    "ReturnToService": "2", "SlurmdParameters": "config_overrides", "JobRequeue": "1",
    "KillWait": "10", "MinJobAge": "600",
}  # fmt: skip


def what_is_missing() -> str:
    """Why a Slurm cannot be started here; empty when it can."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    if absent:
        return f"no one-node Slurm: {', '.join(absent)} not installed"
    return "" if os.geteuid() == 0 else "no one-node Slurm: slurmd needs root"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class OneNode:
    """Started on entry, stopped on exit; SLURM_CONF points to it meanwhile."""

    def __init__(self, folder: Path, cpus: int = 4) -> None:
        self.folder, self.cpus = folder, cpus

    def __enter__(self) -> "OneNode":
        self.folder.chmod(0o755)
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        (self.folder / "slurm.conf").write_text(self._configuration())
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid",
                 "log-file": "log/munged.log", "seed-file": "munged.seed"}  # fmt: skip
        # --force: the socket may lie in a folder that only we can enter, such as pytest's
        places = (f"--{name}={self.folder / path}" for name, path in files.items())
        ask("munged", "--force", *places)
        ask("slurmctld")
        ask("slurmd")
        wait_until(lambda: "State=IDLE" in ask("scontrol", "show", "node", check=False), 60)
        return self

    def _configuration(self) -> str:
        host = socket.gethostname().split(".")[0]
        named = SETTINGS | {
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "AuthInfo": f"socket={self.folder}/munge.socket",
            "SlurmctldPort": free_port(), "SlurmdPort": free_port(),
            "StateSaveLocation": self.folder / "state", "SlurmdSpoolDir": self.folder / "spool",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd.pid",
            "SlurmctldLogFile": self.folder / "log/slurmctld.log",
            "SlurmdLogFile": self.folder / "log/slurmd.log",
        }  # fmt: skip
        node = f"NodeName={host} NodeAddr=127.0.0.1 CPUs={self.cpus} Sockets=1"
        node += f" CoresPerSocket={self.cpus} ThreadsPerCore=1 RealMemory=4000"
        part = f"PartitionName=all Nodes={host} Default=YES MaxTime=UNLIMITED State=UP"
        return "\n".join([*(f"{k}={v}" for k, v in named.items()), node, part, ""])

    def __exit__(self, *_error: object) -> None:
        left = ask("squeue", "--noheader", "--format=%A", check=False).split()
        if left:
            ask("scancel", *left, check=False)
            time.sleep(1)
        for name in ("slurmd", "slurmctld", "munged"):
            end(self.folder / f"{name}.pid")


def ask(*words: str, check: bool = True) -> str:
    """Standard output of a short program."""
    done = subprocess.run(words, check=check, text=True, capture_output=True)
    return done.stdout.strip()


def wait_until(holds, limit_s: float) -> None:
    """Poll until true; TimeoutError after the limit."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {limit_s} s")
        time.sleep(0.2)


def job_state(job: str) -> str:
    """PENDING, RUNNING, COMPLETED, FAILED …"""
    return ask("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}", check=False)


def start_again(job: str) -> None:
    """Start a job that queues again, and wait for its end."""
    time.sleep(5)  # started at once, it would meet its own remains and be held
    ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: job_state(job) == "COMPLETED", 240)


def end(pid_file: Path) -> None:
    """SIGTERM, and SIGKILL after ten seconds."""
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
            for _ in range(100):
                time.sleep(0.1)
                os.kill(pid, 0)
        except ProcessLookupError:
            return
