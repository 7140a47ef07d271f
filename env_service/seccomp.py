"""The system call filter of a sandbox, assembled to BPF. Pure: tables in, bytes out.

A deny-list over what a command has no use for: changes of mounts and namespaces, kernel modules, BPF, tracing,
keyrings, io_uring (its calls pass no filter), the scheduling of the supervisor, POSIX message queues, and sockets other
than unix, inet and route netlink. vsock matters most: no namespace holds it. Refused calls give EPERM, or ENOSYS where
programs then take their usual way round.

Assembled here and not by libseccomp: the filter is a flat list, and nothing then has to be installed on the host.
Numbers are from the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h); filter
layout from linux/filter.h and linux/seccomp.h.
"""

import struct

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL = 0x80000000

_LOAD, _JEQ, _JGE, _JSET, _RET, _AND = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
_NR, _ARCH = 0, 4
_X32_BIT = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_NAMESPACES = 0x7E020080
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | NEWTIME"""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_RAW, _SOCK_PACKET = 3, 10

# name: (x86_64, aarch64); None: that machine has no such call
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "nfsservctl": (180, 42),
}
_ABSENT: dict[str, tuple[int | None, int | None]] = {
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Its flags are in memory, where a filter cannot look; without it C libraries use clone.
    "clone3": (435, 435),
    # POSIX message queues outlive processes, and no file shows them to the one who has to remove them.
    "mq_open": (240, 180),
}
_CLONE, _UNSHARE, _SOCKET, _SOCKETPAIR = (56, 220), (272, 97), (41, 198), (53, 199)
_IOCTL, _PRLIMIT = (16, 29), (302, 261)
_SCHEDULING = ((203, 122), (144, 119), (142, 118), (314, 274))
"""sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr: the first argument is a pid."""
_SETPRIORITY, _IOPRIO_SET = (141, 140), (251, 30)
_PRIO_USER, _IOPRIO_USER = 2, 3
_SUPERVISOR = 1
"""Its pid and its process group. Every later command inherits how it is scheduled."""


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(error: int) -> bytes:
    return _op(_RET, _ERRNO | error)


def _argument(index: int) -> bytes:
    """Load the low half of an argument; the kernel itself reads these as 32 bits."""
    return _op(_LOAD, 16 + 8 * index)


def _when(number: int, body: bytes) -> bytes:
    """Run `body`, which ends in a verdict, if the loaded word is `number`; else step over it."""
    return _op(_JEQ, number, 0, len(body) // 8) + body


def _any_of(index: int, values: tuple[int, ...], error: int) -> bytes:
    """Refuse when the argument is one of the values, else allow."""
    checks = b"".join(_op(_JEQ, value, 0, 1) + _refuse(error) for value in values)
    return _argument(index) + checks + _op(_RET, _ALLOW)


def _with_bits(index: int, bits: int, error: int) -> bytes:
    return _argument(index) + _op(_JSET, bits, 0, 1) + _refuse(error) + _op(_RET, _ALLOW)


def _socket() -> bytes:
    """Allow unix, inet, inet6 and route netlink, and of these nothing raw."""
    route_only = _argument(2) + _op(_JEQ, 0, 1, 0) + _refuse(_EPERM) + _op(_RET, _ALLOW)
    kinds = _argument(1) + _op(_AND, 0xF)
    kinds += b"".join(_op(_JEQ, kind, 0, 1) + _refuse(_EPERM) for kind in (_SOCK_RAW, _SOCK_PACKET))
    kinds += _op(_RET, _ALLOW)
    others = _when(_AF_NETLINK, route_only) + _refuse(_EAFNOSUPPORT)
    families = (_AF_UNIX, _AF_INET, _AF_INET6)
    steps = [len(others) // 8 + left for left in reversed(range(len(families)))]
    known = b"".join(_op(_JEQ, family, step, 0) for family, step in zip(families, steps, strict=True))
    return _argument(0) + known + others + kinds


def _own_only() -> bytes:
    """Allow limits of the caller (pid 0), refuse those of others: the supervisor has the same uid."""
    return _argument(0) + _op(_JEQ, 0, 1, 0) + _refuse(_EPERM) + _op(_RET, _ALLOW)


def _not_the_supervisor(user: int) -> bytes:
    """Allow a priority (kind, whose) of all but the supervisor, its process group, and a whole user."""
    whose = _any_of(1, (_SUPERVISOR,), _EPERM)
    return _argument(0) + _op(_JEQ, user, 0, 1) + _refuse(_EPERM) + whose


def program(machine: str) -> bytes:
    """Assemble the filter for a machine (as `uname -m` names it). KeyError: there is no table for it."""
    column = list(ARCHITECTURES).index(machine) if machine in ARCHITECTURES else -1
    if column < 0:
        raise KeyError(machine)
    code = _op(_LOAD, _ARCH) + _op(_JEQ, ARCHITECTURES[machine], 1, 0) + _op(_RET, _KILL)
    code += _op(_LOAD, _NR)
    if machine == "x86_64":
        code += _op(_JGE, _X32_BIT, 0, 1) + _refuse(_ENOSYS)
    for table, error in ((_REFUSED, _EPERM), (_ABSENT, _ENOSYS)):
        numbers = [pair[column] for pair in table.values()]
        code += b"".join(_when(number, _refuse(error)) for number in numbers if number is not None)
    code += _when(_CLONE[column], _with_bits(0, _NAMESPACES, _EPERM))
    code += _when(_UNSHARE[column], _with_bits(0, _NAMESPACES, _EPERM))
    code += _when(_SOCKET[column], _socket())
    code += _when(_IOCTL[column], _any_of(1, (_TIOCSTI, _TIOCLINUX), _EPERM))
    code += _when(_PRLIMIT[column], _own_only())
    for call in _SCHEDULING:
        code += _when(call[column], _any_of(0, (_SUPERVISOR,), _EPERM))
    code += _when(_SETPRIORITY[column], _not_the_supervisor(_PRIO_USER))
    code += _when(_IOPRIO_SET[column], _not_the_supervisor(_IOPRIO_USER))
    return code + _op(_RET, _ALLOW)
