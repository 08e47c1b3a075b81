"""A filter in the kernel for a process that must change nothing where it cannot have a view of its own.

Containers often forbid new namespaces; a process may always give up its own rights (seccomp). It keeps its memory and
its open files, can read every file, and gets an error for whatever would change a file, reach the network, signal
another process or start one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Name -> number on x86_64 and aarch64; -1 where the architecture does not have it.
_FILES = {
    "creat": (85, -1), "unlink": (87, -1), "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38),
    "renameat2": (316, 276), "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "link": (86, -1),
    "linkat": (265, 37), "symlink": (88, -1), "symlinkat": (266, 36), "truncate": (76, 45), "chmod": (90, -1),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1), "fchown": (93, 55),
    "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1), "utimensat": (280, 88),
    "futimesat": (261, -1), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "mknod": (133, -1),
    "mknodat": (259, 33), "mq_open": (240, 180), "mq_unlink": (241, 181),
}  # fmt: skip
_OUTSIDE = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "kill": (62, 129), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117), "process_vm_writev": (311, 271), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "fork": (57, -1), "vfork": (58, -1), "mount": (165, 40), "umount2": (166, 39),
    "io_uring_setup": (425, 425), "prlimit64": (302, 261),
}  # fmt: skip
_UNKNOWN = {"openat2": (437, 437), "clone3": (435, 435)}
"""Their arguments lie in memory, where a filter cannot look; libc then uses the older calls."""
_OPEN, _OPENAT, _CLONE, _TGKILL = (2, -1), (257, 56), (56, 220), (234, 131)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_THREAD = 0x10000
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_OTHER_TABLE = 0x40000000
"""Calls of the x32 table begin here."""

Instruction = tuple[int, int, int, int]


def change_nothing() -> None:
    """Takes the right to change anything outside from this process, for good; raises OSError where that fails."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter for system calls on {machine}")
    which = list(_ARCHITECTURES).index(machine)
    program = b"".join(struct.pack("HBBI", *one) for one in _filter(_ARCHITECTURES[machine], which))
    buffer = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((38, 1, 0, 0, 0), (22, 2, header, 0, 0)):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        if libc.prctl(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, f"seccomp: {os.strerror(number)}")


def _filter(architecture: int, which: int) -> list[Instruction]:
    """The program that the kernel runs at every system call."""

    def result(number: int) -> Instruction:
        return (_RETURN, 0, 0, _ERROR | number)

    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        result(errno.EPERM),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, _OTHER_TABLE),
        result(errno.ENOSYS),
    ]
    for calls, number in ((_FILES, errno.EROFS), (_OUTSIDE, errno.EPERM), (_UNKNOWN, errno.ENOSYS)):
        for call in calls.values():
            if call[which] >= 0:
                program += [(_EQUAL, 0, 1, call[which]), result(number)]

    def only_if(call: int, argument: int, test: Instruction, number: int) -> None:
        """Allows a call if its argument passes the test."""
        if call >= 0:
            program.extend([(_EQUAL, 0, 4, call), (_LOAD, 0, 0, 16 + 8 * argument), test, allow, result(number)])

    only_if(_OPEN[which], 1, (_ANY_BIT, 1, 0, _WRITES), errno.EROFS)
    only_if(_OPENAT[which], 2, (_ANY_BIT, 1, 0, _WRITES), errno.EROFS)
    only_if(_CLONE[which], 0, (_ANY_BIT, 0, 1, _THREAD), errno.EAGAIN)
    only_if(_TGKILL[which], 0, (_EQUAL, 0, 1, os.getpid()), errno.EPERM)
    return [*program, allow]
