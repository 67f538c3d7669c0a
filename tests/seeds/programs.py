"""The examples of the native level, as programs of their own and inside a test."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 40.0
PORT = "18516"


def main_of(name: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """The coroutine function `main` of an example."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[..., Coroutine[Any, Any, None]] = module.main
    return main


class Program:
    """An example that runs as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def first_line(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            return (await self._process.stdout.readline()).decode()

    async def finish(self) -> str:
        """Wait for its end, which has to be a good one; the rest of what it printed."""
        async with asyncio.timeout(LIMIT_S):
            out, err = await self._process.communicate()
        assert (self._process.returncode, err.decode()) == (0, "")
        return out.decode()


@contextlib.asynccontextmanager
async def running(name: str, *words: str) -> AsyncIterator[Program]:
    """Run an example; every warning is an error there, too."""
    pipe = asyncio.subprocess.PIPE
    python = (sys.executable, "-W", "error")
    process = await asyncio.create_subprocess_exec(
        *python, str(EXAMPLES / name), *words, stdout=pipe, stderr=pipe
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
            _, err = await process.communicate()
            print(f"{name} was killed; it had said:\n{err.decode()}")  # for a test that failed
