"""The server process of an `isolated.Box`: standard library only, one program after the other.

    python -m sabia.core.sandbox.server MEMORY_BYTES CPU_S ROAD…

It reads and writes the frames of `limits`. For each program it forks the process of the tests,
which forks the process of the program before it reads the request: no process that runs the program
has ever held the tests.
"""

import contextlib
import errno
import gc
import importlib
import os
import random
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn

from sabia.core.sandbox import call_filter, kernel
from sabia.core.sandbox.limits import frame, received
from sabia.core.sandbox.remote_calls import (
    ENDED,
    LATE,
    OPERATIONS,
    GoneError,
    Peer,
    Remote,
    text_of,
)

# imported once, so that programs need not
USUAL = (
    "abc", "array", "bisect", "calendar", "cmath", "collections", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math",
    "numbers", "operator", "queue", "random", "re", "statistics", "string", "sys", "textwrap",
    "time", "typing", "unicodedata",
)  # fmt: skip
_SPACES = kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_SCRATCH_BYTES, _FILES_OPEN, _FILES = 1 << 24, 64, 1024
_RESULT_BYTES, _RESULT, _DETAIL = 1 << 16, 8000, 600
_READY = b"ready"


def main(memory_bytes: int, cpu_s: int, methods: list[str]) -> None:
    """Set up the first way that the kernel permits, report it, and answer until input ends."""
    for name in USUAL:
        importlib.import_module(name)
    sys.set_int_max_str_digits(0)  # integers cross as decimal digits
    refused: dict[str, str] = {}
    for method in methods:
        state, report = os.pipe()
        child = os.fork()
        if not child:
            os.close(state)
            _attempt(method, memory_bytes, cpu_s, report, refused)
        os.close(report)
        reason = os.read(state, 4096)
        if reason == _READY:
            poll = select.poll()  # for the end of the parent, or of the box
            poll.register(0, 0)
            poll.register(state, select.POLLIN)
            poll.poll()
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if reason == _READY:
            return
        refused[method] = reason.decode() or f"status {os.waitstatus_to_exitcode(status)}"
    _write(1, frame({"method": None, "refused": refused}))


def _attempt(
    method: str, memory_bytes: int, cpu_s: int, report: int, refused: Mapping[str, str]
) -> NoReturn:
    """Set up `method` and serve; what fails is reported."""
    kernel.end_with_parent(signal.SIGKILL)
    try:
        null = os.open(os.devnull, os.O_RDWR)
        if method == "namespaces":
            kernel.own_namespaces(_SPACES)
            kernel.enter_root(_folders(), ("/etc/ld.so.cache",), _DEVICES)
            if child := os.fork():  # the child is process 1 of its namespace
                os.close(report)
                os.waitpid(child, 0)
                os._exit(0)
            kernel.end_with_parent(signal.SIGKILL)
        elif method != "landlock":
            raise OSError(errno.EINVAL, "no such way", method)
        else:
            kernel.landlock((*_folders(), "/etc/ld.so.cache", *_DEVICES))
            kernel.adopt_orphans()
            os.chdir("/")
        for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"):
            os.environ.pop(name, None)
        _try_filter()
    except OSError as error:
        _write(report, f"{error.filename or 'a call'}: {error.strerror}".encode())
        os._exit(1)
    gc.collect()
    gc.freeze()
    _write(report, _READY)
    _write(1, frame({"method": method, "refused": refused}))
    _serve(method, memory_bytes, cpu_s, null)
    os._exit(0)


def _folders() -> list[str]:
    """Where Python and its libraries lie, without those that lie in others of the list."""
    paths = sysconfig.get_paths()
    given = {
        paths["stdlib"], paths["platstdlib"], f"{sys.base_prefix}/lib",
        f"{sys.base_exec_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64",
        "/usr/share/zoneinfo",
    }  # fmt: skip
    tops = (f"{path}/" for path in given if not os.path.islink(path))
    outer = [top for top in tops if os.path.isdir(top)]
    return sorted(p for p in given if not any(p.startswith(o) for o in outer))


