"""The runner, as on a processor without XSAVE, whose registers are those of FXSAVE.

As: python no_xsave.py [options] -- COMMAND...  The kernel of a guest asks for the extended
registers of a process in vain, as on such a processor: a filter of system calls answers in the
host's stead.  At each page fault the guest's kernel would lose the wide registers that the
processor has all the same: GLIBC_TUNABLES keeps the C library of the guest from using them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from typing import Any

from aiordma_softroce import cli, uml

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PTRACE = 101
#: PTRACE_GETREGSET, PTRACE_SETREGSET, NT_X86_XSTATE.
_GET, _SET, _XSTATE = 0x4204, 0x4205, 0x202
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
#: Of struct seccomp_data: the number of the call, and its arguments.
_NUMBER, _REQUEST, _KIND = 0, 16, 16 + 2 * 8
_TUNABLES = "glibc.cpu.hwcaps=" + ",".join(f"-{name}" for name in (
    "AVX", "AVX2", "AVX512F", "AVX512VL", "AVX512BW", "AVX_Fast_Unaligned_Load", "FMA", "FMA4",
    "XSAVE", "XSAVEC", "AVX_Usable", "AVX2_Usable", "XSAVEC_Usable",
))  # fmt: skip


def _filter() -> bytes:
    """The program: load, compare and jump over so many, return."""
    program = (
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 6, _PTRACE),
        (_LOAD, 0, 0, _REQUEST),
        (_EQUAL, 1, 0, _GET),
        (_EQUAL, 0, 3, _SET),
        (_LOAD, 0, 0, _KIND),
        (_EQUAL, 0, 1, _XSTATE),
        (_RETURN, 0, 0, _ERRNO | errno.ENODEV),
        (_RETURN, 0, 0, _ALLOW),
    )
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def main() -> None:
    """Install the filter, and run the command line."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(_filter())
    header = struct.pack("=H6xQ", len(_filter()) // 8, ctypes.addressof(code))
    program = ctypes.create_string_buffer(header)
    zero = ctypes.c_ulong(0)
    calls = (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero),
        (_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), program),
    )
    for words in calls:
        if libc.prctl(*words, zero, zero) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    os.environ["GLIBC_TUNABLES"] = _TUNABLES
    command_line = uml.command_line

    def told(*arguments: Any) -> list[str]:
        program, *words = command_line(*arguments)
        # A word that the kernel does not know is a variable of its first process.
        return [program, f"GLIBC_TUNABLES={_TUNABLES}", *words]

    vars(uml)["command_line"] = told
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
