"""Boxes end with their parents, are replaced when they end, and are refused with a reason."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from small_boxes import descendants, small_box
from waiting import until

from sabia.core.errors import ExitCode, MissingBackend
from sabia.core.sandbox.isolated import METHODS, Box
from sabia.core.sandbox.limits import Pool


@pytest.mark.parametrize("method", METHODS)
def test_a_box_ends_with_its_parent_and_leaves_nothing(method, tmp_path):
    """Also while a program runs: no process is left, running or dead, and no file."""
    script = (
        "import os, sys, threading\nfrom sabia.core.sandbox.isolated import Box\n"
        f"box = Box(60, 1 << 28, 60.0, [{method!r}])\nbox.check()\n"
        "tests = {'setup': '', 'tests': 'f()', 'entry_point': 'f', 'names': ['f']}\n"
        "thread = threading.Thread(target=box.test, args=('while True: pass', tests))\n"
        "thread.start()\nprint(box.process.pid, flush=True)\nthread.join()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert parent.stdout is not None
    line = parent.stdout.readline()
    if not line:
        pytest.skip(parent.communicate()[1].strip().splitlines()[-1])
    top = int(line)
    until(lambda: len(descendants(top)) >= 3)  # the box, the tests, the program
    processes = [top, *descendants(top)]
    parent.kill()
    parent.communicate()
    until(lambda: not any(alive(pid) for pid in processes))
    assert not list(tmp_path.iterdir())


def alive(pid):
    """Whether a process runs; one of which the end waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ready_pool(count):
    pool = Pool(small_box, count)
    with pool.one() as box:
        try:
            box.check()
        except MissingBackend as error:
            pytest.skip(str(error))
    return pool


def asked(number, result):
    return {"setup": "", "tests": f"assert f({number}) == {result}", "entry_point": "f",
            "names": ["f"]}  # fmt: skip


def test_threads_share_boxes_that_are_replaced():
    pool, wrong = ready_pool(2), []

    def work(number):
        for n in range(6):
            with pool.one() as box:
                box.requests = 5
                if n == 3:
                    box.close()
                if not box.test(f"def f(x): return x + {number}", asked(n, n + number)).passed:
                    wrong.append((number, n))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for _ in range(2):
        with pool.one() as box:
            box.close()


def test_a_box_that_is_killed_gives_no_verdict():
    with ready_pool(1).one() as box:
        program = "import time\ndef f(x): time.sleep(3600)"
        killer = threading.Thread(target=lambda: (
            until(lambda: len(descendants(box.process.pid)) >= 3), box.process.kill(),
        ))  # fmt: skip
        killer.start()
        tested = box.test(program, asked(1, 1))
        killer.join()
        assert tested.passed is None and "signal 9" in tested.detail
        assert box.test("def f(x): return x", asked(1, 1)).passed
        box.close()


def test_without_isolation_the_reason_is_given():
    box = Box(methods=["none"])
    with pytest.raises(MissingBackend, match="permits no isolation") as raised:
        box.check()
    assert raised.value.exit_code == ExitCode.MISSING


def test_refused_calls_send_a_box_to_the_next_way():
    """Where user namespaces are forbidden, as in containers, Landlock serves, and the reason of
    the first is kept."""
    script = (
        "import os, sys\nfrom sabia.core.sandbox import kernel\n"
        "kernel.own_namespaces(kernel.NEWNS)\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "from sabia.core.sandbox.isolated import Box\nbox = Box(1)\nbox.running()\n"
        "import json; print(json.dumps(box.state)); box.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no user namespace here: {done.stderr.strip().splitlines()[-1]}")
    state = json.loads(done.stdout)
    assert state["method"] in ("landlock", None)
    assert "unshare" in state["refused"]["namespaces"]
