"""Loading the compiled module: late, once, and with an answer where it cannot be loaded."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from aiordma import _ffi
from aiordma.errors import LibraryMissingError, RdmaError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

# Placed before the code of a test: what happens on a machine where the module cannot be loaded.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "aiordma._ffi._rdma":
            raise {error}
        return None

sys.meta_path.insert(0, Blocker())
"""
NO_LIBRARY = (
    'ImportError("librdmacm.so.1: cannot open shared object file: No such file or directory")'
)


def run(code: str, error: str = "") -> str:
    """Run code in a new interpreter, optionally with a blocked module; its output."""
    program = (BLOCKER.format(error=error) if error else "") + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        check=False,
        cwd=ROOT,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing() -> None:
    code = """
        import sys
        import aiordma, aiordma._ffi, aiordma._ffi.check
        import aiordma.verbs.enums, aiordma.cm.enums
        print("aiordma._ffi._rdma" in sys.modules)
    """
    assert run(code) == "False"


def test_the_package_imports_where_the_libraries_are_missing() -> None:
    code = """
        import aiordma, aiordma._ffi.check, aiordma.verbs.enums, aiordma.cm.enums
        print(aiordma.verbs.enums.WCStatus(12).name)
    """
    assert run(code, NO_LIBRARY) == "RETRY_EXC_ERR"


@pytest.mark.parametrize("use", ["ffi.NULL", "ffi.errno", "lib.ibv_alloc_pd"])
def test_use_without_the_libraries_says_what_is_missing(use: str) -> None:
    code = f"""
        from aiordma._ffi import ffi, lib
        try:
            {use}
        except ImportError as error:
            print(type(error).__name__, error, repr(error.__cause__))
    """
    text = run(code, NO_LIBRARY)
    assert text.startswith("LibraryMissingError ")
    assert "librdmacm.so.1: cannot open shared object file" in text
    assert "apt install libibverbs1 librdmacm1" in text
    assert "dnf install libibverbs librdmacm" in text
    assert "aiordma doctor" in text


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NO_LIBRARY, "ibverbs-providers"),
        ('OSError("cannot read the file")', "ibverbs-providers"),
        (
            "ModuleNotFoundError(\"No module named 'aiordma._ffi._rdma'\", "
            'name="aiordma._ffi._rdma")',
            "libibverbs-dev librdmacm-dev",
        ),
        (
            'ModuleNotFoundError("No module named \'_cffi_backend\'", name="_cffi_backend")',
            "pip install cffi",
        ),
        (
            'ImportError("libibverbs.so.1: version `IBVERBS_1.14\' not found")',
            "older than 35, the oldest that aiordma runs with: update it",
        ),
        ('ImportError("undefined symbol: ibv_reg_dmabuf_mr")', "older than 35"),
    ],
)
def test_remedy_fits_the_complaint(error: str, remedy: str) -> None:
    code = """
        from aiordma._ffi import load_error
        print(load_error())
    """
    assert remedy in run(code, error)


def test_load_error_returns_what_use_would_raise() -> None:
    code = """
        from aiordma._ffi import lib, load_error
        reason = load_error()
        try:
            lib.ibv_alloc_pd
        except ImportError as error:
            print(type(error) is type(reason), str(error) == str(reason))
    """
    assert run(code, NO_LIBRARY) == "True True"


def test_a_failure_is_not_remembered() -> None:
    code = """
        from aiordma._ffi import lib, load_error
        assert load_error() is not None
        sys.meta_path.pop(0)
        import importlib.util
        found = importlib.util.find_spec("aiordma._ffi._rdma") is not None
        print(found, load_error() is None)
    """
    assert run(code, NO_LIBRARY) in ("True True", "False False")


def test_the_error_is_an_import_error_and_ours() -> None:
    assert issubclass(LibraryMissingError, ImportError)
    assert issubclass(LibraryMissingError, RdmaError)


def test_questions_about_dunder_names_do_not_load() -> None:
    code = """
        import copy, inspect
        from aiordma._ffi import ffi, lib
        print(inspect.isfunction(lib), hasattr(lib, "__wrapped__"), hasattr(ffi, "__len__"))
        print(repr(ffi), repr(lib))
    """
    text = run(code, NO_LIBRARY)
    assert text == "False False False\n<aiordma._ffi.ffi> <aiordma._ffi.lib>"


# ---- with the compiled module --------------------------------------------------------------

loaded = pytest.mark.skipif(_ffi.load_error() is not None, reason="no compiled module")


@loaded
def test_an_attribute_is_looked_up_once() -> None:
    first = _ffi.lib.ibv_poll_cq
    assert _ffi.lib.__dict__["ibv_poll_cq"] is first
    assert _ffi.ffi.new is _ffi.ffi.__dict__["new"]


@loaded
def test_errno_is_never_stored() -> None:
    _ffi.ffi.errno = 5
    assert _ffi.ffi.errno == 5
    _ffi.ffi.errno = 6
    assert _ffi.ffi.errno == 6
    assert "errno" not in _ffi.ffi.__dict__
    _ffi.ffi.errno = 0


@loaded
def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="ibv_no_such_verb"):
        _ = _ffi.lib.ibv_no_such_verb  # type: ignore[attr-defined]
    assert not hasattr(_ffi.ffi, "no_such_method")


@loaded
def test_a_test_can_put_a_double_in_place_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _ffi.lib.ibv_poll_cq
    with monkeypatch.context() as patch:
        patch.setattr(_ffi.lib, "ibv_poll_cq", lambda *_: -1)
        assert _ffi.lib.ibv_poll_cq(_ffi.ffi.NULL, 1, _ffi.ffi.NULL) == -1
    assert _ffi.lib.ibv_poll_cq is real


@loaded
def test_many_threads_may_be_first() -> None:
    code = """
        import threading
        from aiordma._ffi import ffi, lib

        start = threading.Barrier(16)
        seen = []

        def first():
            start.wait()
            seen.append((lib.IBV_WC_RECV, ffi.sizeof("struct ibv_wc")))

        threads = [threading.Thread(target=first) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(seen), set(seen))
    """
    assert run(code) == "16 {(128, 48)}"


@loaded
def test_errno_belongs_to_the_thread() -> None:
    _ffi.ffi.errno = 11
    other: list[int] = []
    thread = threading.Thread(target=lambda: other.append(_ffi.ffi.errno))
    thread.start()
    thread.join()
    assert _ffi.ffi.errno == 11
    assert other == [0]
    _ffi.ffi.errno = 0
