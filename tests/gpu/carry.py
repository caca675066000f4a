"""Wheels for a machine without a network: those of needed packages that are pure Python."""

import subprocess
import sys
from pathlib import Path


def carry(folder: Path, packages: list[str]) -> None:
    """Download what is pure Python among `packages`; print sizes and the line that uses them."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        words += ["--only-binary", ":all:", "--platform", "any", "--dest", str(folder), package]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [""]
            print(f"{package}: no pure-Python wheel ({reason[0]})")
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB")
    total = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{len(wheels)} wheels, {total:.1f} MiB. On the other machine:")
    print(
        f"  python -m pip install --no-index --no-deps --target /tmp/carried {folder}/*.whl && "
        "PYTHONPATH=/tmp/carried python tests/gpu/run.py --out DIR"
    )
