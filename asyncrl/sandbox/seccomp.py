"""The seccomp filter of the sandbox: refuses system calls that no program in it needs.

Refused are those that reach other processes, mounts and namespaces, the parts of the kernel in which most escapes were
found, memory that no limit counts, and sockets of families that a network namespace does not cover (a virtual machine's
own, for one). Written by hand: pyseccomp needs the system library libseccomp, which bubblewrap does not install.
"""

import errno
import platform
import struct

from asyncrl.errors import SandboxError

CALLS = {
    # name: (x86_64, aarch64)
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "fanotify_init": (300, 262),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
CLONE = (56, 220)
CLONE3 = 435
SOCKET = (41, 198)
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
NEW_NAMESPACE = 0x7E02_0000
"""The flags of clone that make a namespace."""
MACHINES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
"""Column in the table above, and what the kernel calls it."""
X32 = 0x4000_0000
"""Bit of the second table of calls that x86_64 has."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF_0000, 0x8000_0000, 0x0005_0000


def seccomp_filter() -> bytes:
    """For this machine, as `bwrap --seccomp` reads it."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise SandboxError(f"the sandbox knows no system calls of {machine}: run rewards on {' or '.join(MACHINES)}")
    column, audit = MACHINES[machine]
    refuse = _step(_RETURN, _ERROR | errno.EPERM)
    steps = [_step(_LOAD, _MACHINE), _step(_EQUAL, audit, 1, 0), _step(_RETURN, _KILL), _step(_LOAD, _NUMBER)]
    steps += [_step(_AT_LEAST, X32, 0, 1), refuse]
    for numbers in CALLS.values():
        steps += [_step(_EQUAL, numbers[column], 0, 1), refuse]
    # Its flags are in memory, where a filter cannot look; the C library falls back to clone.
    steps += [_step(_EQUAL, CLONE3, 0, 1), _step(_RETURN, _ERROR | errno.ENOSYS)]
    steps += [_step(_EQUAL, CLONE[column], 0, 3), _step(_LOAD, _FIRST_ARGUMENT)]
    steps += [_step(_ANY_BIT, NEW_NAMESPACE, 0, 1), refuse, _step(_LOAD, _NUMBER)]
    steps += [_step(_EQUAL, SOCKET[column], 0, 2 + len(FAMILIES)), _step(_LOAD, _FIRST_ARGUMENT)]
    steps += [_step(_EQUAL, family, len(FAMILIES) - i, 0) for i, family in enumerate(FAMILIES)]
    steps += [_step(_RETURN, _ERROR | errno.EAFNOSUPPORT), _step(_RETURN, _ALLOW)]
    return b"".join(steps)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
