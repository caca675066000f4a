"""A program starts once more with glibc's setting for huge pages, where that changes something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sabia.cli import main, registry
from sabia.core import process_start

PROGRAM = """
import os, sys
from pathlib import Path
from sabia.core import process_start
process_start._KERNEL = Path(sys.argv[1])
print(os.getpid(), *sys.argv[2:], flush=True)
process_start.start_with_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"))
"""
glibc = pytest.mark.skipif(
    sys.platform != "linux"
    or not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc 2.")
    or int((os.confstr("CS_GNU_LIBC_VERSION") or "").split(".")[1]) < 35,
    reason="only glibc 2.35 and later has the setting",
)


def run(folder: Path, kernel: str, tunables: str | None) -> list[str]:
    """The lines of a program that starts with these tunables where the kernel has this setting."""
    setting = folder / "enabled"
    setting.write_text(kernel)
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    command = [sys.executable, "-c", PROGRAM, str(setting), "a b", "--c=*"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@glibc
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
    ],
)
def test_the_same_process_starts_again_with_its_arguments(
    tmp_path: Path, before: str | None, after: str
) -> None:
    first, second, tunables = run(tmp_path, "always [madvise] never", before)
    assert first == second and first.endswith(" a b --c=*")
    assert tunables == after


@pytest.mark.parametrize("kernel", ["[always] madvise never", "always madvise [never]"])
def test_nothing_where_the_kernel_does_not_wait_to_be_asked(tmp_path: Path, kernel: str) -> None:
    assert run(tmp_path, kernel, None)[1:] == ["None"]


def test_what_the_user_sets_stays(tmp_path: Path) -> None:
    chosen = "glibc.malloc.hugetlb=0"
    assert run(tmp_path, "always [madvise] never", chosen)[1:] == [chosen]


def test_a_process_that_was_started_for_something_else_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_start, "_gains", lambda: True)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started again"))
    monkeypatch.setattr(sys, "argv", ["sabia", "pretrain", "not an argument of this process"])
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    process_start.start_with_huge_pages()
    assert "GLIBC_TUNABLES" not in os.environ


def test_a_program_that_cannot_be_started_again_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(7, "Argument list too long")

    monkeypatch.setattr(process_start, "_gains", lambda: True)
    monkeypatch.setattr(os, "execv", refused)
    monkeypatch.setattr(sys, "argv", ["sabia", *sys.orig_argv[-1:]])
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    process_start.start_with_huge_pages()


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("pretrain x.parquet", 1), ("sft teacher x", 1), ("classify train x", 1),
        ("classify x", 0), ("plan-cluster --params 1B", 0), ("pretrain --help", 0), ("", 0),
    ],
)  # fmt: skip
def test_commands_that_run_a_model_start_again(
    line: str, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(sys, "argv", ["sabia", *line.split()])
    monkeypatch.setattr(main, "start_with_huge_pages", lambda: calls.append(1))
    for name in ("runs_a_command", "main"):
        monkeypatch.setattr(main, name, lambda: None)
    monkeypatch.setattr(main, "end_process", lambda code: None)
    main.program()
    assert len(calls) == starts


def test_the_commands_exist() -> None:
    assert set(registry.all_calls()) >= registry.RUN_MODELS
