"""What pyproject.toml cannot say: the compiled modules and the stable-ABI tag of the wheel."""

from __future__ import annotations

import sysconfig

from setuptools import Extension, setup

FAST = (
    "alarm", "cm_events", "fast", "held", "mail", "operation", "owner", "reader", "received",
    "registration", "stream_calls", "transfer", "wakeup",
)  # fmt: skip
# The stable ABI of 3.11 is the first with the buffer protocol, which received.c implements. A
# free-threaded interpreter has no stable ABI before 3.15: its wheel is for that version alone.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    cffi_modules=["build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(
            "aiordma._ffi._fast",
            [f"aiordma/_ffi/{name}.c" for name in FAST],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
            py_limited_api=STABLE_ABI,
            depends=["aiordma/_ffi/glue.cdef.h", "aiordma/_ffi/fast.h"],
            extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
