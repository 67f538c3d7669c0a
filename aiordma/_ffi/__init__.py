"""The door to C: `ffi` and `lib`, loaded on first use.

Theory of operation
    `ffi` and `lib` are stand-ins.  The first attribute that is asked of one of them imports the
    compiled module, and the attribute is stored in the stand-in's own `__dict__`; from then on the
    interpreter finds it there and no Python code of this file runs.  Importing aiordma therefore
    works on a machine without rdma-core, and costs nothing where RDMA is not used.

    No lock of our own: the import system runs a module once, whichever threads ask for it, and
    storing the same attribute twice is harmless.  A second lock around an import would only offer
    two orders in which to take both.

    A failure is not remembered, so that a program can call again in the same process when the
    missing package is installed; a failed look-up is far off any fast path.

Rules of this folder
    Nothing else imports `_rdma`.  A call is checked on its next line (`check.py`).  Tests may set
    an attribute of `lib`, which then hides the compiled function until it is deleted again.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiordma.errors import LibraryMissingError

if TYPE_CHECKING:
    from types import ModuleType

    from aiordma._ffi._rdma import CData, CType, ffi, lib

__all__ = ["CData", "CType", "ffi", "lib", "load_error"]

_MODULE = "aiordma._ffi._rdma"

#: The release that brought the newest symbol of those that the modules import.
_SMALLEST_RDMA_CORE = "35"
_RUNTIME_PACKAGES = (
    "Debian/Ubuntu: apt install libibverbs1 librdmacm1 ibverbs-providers; "
    "Fedora/RHEL: dnf install libibverbs librdmacm; "
    "SUSE: zypper install libibverbs1 librdmacm1 libibverbs; "
    "Arch: pacman -S rdma-core"
)
_BUILD_PACKAGES = (
    "a build from source needs a C compiler and rdma-core's headers. "
    "Debian/Ubuntu: apt install gcc python3-dev libibverbs-dev librdmacm-dev; "
    "Fedora/RHEL: dnf install gcc python3-devel rdma-core-devel; "
    "SUSE: zypper install gcc python3-devel rdma-core-devel; "
    "Arch: pacman -S gcc rdma-core"
)


def _remedy(error: Exception) -> str:
    """How to repair the fault that the loader reported."""
    text = str(error)
    if isinstance(error, ModuleNotFoundError):
        if error.name == _MODULE:
            return (
                "the compiled module is not installed for this interpreter: "
                f"pip install --force-reinstall aiordma; {_BUILD_PACKAGES}"
            )
        return f"pip install {'cffi' if error.name == '_cffi_backend' else error.name}"
    if "undefined symbol" in text or "version `" in text:
        return (
            f"the installed rdma-core is older than {_SMALLEST_RDMA_CORE}, the oldest that "
            "aiordma runs with: update it, or the system that it belongs to"
        )
    return f"install rdma-core's libraries. {_RUNTIME_PACKAGES}"


def _load() -> ModuleType:
    """Import the compiled module.

    Raises:
        LibraryMissingError: It, cffi, libibverbs or librdmacm is missing or does not fit.
    """
    try:
        return importlib.import_module(_MODULE)
    # The dynamic loader's complaints arrive as ImportError; an unreadable file as OSError.
    except (ImportError, OSError) as error:
        raise LibraryMissingError(
            f"cannot load rdma-core's libraries: {error}. {_remedy(error)}. "
            "To see what else is missing run `aiordma doctor`."
        ) from error


def load_error() -> Exception | None:
    """Try to load the compiled module.

    Returns:
        None if `ffi` and `lib` can be used, else the exception that their use would raise.
    """
    try:
        _load()
    except LibraryMissingError as error:
        return error
    return None


class _Names:
    """Functions and constants."""

    def __dir__(self) -> list[str]:
        return dir(_load().lib)

    def __repr__(self) -> str:
        return "<aiordma._ffi.lib>"


class _Lib(_Names):
    """Stand-in for `_rdma.lib`; its first use loads the module."""

    def __getattr__(self, name: str) -> Any:
        # Dunder names are asked by copy, pickle, inspect and mock; they are no reason to load.
        if name.startswith("__"):
            raise AttributeError(name)
        loaded = _load().lib
        # All at once, and then without this method: every attribute of a class with this method is
        # looked up the long way, which costs as much as a short call.
        self.__dict__.update((known, getattr(loaded, known)) for known in dir(loaded))
        self.__class__ = _LoadedLib  # type: ignore[assignment]
        return getattr(self, name)


class _LoadedLib(_Names):
    """The class of `_Lib` after its first use."""


class _Memory:
    """Memory, casts and errno."""

    _real: Any

    # errno changes with every call: stored in the __dict__ like the rest it would keep its first
    # value forever.  A property on the class wins over the __dict__.
    @property
    def errno(self) -> int:
        value: int = self._real.errno
        return value

    @errno.setter
    def errno(self, value: int) -> None:
        self._real.errno = value

    def __dir__(self) -> list[str]:
        return dir(_load().ffi)

    def __repr__(self) -> str:
        return "<aiordma._ffi.ffi>"


class _FFI(_Memory):
    """Stand-in for `_rdma.ffi`, which loads it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        loaded = _load().ffi
        names = (known for known in dir(loaded) if known != "errno")
        self.__dict__.update((known, getattr(loaded, known)) for known in names)
        self.__dict__["_real"] = loaded
        self.__class__ = _LoadedFFI  # type: ignore[assignment]  # as `lib` does, and why
        return getattr(self, name)


class _LoadedFFI(_Memory):
    """The class of `_FFI` after its first use."""


if not TYPE_CHECKING:
    # For annotations only. The real types belong to the compiled module, which must not be loaded.
    CData = CType = Any
    ffi = _FFI()
    lib = _Lib()
