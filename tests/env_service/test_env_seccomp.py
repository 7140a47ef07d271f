"""The filter, run by a small BPF machine: both CPU tables, no kernel. (The kernel's word: test_env_isolation.)"""

import struct

import pytest

from env_service import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, EAFNOSUPPORT = 0x50001, 0x50000 | 38, 0x50000 | 97
X86, ARM = 0xC000003E, 0xC00000B7


CODE = {machine: list(struct.iter_unpack("=HBBI", seccomp.program(machine))) for machine in seccomp.ARCHITECTURES}


def verdict(machine: str, arch: int, number: int, *arguments: int) -> int:
    """Run the program over one system call; follows the kernel's meaning of each instruction."""
    code = CODE[machine]
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number, arch, 0, *padded)
    at = accumulator = 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, value)
            case 0x54:
                accumulator &= value
            case 0x15:
                at += if_true if accumulator == value else if_false
            case 0x35:
                at += if_true if accumulator >= value else if_false
            case 0x45:
                at += if_true if accumulator & value else if_false
            case 0x06:
                return value
            case _:
                raise AssertionError(operation)


SAME = {
    "ordinary": ((63, 0), (63, 0), ALLOW),
    "ptrace": ((101,), (117,), EPERM),
    "mount": ((165,), (40,), EPERM),
    "bpf": ((321,), (280,), EPERM),
    "io_uring": ((425,), (425,), ENOSYS),
    "clone3": ((435,), (435,), ENOSYS),
    "clone thread": ((56, 0x3D0F00), (220, 0x3D0F00), ALLOW),
    "clone user namespace": ((56, 0x10000000), (220, 0x10000000), EPERM),
    "unshare net": ((272, 0x40000000), (97, 0x40000000), EPERM),
    "unshare time": ((272, 0x80), (97, 0x80), EPERM),
    "socket unix": ((41, 1, 1, 0), (198, 1, 1, 0), ALLOW),
    "socket inet": ((41, 2, 1, 6), (198, 2, 1, 6), ALLOW),
    "socket inet6": ((41, 10, 0x80802, 0), (198, 10, 0x80802, 0), ALLOW),
    "socket raw": ((41, 2, 3, 1), (198, 2, 3, 1), EPERM),
    "socket sock_packet": ((41, 2, 10, 1), (198, 2, 10, 1), EPERM),
    "socket route": ((41, 16, 3, 0), (198, 16, 3, 0), ALLOW),
    "socket netfilter": ((41, 16, 3, 12), (198, 16, 3, 12), EPERM),
    "socket vsock": ((41, 40, 1, 0), (198, 40, 1, 0), EAFNOSUPPORT),
    "socket high bits": ((41, (1 << 32) | 40, 1), (198, (1 << 32) | 40, 1), EAFNOSUPPORT),
    "tiocsti": ((16, 0, 0x5412), (29, 0, 0x5412), EPERM),
    "other ioctl": ((16, 0, 0x5401), (29, 0, 0x5401), ALLOW),
    "own limits": ((302, 0, 7), (261, 0, 7), ALLOW),
    "another's limits": ((302, 1, 7), (261, 1, 7), EPERM),
    "own cpus": ((203, 0), (122, 0), ALLOW),
    "the supervisor's cpus": ((203, 1), (122, 1), EPERM),
    "the supervisor's cpus, high bits": ((203, (1 << 32) | 1), (122, (1 << 32) | 1), EPERM),
    "the supervisor's policy": ((144, 1), (119, 1), EPERM),
    "the supervisor's parameters": ((142, 1), (118, 1), EPERM),
    "the supervisor's attributes": ((314, 1), (274, 1), EPERM),
    "own nice": ((141, 0, 0, 19), (140, 0, 0, 19), ALLOW),
    "a child's nice": ((141, 0, 7, 19), (140, 0, 7, 19), ALLOW),
    "the supervisor's nice": ((141, 0, 1, 19), (140, 0, 1, 19), EPERM),
    "the supervisor's group's nice": ((141, 1, 1, 19), (140, 1, 1, 19), EPERM),
    "own group's nice": ((141, 1, 0, 19), (140, 1, 0, 19), ALLOW),
    "the user's nice": ((141, 2, 0, 19), (140, 2, 0, 19), EPERM),
    "own io priority": ((251, 1, 0, 0), (30, 1, 0, 0), ALLOW),
    "the supervisor's io priority": ((251, 1, 1, 0), (30, 1, 1, 0), EPERM),
    "the supervisor's group's io priority": ((251, 2, 1, 0), (30, 2, 1, 0), EPERM),
    "the user's io priority": ((251, 3, 1000, 0), (30, 3, 1000, 0), EPERM),
    "posix message queue": ((240,), (180,), ENOSYS),
}


@pytest.mark.parametrize(("x86", "arm", "wanted"), SAME.values(), ids=SAME.keys())
def test_both_machines_decide_alike(x86, arm, wanted):
    assert verdict("x86_64", X86, *x86) == wanted
    assert verdict("aarch64", ARM, *arm) == wanted


def test_other_abis_of_the_same_cpu_are_no_way_round():
    assert verdict("x86_64", 0x40000003, 20) == KILL  # i386
    assert verdict("x86_64", X86, 0x40000000 | 41, 40, 1, 0) == ENOSYS  # x32
    assert verdict("aarch64", 0x40000028, 20) == KILL  # arm, 32 bit


def test_every_refused_call_is_refused():
    for table, wanted in ((seccomp._REFUSED, EPERM), (seccomp._ABSENT, ENOSYS)):
        for name, numbers in table.items():
            for machine, arch, number in zip(("x86_64", "aarch64"), (X86, ARM), numbers, strict=True):
                if number is not None:
                    assert verdict(machine, arch, number) == wanted, name


def test_the_rest_is_allowed():
    refused = {pair[0] for table in (seccomp._REFUSED, seccomp._ABSENT) for pair in table.values()}
    for number in set(range(463)) - refused - {41, 302}:
        assert verdict("x86_64", X86, number) == ALLOW, number


def test_an_unknown_machine_is_an_error():
    with pytest.raises(KeyError):
        seccomp.program("riscv64")


def test_the_program_is_of_a_size_that_the_kernel_takes():
    assert len(seccomp.program("x86_64")) // 8 <= 4096
