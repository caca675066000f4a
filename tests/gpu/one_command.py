"""Run a sabia command with deterministic algorithms of torch, or killed before a training step.

usage: one_command.py STEP DETERMINISTIC WORD…    (STEP -1: to the end; DETERMINISTIC 0 or 1)
"""

import sys

from interrupted import arm, run


def main(step: str, deterministic: str, *words: str) -> int:
    """The command's exit status."""
    if deterministic == "1":
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
    if int(step) >= 0:
        arm("step", int(step), "SIGKILL")
    return run(list(words))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
