"""A filter of system calls (seccomp) for a process that computes and reads files, and no more.

Refused with EPERM are new processes and threads, other programs, signals to others, sockets but
pairs of one process, tracing, namespaces, changes of owners, modes and times of files, memory
outside the address space (System V, memfd), and changes of other processes; with ENOSYS calls from
Linux 5.1 on that are not named here, so that later kernels add no hole. What needs a capability
(mounts, modules, devices, the clock) the kernel refuses, as the process has none; what else it may
do with files and memory, other limits decide.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

from sabia.core.sandbox import kernel

# call → number on (x86_64, aarch64), 0 where the machine has none; linux/unistd.h
_REFUSED = {
    "clone": (56, 220), "fork": (57, 0), "vfork": (58, 0), "execve": (59, 221),
    "execveat": (322, 281), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "socket": (41, 198),
    "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "unshare": (272, 97),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "io_setup": (206, 0),
    "personality": (135, 92), "prctl": (157, 167), "seccomp": (317, 277), "shmget": (29, 194),
    "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186),
    "memfd_create": (319, 279), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "fanotify_init": (300, 262), "inotify_init": (253, 0), "inotify_init1": (294, 26),
    "setpgid": (109, 154), "setsid": (112, 157), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, 0), "fchown": (93, 55), "lchown": (94, 0), "fchownat": (260, 54),
    "utime": (132, 0), "utimes": (235, 0), "utimensat": (280, 88), "futimesat": (261, 0),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45),
}  # fmt: skip
_KILL, _TGKILL = (62, 129), (234, 131)
_SOCKETPAIR, _PRLIMIT, _FCNTL = (53, 199), (302, 261), (72, 25)
_NEW, _NEW_ALLOWED = 424, (436, 437, 439, 441, 449)  # close_range, openat2, faccessat2, …
_OWNER_COMMANDS = (8, 15, 1026)  # F_SETOWN, F_SETOWN_EX, F_NOTIFY: signals by files
_SOCK_STREAM, _TYPE_MASK = 1, 0xF
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_PR_SET_SECCOMP, _FILTER = 22, 2

Step = tuple[int, int, int, int]  # code, jump if true, jump if false, value


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_void_p)]


def _refuse(number: int = errno.EPERM) -> Step:
    return (_RETURN, 0, 0, _ERRNO | number)


def _of_call(number: int, argument: int, steps: list[Step]) -> list[Step]:
    """Steps on the low half of an argument of one call; they end with the verdict."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *steps]
    return [(_EQUAL, 0, len(body), number), *body]


def _only(values: Iterable[int]) -> list[Step]:
    """Allow these values, refuse the others."""
    steps: list[Step] = []
    for value in values:
        steps += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*steps, _refuse()]


def steps_of(signalled: Iterable[int], machine: str = kernel.MACHINE) -> list[Step]:
    """The filter as steps; `signalled` are the processes that may get signals."""
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}", "seccomp")
    column, architecture = _ARCHITECTURES[machine]
    pids = list(signalled)
    steps: list[Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    for allowed in _NEW_ALLOWED:
        steps += [(_EQUAL, 0, 1, allowed), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_AT_LEAST, 0, 1, _NEW), _refuse(errno.ENOSYS)]
    for numbers in _REFUSED.values():
        if numbers[column]:
            steps += [(_EQUAL, 0, 1, numbers[column]), _refuse()]
    stream: list[Step] = [(_AND, 0, 0, _TYPE_MASK), *_only([_SOCK_STREAM])]
    owner: list[Step] = []
    for command in _OWNER_COMMANDS:
        owner += [(_EQUAL, 0, 1, command), _refuse()]
    owner += [(_RETURN, 0, 0, _ALLOW)]
    for call, argument, checks in (
        (_KILL, 0, _only(pids)), (_TGKILL, 0, _only(pids)),
        (_SOCKETPAIR, 1, stream), (_PRLIMIT, 0, _only([0, os.getpid()])), (_FCNTL, 1, owner),
    ):  # fmt: skip
        steps += _of_call(call[column], argument, checks)
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


def restrict_calls(signalled: Iterable[int]) -> None:
    """Filter the calls of this process for good. Raises OSError where the kernel cannot."""
    kernel.no_new_privileges()
    packed = b"".join(struct.pack("=HBBI", *step) for step in steps_of(signalled))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(packed) // 8, ctypes.addressof(buffer))
    kernel.prctl("seccomp", _PR_SET_SECCOMP, _FILTER, ctypes.addressof(program))
