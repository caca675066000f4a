"""Programs in a box: verdicts that cannot be forged, and hostile programs that are contained."""

import os
import signal
import socket

import pytest
from small_boxes import descendants, small_box
from waiting import until

from sabia.core.errors import MissingBackend
from sabia.core.sandbox import isolated
from sabia.core.sandbox.isolated import METHODS


@pytest.fixture(scope="module", params=METHODS)
def box(request):
    box = small_box(request.param)
    try:
        box.check()
    except MissingBackend as error:
        pytest.skip(str(error))

    def test(program, tests="assert f() == 1", entry="f", names=("f",), setup=""):
        asked = {"setup": setup, "tests": tests, "entry_point": entry, "names": list(names)}
        return box.test(program, asked)

    test.method, test.box = request.param, box
    yield test
    box.close()


def seen(box, expression, imports=""):
    """The value of an expression in a program."""
    program = f"{imports}\ndef f():\n    try:\n        return repr(({expression}))\n"
    program += "    except BaseException as error:\n        return type(error).__name__\n"
    detail = box(program, "assert False, f()").detail
    return detail.partition("AssertionError: ")[2]


@pytest.mark.parametrize(
    ("value", "equal"),
    [
        ("[1, (2, 3.5), {'a': {4}}, None, True, 'é\\udc80', b'x', 2j, frozenset({1})]", None),
        ("10**400", None),
        ("-(1 << 53)", None),
        ("float('inf')", None),
        ("range(3, 9, 2)", None),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"),
        ("__import__('fractions').Fraction(1, 3)", None),
        ("__import__('collections').OrderedDict(a=1)", "{'a': 1}"),
    ],
)
def test_values_cross_as_they_are(box, value, equal):
    assert box(f"def f(): return {value}", f"assert f() == {equal or value}").passed
    assert box(f"def f(x): return x == {value}", f"assert f({equal or value}) is True").passed


def test_what_tests_use_works(box):
    program = (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "    def __eq__(self, other): return self.a == other.a\n"
        "def swap(p): return Pair(p.b, p.a)\n"
        "def sort(items): items.sort()\n"
        "def squares(n):\n    for i in range(n): yield i * i\n"
        "def apply(g, x): return [g(v) for v in x]\n"
        "def adder(a): return lambda b: a + b\n"
        "def bad(x): raise ValueError('no')\n"
        "def write(name):\n    with open(name, 'w') as file: file.write('x')\n"
        "    return open(name).read()\n"
    )
    names = ("Pair", "swap", "sort", "squares", "apply", "adder", "bad", "write")
    tests = (
        "p = swap(Pair(1, 2))\nassert (p.a, p.b) == (2, 1) and p == Pair(2, 5)\n"
        "items = [3, 1, 2]\nassert sort(items) is None and items == [1, 2, 3]\n"
        "assert list(squares(4)) == [0, 1, 4, 9]\n"
        "assert apply(lambda v: v + k, x=[1, 2]) == [11, 12]\n"
        "assert adder(3)(4) == 7\n"
        "try:\n    bad(1)\n    assert False\n"
        "except ValueError as error:\n    assert 'no' in str(error)\n"
    )
    assert box(program, tests, "", names, setup="k = 10").detail == ""
    wrote = box(program, "assert write('/tmp/a') == 'x'", "", names)
    assert wrote.passed is (box.method == "namespaces")  # landlock has no folder to write to


def test_entry_points_and_check(box):
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    assert box("def f(x): return x * x", check).passed
    failed = box("def f(x): return x", check)
    assert (
        failed.passed is False and "line 2 of the tests, assert candidate(2) == 4" in failed.detail
    )
    assert "does not define f" in box("def g(x): return x", check).detail
    assert box("def sum(a, b): return a * b", "assert sum(2, 3) == 6", "sum", ("sum",)).passed
    assert box("def f(:", check).detail.startswith("the program: SyntaxError")
    assert box("1 / 0", check).detail == "the program: ZeroDivisionError: division by zero"
    assert box("def f(): return 1", setup="1 / 0").passed is None


