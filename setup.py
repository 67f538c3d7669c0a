"""What pyproject.toml cannot say: the compiled modules and the stable-ABI tag of the wheel."""

from __future__ import annotations

import sysconfig

from setuptools import Extension, setup

# The stable ABI of 3.11 is the first with the buffer protocol, which mail.c implements. A
# free-threaded interpreter has no stable ABI before 3.15: its wheel is for that version alone.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    cffi_modules=["build_ffi.py:ffibuilder"],
    ext_modules=[
        Extension(
            f"aiordma._ffi._{name}",
            [f"aiordma/_ffi/{source}.c" for source in sources],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
            py_limited_api=STABLE_ABI,
            depends=["aiordma/_ffi/glue.cdef.h", "aiordma/_ffi/mail.h"],
            extra_compile_args=["-std=gnu11", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
        for name, *sources in (
            ("lane", "lane"),
            ("mail", "mail", "mail_message"),
            ("reader", "reader"),
            ("wakeup", "wakeup"),
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
