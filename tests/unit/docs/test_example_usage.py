"""An example that needs arguments tells its usage without them, and needs no device for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"
LIMIT_S = 60
# These find the softroce runner's device by themselves.
WITHOUT = {
    "client.py", "datagrams.py", "demo.py", "native_client.py", "native_server.py", "server.py",
    "tls_echo.py",
}  # fmt: skip
NEEDY = sorted({path.name for path in EXAMPLES.glob("*.py")} - WITHOUT)
PARTS = {"aiohttp_hello.py", "rpc.py", "rping.py", "stream_echo.py"}


@pytest.mark.parametrize("name", NEEDY)
def test_without_arguments_an_example_tells_its_usage(name: str) -> None:
    for words in ((), *((("no such part", "10.80.0.1"),) if name in PARTS else ())):
        run = subprocess.run(
            [sys.executable, "-W", "error", EXAMPLES / name, *words],
            capture_output=True, check=False, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        assert (run.returncode, run.stdout) == (2, ""), run.stderr
        usage, *further = run.stderr.splitlines()
        assert usage.startswith(f"usage: {name} ")
        # argparse adds a line of its own.
        assert not further or further[0].startswith(f"{name}: error: ")
        assert len(further) <= 1
