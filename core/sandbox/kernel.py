"""Calls of the Linux kernel that Python 3.11 lacks: namespaces, mounts, Landlock, capabilities.

Each raises OSError with the name of the call. Sources: the manual pages of the calls, and
linux/mount.h, linux/landlock.h and linux/capability.h.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

NEWNS, NEWUTS, NEWIPC = 0x00020000, 0x04000000, 0x08000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_SYS_MOUNT_SETATTR = 442  # these numbers are the same on all architectures
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITIES_V3 = 0x20080522
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
MACHINE = os.uname().machine
_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, call: str) -> int:
    """The result of a call of libc, not negative. Raises OSError with errno otherwise."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), call)
    return result


def prctl(call: str, option: int, *values: int) -> None:
    """prctl(2), whose error carries the name `call`."""
    rest = (ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4])
    checked(_libc.prctl(option, *rest), call)


def end_with_parent(signal: int) -> None:
    """Have the kernel send this signal to the process when its parent ends."""
    prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    """Make the process the parent of its descendants whose parent ends, to wait for them."""
    prctl("PR_SET_CHILD_SUBREAPER", _PR_SET_CHILD_SUBREAPER, 1)


def no_new_privileges() -> None:
    """No program that the process starts gains rights; filters of calls need it."""
    prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def unshare(flags: int) -> None:
    """New namespaces for the process (NEWPID: for its children)."""
    checked(_libc.unshare(flags), "unshare")


def own_namespaces(flags: int) -> None:
    """New namespaces, in a new user namespace where the process's user is root."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEWUSER | flags)
    for name, line in (
        ("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1"),
    ):  # fmt: skip
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    given = (text.encode() for text in (source, target, kind))
    checked(_libc.mount(*given, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def tmpfs(target: str, size: int, files: int) -> None:
    """Mount an empty file system in memory of `size` bytes and `files` files."""
    flags = _MS_NOSUID | _MS_NODEV
    _mount("tmpfs", target, "tmpfs", flags, f"size={size},nr_inodes={files},mode=0755")


def _read_only(path: str, recursive: bool, devices: bool) -> None:
    attributes = _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    packed = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    call = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, packed, ctypes.c_size_t(len(packed))
    )
    checked(call, "mount_setattr")


def enter_root(folders: Sequence[str], files: Sequence[str], devices: Sequence[str]) -> None:
    """Make a root of these paths, read-only at their places, the process's root.

    The process needs a mount namespace of its own. Links among the folders stay links; paths that
    do not exist are left out. An empty folder /tmp exists.
    """
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    top = "/proc"  # a folder that every system has and nothing here needs
    links = [(path, os.readlink(path)) for path in folders if os.path.islink(path)]
    tmpfs(top, 1 << 20, 4096)
    for path in (*folders, *files, *devices):
        if os.path.islink(path) or not os.path.exists(path):
            continue
        target = top + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(path, target, "", _MS_BIND | _MS_REC)
        _read_only(target, True, path in devices)
    for path, goal in links:
        os.makedirs(os.path.dirname(top + path), exist_ok=True)
        os.symlink(goal, top + path)
    os.makedirs(top + "/tmp", exist_ok=True)
    _read_only(top, False, False)
    os.chdir(top)
    checked(_libc.syscall(_PIVOT_ROOT[MACHINE], b".", b"."), "pivot_root")
    checked(_libc.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up all capabilities of the process."""
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    checked(_libc.syscall(_CAPSET[MACHINE], header, bytes(24)), "capset")


def landlock_version() -> int:
    """The version of Landlock in this kernel. Raises OSError without it."""
    return checked(_libc.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "Landlock")


def landlock(folders: Sequence[str]) -> None:
    """Allow the process and its children to read below the folders, and no other use of files."""
    version = landlock_version()
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):  # rename between folders, truncate, ioctl
        rights |= (version >= since) << bit
    attribute = struct.pack("=QQQ", rights, 3, 3)  # files; TCP; abstract sockets and signals
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = checked(
        _libc.syscall(_SYS_LANDLOCK_CREATE, attribute, ctypes.c_size_t(size), 0), "Landlock"
    )
    for path in folders:
        if not os.path.exists(path):
            continue
        allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, below)
        checked(_libc.syscall(_SYS_LANDLOCK_ADD, rules, 1, rule, 0), "Landlock")
        os.close(below)
    no_new_privileges()
    checked(_libc.syscall(_SYS_LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)
