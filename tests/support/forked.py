"""Calls of the command as children of a process that has imported its libraries once.

`[*Command("dedup"), …]` takes the place of `python -m sabia.cli.main dedup …` in subprocess.run and
saves the imports, about half a second of CPU a call. What subprocess starts is a small program: it
passes its streams, variables and folder to a server, which forks a child that becomes the command;
descriptors that are words (/dev/fd/63, as `<(…)` and `>(…)` of a shell are) are passed too. Signals
are passed on, and exit codes and deaths by signal come back. Resource limits and process groups are
not passed on: tests of those, and of the start itself, call the command plainly.

usage: forked.py SOCKET WORD…    runs the command by the server
       forked.py --serve SOCKET  is the server, until stdin ends
"""

import marshal
import os
import signal
import sys

# variables that libraries read once, when they are imported
AT_IMPORT = ("OMP_", "NUMBA_", "PYTHON", "TRITON_", "MALLOC_", "LD_", "GLIBC_", "JAX_", "XLA_")
PACKAGES = (
    "cli", "core.bench", "core.generate", "core.judge", "core.model", "core.options",
    "core.recipes", "core.shards", "core.text", "core.web",
)  # fmt: skip
LIBRARIES = (
    "numba", "numba.core.registry", "numba.cpython.unicode", "numba.np.arrayobj", "torch",
    "aiohttp", "pyarrow.compute", "pyarrow.parquet", "tokenizers", "typer.main", "scipy.linalg",
)  # fmt: skip
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Command:
    """The words of a command, as a list or as text of a shell; their first use in a test process
    starts the server."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __iter__(self):
        return iter([sys.executable, "-I", "-S", __file__, _server(), *self.words])

    def __str__(self) -> str:
        return " ".join(self)


def _server() -> str:
    import atexit
    import subprocess
    import tempfile

    global _socket_path
    if not _socket_path:
        folder = tempfile.mkdtemp(prefix="sabia-forked-")
        _socket_path = os.path.join(folder, "socket")
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", _socket_path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the server of forked commands did not start")
        atexit.register(process.communicate)
    return _socket_path


_socket_path = ""


# -- the small program


def call(path: str, words: list[str]) -> None:
    """Run a command by the server and end as it ended."""
    import _socket

    line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    line.connect(path)
    named = [word.removeprefix("/dev/fd/") for word in words if word.startswith("/dev/fd/")]
    numbers = sorted({0, 1, 2, *(int(name) for name in named if name.isdigit())})
    said = marshal.dumps((words, dict(os.environ), os.getcwd(), numbers))
    descriptors = b"".join(i.to_bytes(4, sys.byteorder) for i in numbers)
    rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)
    line.sendmsg([len(said).to_bytes(8, "big")], [rights])
    line.sendall(said)
    child = int(line.recv(16))
    if not child:  # variables that the server cannot change
        os.execv(sys.executable, [sys.executable, "-m", "sabia.cli.main", *words])
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    code = int(line.recv(16))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


# -- the server


def serve(path: str) -> None:
    """Fork a child for each call until stdin ends."""
    import select
    import socket

    load()
    own = at_import(dict(os.environ))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    running: dict = {}  # of a child: its descriptor -> its number and the line to its caller
    while True:
        callers = {line: child for child, line in running.values()}
        ready, _, _ = select.select([listener, sys.stdin, *running, *callers], [], [])
        if sys.stdin in ready:
            return
        if listener in ready:
            line, _ = listener.accept()
            child = start(line, own)
            if child:
                running[os.pidfd_open(child)] = (child, line)
        for line in set(ready) & set(callers):  # the small program was killed
            os.kill(callers[line], signal.SIGKILL)
        for ended in set(ready) & set(running):
            report(*running.pop(ended))
            os.close(ended)


def report(child: int, line) -> None:
    """Tell the caller how the child ended."""
    import contextlib

    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError), line:
        line.sendall(b"%d" % code)


def load() -> None:
    """Import what the commands import."""
    import contextlib
    import importlib
    import pkgutil

    from sabia.core.process_start import runs_a_command

    runs_a_command()
    for name in LIBRARIES:
        importlib.import_module(name)
    for package in PACKAGES:
        root = importlib.import_module(f"sabia.{package}")
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if not any(word in module.name for word in ("jax", "triton", "cuda")):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)


def at_import(variables: dict[str, str]) -> dict[str, str]:
    """Those of the variables that libraries read when they are imported."""
    return {k: v for k, v in variables.items() if k.startswith(AT_IMPORT)}


def start(line, own: dict[str, str]) -> int:
    """The child of one call; 0 if its variables need a process of its own."""
    import socket

    length, descriptors, _, _ = socket.recv_fds(line, 8, 64)
    size, said = int.from_bytes(length, "big"), b""
    while len(said) < size:
        said += line.recv(size - len(said))
    words, variables, folder, numbers = marshal.loads(said)
    child = 0
    if at_import(variables) == own:
        child = os.fork()
        if not child:
            become(words, variables, folder, dict(zip(numbers, descriptors, strict=True)))
    for descriptor in descriptors:
        os.close(descriptor)
    line.sendall(b"%d" % child)
    if not child:
        line.close()
    return child


def become(words: list[str], variables: dict, folder: str, descriptors: dict[int, int]) -> None:
    """The command, in this process; never returns."""
    import fcntl

    above = max(*descriptors, *descriptors.values()) + 1
    kept = [(n, fcntl.fcntl(d, fcntl.F_DUPFD, above)) for n, d in descriptors.items()]
    os.closerange(3, above)  # of the server and of other calls
    for number, descriptor in kept:
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = ["sabia", *words]
    from sabia.cli.main import program

    program()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        call(sys.argv[1], sys.argv[2:])
