"""`sabia pretrain`, killed at a step and run again, against a run that was not interrupted."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from cases import Case, Comparison, Device, Failed, Figures
from user_commands import UserCommands, metrics, weights

STEPS, KILL_AT, SAVE_EVERY = 12, 9, 3
# kind of model, precision, whether torch is asked for deterministic algorithms
RUNS = (("dense", "fp32", True), ("dense", "bf16", True), ("moe", "bf16", True),
        ("moe", "fp32", True), ("dense", "fp32", False), ("moe", "bf16", False))  # fmt: skip
# of losses and weights, where an operation of torch has no deterministic implementation
ALLOWED = {"fp32": 1e-5, "bf16": 1e-3}


def cases(device: Device) -> Iterator[Case]:
    """One run each; without a GPU three of them."""
    commands = UserCommands(device)
    try:
        for kind, precision, deterministic in RUNS[:3] if device.tiny else RUNS:
            name = f"{kind} / {precision}" + " / deterministic" * deterministic
            given = commands, kind, precision, deterministic
            yield Case(name, lambda name=name, given=given: resume(name, *given))
    finally:
        commands.close()


def resume(
    name: str, commands: UserCommands, kind: str, precision: str, deterministic: bool
) -> Figures:
    """Losses and weights of both runs: equal bit by bit if torch is asked for it and can."""
    folder = commands.folder / name.replace(" / ", "-")
    whole, killed = folder / "whole", folder / "killed"
    words = [*commands.pretraining(kind, precision, STEPS), "--save-every", SAVE_EVERY]
    runs: list[tuple[Path, int]] = [(whole, -1), (killed, KILL_AT)]
    with ThreadPoolExecutor(1 if commands.device.tiny else 2) as pool:
        ends = [pool.submit(commands, *words, "-o", out, kill_at=at, deterministic=deterministic)
                for out, at in runs]  # fmt: skip
    stderr, _ = (end.result() for end in ends)
    if (killed / "final").exists():
        raise Failed("the run was not killed")
    again = commands(*words, "-o", killed, deterministic=deterministic)
    at = re.search(r"resuming at step (\d+)", again)
    if at is None or not 0 < int(at[1]) <= KILL_AT:
        raise Failed(f"it does not resume at a step of 1 to {KILL_AT}: {again.strip()[-300:]}")
    exceptions = sorted(set(re.findall(r"(\S+) does not have a deterministic", stderr)))
    pairs = {"losses": (metrics(killed), metrics(whole))}
    found, expected = weights(killed / "final"), weights(whole / "final")
    pairs |= {tensor: (found[tensor], expected[tensor]) for tensor in expected}
    bitwise = all(np.array_equal(*pair) for pair in pairs.values())
    figures: Figures = {"resumed_at": int(at[1]), "bitwise": bitwise}
    figures["not_deterministic"] = exceptions
    if deterministic and not exceptions and not bitwise:
        unequal = [key for key, pair in pairs.items() if not np.array_equal(*pair)]
        figures |= _compared(pairs, np.inf).figures()
        raise Failed(f"{len(unequal)} of {len(pairs)} differ, such as {unequal[0]}", figures)
    return _compared(pairs, ALLOWED[precision]).check(figures)


def _compared(pairs: dict[str, tuple[np.ndarray, np.ndarray]], allowed: float) -> Comparison:
    compared = Comparison()
    for key, pair in pairs.items():
        compared.add_norm(key, *pair, allowed)
    return compared