FORGED = {
    "exit": "import os\nos._exit(0)",
    "exit later": "import os\ndef f(): os._exit(0)",
    "system exit": "import sys\nsys.exit(0)",
    "system exit later": "def f(): raise SystemExit(0)",
    "equal to all": "class A:\n    def __eq__(s, o): return True\n    __ne__ = __lt__ = __eq__\n"
    "def f(): return A()",
    "equal number": "class A(int):\n    def __eq__(s, o): return True\ndef f(): return A(7)",
    "equal text": "class A(str):\n    def __eq__(s, o): return True\ndef f(): return A('1')",
    "builtins": "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\n"
    "builtins.all = builtins.any = lambda *a: True\ndef f(): return 7",
    "check": "def check(candidate): pass\ndef f(): return 7",
    "descriptors": "import os\nfor fd in range(64):\n    for line in "
    '(b\'{"passed": true, "detail": ""}\\n\', b\'\\0\\0\\0\\x02[]\'):\n'
    "        try: os.write(fd, line)\n        except OSError: pass\ndef f(): return 7",
    "replies": "import sys, json, struct\nframe = sys._getframe()\n"
    "while 'peer' not in frame.f_locals: frame = frame.f_back\n"
    "peer = frame.f_locals['peer']\nfor _ in range(9): peer.send(['ok', True, {}])\n"
    "def f(): return 7",
    "no message": "import sys\nframe = sys._getframe()\n"
    "while 'peer' not in frame.f_locals: frame = frame.f_back\n"
    "frame.f_locals['peer'].connection.sendall(b'\\xff' * 100)\ndef f(): return 7",
    "half a message": "import sys\nframe = sys._getframe()\n"
    "while 'peer' not in frame.f_locals: frame = frame.f_back\n"
    "frame.f_locals['peer'].connection.sendall(b'\\0\\0\\0\\x09[[[')\n"
    "import time\ndef f(): return 7",
    "assertions": "def f(): raise AssertionError('passed')",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setrecursionlimit(10)\n"
    "def f(): return 7",
    "closed": "import os\nos.closerange(0, 64)\ndef f(): return 7",
    "another channel": "import socket, os\na, b = socket.socketpair()\n"
    "os.dup2(a.fileno(), 3)\ndef f(): return 7",
}


@pytest.mark.parametrize("name", FORGED)
def test_no_verdict_is_forged(box, name):
    tests = "got = f()\nassert type(got) is int\nassert got == 1 and not got == 2 and got < 2"
    assert box(FORGED[name], tests).passed is False
    assert box("def f(): return 1", tests).passed  # the box is as before


def test_tests_do_not_import_what_the_program_writes(box):
    """Whatever the path of the interpreter: the files of the program are its own."""
    program = (
        "import os, sys\n"
        "for folder in ['/tmp', os.getcwd(), *sys.path]:\n"
        "    try:\n"
        "        os.makedirs(folder, exist_ok=True)\n"
        "        open(folder + '/planted.py', 'w').write('answer = 7')\n"
        "    except OSError: pass\n"
        "def f(): return 7"
    )
    tests = "import sys, os\nsys.path += ['/tmp', os.getcwd(), '']\nimport planted\nassert True"
    tested = box(program, tests)
    assert tested.passed is False and "No module named 'planted'" in tested.detail


def test_the_program_never_holds_the_tests(box):
    """Neither of this request nor of those before, in objects and in the memory of the process."""
    secret = f"secret{os.getpid()}mark"
    search = (
        "import gc, sys, ctypes\n"
        "def f():\n"
        "    word = 'secret' + str(PID) + 'mark'\n"
        "    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and any(type(v) is str and word in v and v != word"
        " for v in o.values()): return 'found'\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        if any(type(v) in (str, bytes) and len(v) < 9999 and v != word and word in str(v)"
        " for v in frame.f_locals.values()): return 'found'\n"
        "        frame = frame.f_back\n"
        "    return 1\n"
    ).replace("PID", str(os.getpid()))
    for _ in range(2):
        found = box(search, f"secret = '{secret}'\nassert f() == 1, f()\nassert False, secret")
        assert "AssertionError: secret" in found.detail


HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "processes": (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1'])", "PermissionError",
    ),
    "programs": ("import os\nos.execv('/bin/sh', ['sh'])", "PermissionError"),
    "connection": (
        "import os, time\nos.closerange(0, 99)\ntime.sleep(1e6)", "closed the connection",
    ),
    "small threads": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "start new thread",
    ),
    "threads": (
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "start new thread",
    ),
    "memory": ("x = []\nwhile True: x.append(bytes(1 << 20))", "MemoryError"),
    "shared memory": ("import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(99)]", "OSError"),
    "memory files": ("import os\nos.memfd_create('x')", "PermissionError"),
    "endless loop": ("while True: pass", "of CPU time (limit 1 s)"),
    "huge integer": ("x = 10 ** 10 ** 10 % 7", "CPU time|MemoryError"),
    "endless output": ("while True: print('x' * 1000)", "of CPU time (limit 1 s)"),
    "no signal stops": (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass", "of CPU time (limit 1 s)",
    ),
    "sleep": ("import time\ntime.sleep(1e6)", "did not end in time"),
    "recursion": ("def g(n): return g(n + 1)\ng(0)", "RecursionError"),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef g(n): return [g(n + 1) for _ in '1']\ng(0)",
        "signal|MemoryError|CPU time",
    ),
    "deep value": ("x = []\nfor _ in range(10**5): x = [x]\ndef f(): return x", "RecursionError"),
    "cyclic value": ("x = []\nx.append(x)\ndef f(): return x", "RecursionError"),
    "huge value": ("def f(): return 'x' * (20 << 20)", "more than 16 MiB"),
    "crash": ("import ctypes\nctypes.string_at(0)", "signal 11"),
    "abort": ("import os\nos.abort()", "signal"),
    "inet": ("import socket\nsocket.create_connection(('127.0.0.1', PORT))", "PermissionError"),
    "datagram": ("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)", "Permission"),
    "names": ("import socket\nsocket.getaddrinfo('localhost', 1)", "gaierror|PermissionError"),
    "unix": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')", "PermissionError",
    ),
    "unix pair": (
        "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', '\\0ABSTRACT')", "PermissionError",
    ),
    "raw": ("import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)", "PermissionError"),
    "write": ("open('OUTSIDE/written', 'w')", "OSError|FileNotFound|Permission|Read-only"),
    "write system": ("open('/usr/lib/written', 'w')", "OSError|PermissionError"),
    "write Python": ("import os\nopen(os.__file__, 'a')", "OSError|PermissionError"),
    "remove": ("import os\nos.remove('OUTSIDE/secret')", "FileNotFound|PermissionError"),
    "modes": ("import os\nos.chmod('OUTSIDE/secret', 0o777)", "FileNotFound|PermissionError"),
    "read": ("open('OUTSIDE/secret').read()", "FileNotFound|PermissionError"),
    "read users": ("open('/etc/shadow').read()", "FileNotFound|PermissionError"),
    "other sources": ("open('SOURCE')", "FileNotFound|PermissionError"),
    "other environments": ("open('/proc/PID/environ').read()", "FileNotFound|PermissionError"),
    "write proc": ("open('/proc/self/oom_score_adj', 'w')", "FileNotFound|PermissionError"),
    "write memory": ("open('/proc/self/mem', 'r+b')", "FileNotFound|PermissionError"),
    "symbolic link": (
        "import os\nos.symlink('OUTSIDE/secret', '/tmp/a')\nopen('/tmp/a', 'a')",
        "FileNotFound|PermissionError|Read-only",
    ),
    "hard link": ("import os\nos.link('/etc/passwd', '/tmp/a')", "FileNotFound|Permission|OSError"),
    "up and out": ("import os\nos.chroot('/tmp')", "PermissionError"),
    "mount": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None): "
        "raise OSError(ctypes.get_errno(), 'm')", "PermissionError",
    ),
    "namespace": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(0x10000000): raise OSError(ctypes.get_errno(), 'u')", "PermissionError",
    ),
    "ptrace": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.ptrace(16, os.getppid(), 0, 0) < 0: raise OSError(ctypes.get_errno(), 'p')",
        "PermissionError",
    ),
    "other memory": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.process_vm_readv(os.getppid(), 0, 0, 0, 0, 0) < 0: "
        "raise OSError(ctypes.get_errno(), 'p')", "PermissionError",
    ),
    "signals": ("import os, signal\nos.kill(-1, signal.SIGKILL)", "PermissionError"),
    "signal to this": ("import os, signal\nos.kill(PID, signal.SIGUSR1)", "Permission|Lookup"),
    "signal to parent": ("import os, signal\nos.kill(os.getppid(), 9)", "PermissionError"),
    "signal by file": (
        "import fcntl, os, socket\na, b = socket.socketpair()\n"
        "fcntl.fcntl(a, 8, os.getppid())", "PermissionError",
    ),
    "limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "ValueError|Permission",
    ),
    "limits of others": (
        "import os, resource\nresource.prlimit(os.getppid() or 2, resource.RLIMIT_CPU, (1, 1))",
        "PermissionError|ProcessLookupError",
    ),
    "no death with parent": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.prctl(1, 0, 0, 0, 0): raise OSError(ctypes.get_errno(), 'p')", "PermissionError",
    ),
    "leave the group": ("import os\nos.setsid()", "PermissionError"),
    "become another user": ("import os\nos.setuid(1)", "PermissionError|Invalid argument"),
    "scratch": (
        "for n in range(300):\n    open(f'/tmp/{n}', 'wb', 0).write(bytes(99999))",
        "No space left|PermissionError",
    ),
    "one large file": (
        "with open('/tmp/a', 'wb', 0) as file:\n    while file.write(bytes(99999)): pass",
        "File too large|No space left|PermissionError",
    ),
    "many files": (
        "for n in range(9999): open(f'/tmp/{n}', 'w').close()", "No space left|PermissionError",
    ),
    "open files": ("x = [open('/dev/zero') for _ in range(999)]", "Too many open files"),
}  # fmt: skip


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """What a program must not reach: files, servers, the environment and this process."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret").write_text("secret")
    name = f"sabia-{os.getpid()}"
    servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
    servers[1].bind("\0" + name)
    servers[1].listen()
    got = []
    before = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    yield {
        "OUTSIDE": str(folder), "PORT": str(servers[0].getsockname()[1]), "ABSTRACT": name,
        "PID": str(os.getpid()), "SOURCE": __file__,
    }  # fmt: skip
    signal.signal(signal.SIGUSR1, before)
    assert not got
    for server in servers:
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()
        server.close()
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"secret": "secret"}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_contained(box, outside, name):
    program, reason = HOSTILE[name]
    for word, value in outside.items():
        program = program.replace(word, value)
    box.box.clock_s = 1.0 if name == "sleep" else 30.0
    found = box(program if "def f(" in program else program + "\ndef f(): return 1")
    assert found.passed is (None if name == "sleep" else False)
    assert any(part in found.detail for part in reason.split("|")), found.detail
    box.box.clock_s = 30.0
    assert box("def f(): return 1").passed


def test_nothing_outlives_its_program(box):
    alone = 1 + (box.method == "namespaces")  # process 1 of the namespace and its parent
    for program in (
        "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(999)",
        "",
    ):
        box(program + "\ndef f(): return 1")
        until(lambda: len(descendants(box.box.process.pid)) == alone)


def test_the_environment_and_other_files_are_hidden(box):
    shown = seen(box, "sorted(os.environ)", "import os")
    assert shown == str(sorted([*isolated._PLAIN, "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]))
    open_files = seen(
        box, "[n for n in range(256) if not os.system and 0 or exists(n)]",
        "import os\ndef exists(n):\n    try: os.fstat(n)\n    except OSError: return False\n"
        "    return True",
    )  # fmt: skip
    assert open_files == "[0, 1, 2, 3]"
    if box.method == "namespaces":
        assert seen(box, "os.listdir('/proc')", "import os") in ("[]", "FileNotFoundError")
        assert "home" not in seen(box, "os.listdir('/')", "import os")


def test_each_program_begins_anew(box):
    program = "import os, builtins\nbuiltins.left = 1\nopen('/tmp/left', 'w')\ndef f(): return 1"
    box(program)
    left = "hasattr(builtins, 'left'), os.path.exists('/tmp/left'), random.random()"
    (one, two) = (seen(box, left, "import os, builtins, random") for _ in range(2))
    assert one == two and one.startswith("(False, False, ")


def test_tests_that_misbehave_give_no_verdict_and_leave_a_box(box):
    for tests in (
        "while True: pass",
        "import os\nos._exit(0)",
        "import os\nos.kill(os.getpid(), 9)",
    ):
        found = box("def f(): return 1", tests)
        assert found.passed is None and "the tests ended" in found.detail
        assert box("def f(): return 1").passed
    # its calls use the CPU time of the program too, whose limit may be the first to be reached
    assert not box("def f(): return 1", "while True: f()").passed
    assert box("def f(): return 1", "import os\nos.fork()").passed is False