def _try_filter() -> None:
    """Raises OSError if a child cannot filter its calls."""
    child = os.fork()
    if not child:
        try:
            call_filter.restrict_calls([])
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, os.strerror(code) if code > 0 else f"signal {-code}", "seccomp")


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _serve(method: str, memory_bytes: int, cpu_s: int, null: int) -> None:
    """Test one program after the other until input ends."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while poll.poll()[0][1] & select.POLLIN:
        result, report = os.pipe()
        child = os.fork()
        if not child:
            os.close(result)
            os.dup2(null, 1)
            try:
                _run(method, memory_bytes, cpu_s, null, report)
            finally:  # an error must not continue the loop of the server
                os._exit(1)
        os.close(report)
        # from pipe to pipe: no test, of which the answer may tell, enters the memory of the server,
        # which the next program inherits
        answered = 0
        while moved := os.splice(result, 1, _RESULT_BYTES):
            answered += moved
        os.close(result)
        _, status = os.waitpid(child, 0)
        if method == "namespaces":
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:  # a program ends with its tests
                os.waitpid(-1, 0)
        if not answered:
            detail = f"the tests ended with {_ended(status)}"
            _write(1, frame({"passed": None, "detail": detail}))


def _ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"status {code}" if code >= 0 else f"signal {-code}"


def _run(method: str, memory_bytes: int, cpu_s: int, null: int, report: int) -> None:
    """The process of the tests: read a request, start the program, report the verdict."""
    kernel.end_with_parent(signal.SIGKILL)
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    program = os.fork()
    if not program:
        if method == "namespaces":  # not for the tests: they could import what the program writes
            kernel.unshare(kernel.NEWNS)
            kernel.tmpfs("/tmp", _SCRATCH_BYTES, _FILES)
            os.chdir("/tmp")
        _confine(memory_bytes, cpu_s, null, theirs.fileno())
        kernel.end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        call_filter.restrict_calls([os.getpid()])
        _be_program(socket.socket(fileno=3))
    theirs.close()
    request, _ = received()
    _confine(memory_bytes, cpu_s, null, ours.detach(), report)
    call_filter.restrict_calls([os.getpid(), program])
    peer = Peer(socket.socket(fileno=3), ["call"], time.monotonic() + request["clock_s"])
    passed, detail = run_tests(peer, request)
    reason = peer.lost_by
    if reason == ENDED and not _ends(program):
        reason = "it closed the connection"
    os.kill(program, signal.SIGKILL)
    _, status, usage = os.wait4(program, 0)
    if reason:
        passed, detail = _end_of(reason, status, usage.ru_utime + usage.ru_stime, cpu_s)
    # at once, as a pipe takes so much
    _write(4, frame({"passed": passed, "detail": detail[: _RESULT if passed else _DETAIL]}))
    os._exit(0)


def _ends(program: int) -> bool:
    """Whether a process that has lost its connection ends, which takes it a moment."""
    for _ in range(100):
        if os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        time.sleep(0.01)
    return False


def _end_of(reason: str, status: int, taken: float, cpu_s: int) -> tuple[bool | None, str]:
    """The verdict on a program that is gone: it failed; of one that waits too long by the clock,
    which other work may delay, nothing is known."""
    if reason == LATE:
        return None, f"the program did not end in time ({taken:.2g} s of CPU time)"
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if reason == ENDED and killed:  # at the limit as a rule
        return False, f"the program was killed after {taken:.2g} s of CPU time (limit {cpu_s} s)"
    if reason == ENDED:
        reason += f" with {_ended(status)}"
    return False, f"the program: {reason}"


def _confine(memory_bytes: int, cpu_s: int, null: int, *kept: int) -> None:
    """Limit this process; of its files only `kept` stay open, as 3, 4, …"""
    high = [os.dup2(fd, 100 + index, inheritable=False) for index, fd in enumerate(kept)]
    for standard in range(3):
        os.dup2(null, standard)
    for index, fd in enumerate(high):
        os.dup2(fd, 3 + index, inheritable=False)
    os.closerange(3 + len(kept), 256)
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, _SCRATCH_BYTES), (resource.RLIMIT_NOFILE, _FILES_OPEN),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (value, value))
    kernel.drop_capabilities()
    random.seed(0)


def _be_program(connection: socket.socket) -> NoReturn:
    """The process of the program: run it, then do what the tests ask for."""
    peer = Peer(connection, OPERATIONS)
    with contextlib.suppress(GoneError):
        messages = peer.messages()
        _, source, names = next(messages)
        module = ModuleType("answer")
        sys.modules["answer"] = module
        try:
            exec(compile(source, "answer", "exec", dont_inherit=True), vars(module))
            values = {name: vars(module)[name] for name in names if name in vars(module)}
            peer.send(["ready", {name: peer.encoded(value) for name, value in values.items()}])
        except GoneError:
            raise
        except BaseException as error:
            peer.send(["raise", type(error).__name__, text_of(error)])
        for message in messages:
            peer.answer(message)
    os._exit(0)


def run_tests(peer: Peer, request: Mapping[str, Any]) -> tuple[bool | None, str]:
    """(passed, why not) for {"program", "setup", "tests", "entry_point", "names"}; with "result",
    the name of a text of the tests, that text if they pass.

    `names` are those that the tests take from the program. `setup` runs before the tests, in the
    process of the tests. With an entry point and a function `check` in the tests, it is called with
    the program's function.
    """
    space: dict[str, Any] = {"__name__": "tests"}
    entry = request["entry_point"]
    try:
        exec(compile(request["setup"], "setup", "exec", dont_inherit=True), space)
    except Exception as error:
        return None, f"the setup of the tests: {_described(error)}"
    try:
        peer.send(["program", request["program"], request["names"]])
        match next(peer.messages()):
            case ["ready", dict(values)]:
                space |= {name: peer.decoded(value) for name, value in values.items()
                          if name in request["names"]}  # fmt: skip
            case ["raise", str(kind), str(text)]:
                return False, f"the program: {kind}: {text}"
            case _:
                peer.lost("it sent what is no message")
        if entry and entry not in values:
            return False, f"the program does not define {entry}"
        exec(compile(request["tests"], "tests", "exec", dont_inherit=True), space)
        if entry and callable(check := space.get("check")) and not isinstance(check, Remote):
            check(space[entry])
    except GoneError:
        return None, ""
    except BaseException as error:
        return False, _line_of(error, request["tests"]) + _described(error)
    return True, str(space[request["result"]]) if "result" in request else ""


def _described(error: BaseException) -> str:
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line_of(error: BaseException, tests: str) -> str:
    """The line of the tests that failed."""
    lines = tests.splitlines()
    for call in reversed(traceback.extract_tb(error.__traceback__)):
        if call.filename == "tests" and call.lineno and call.lineno <= len(lines):
            return f"line {call.lineno} of the tests, {lines[call.lineno - 1].strip()[:200]}: "
    return ""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
