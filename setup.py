"""What pyproject.toml cannot say: the compiled modules and the stable-ABI tag of the wheel."""

from __future__ import annotations

import sys
import sysconfig

from setuptools import Extension, setup

FAST = (
    "alarm", "cm_events", "fast", "held", "mail", "operation", "owner", "reader", "received",
    "registration", "stream_calls", "transfer", "wakeup",
)  # fmt: skip

if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(
        "aiordma: a free-threaded Python is not supported: the data path relies on the global "
        "interpreter lock. Install it for an ordinary build of Python 3.11 or later."
    )

setup(
    cffi_modules=["build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(
            "aiordma._ffi._fast",
            [f"aiordma/_ffi/{name}.c" for name in FAST],
            # The stable ABI of 3.11 is the first with the buffer protocol (received.c).
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            depends=["aiordma/_ffi/glue.cdef.h", "aiordma/_ffi/fast.h"],
            extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
