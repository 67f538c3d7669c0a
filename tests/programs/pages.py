"""Pages whose programs need packages of `make programs`: `python -m tests.programs.pages PAGE...`.

Where a device is, the files of a page are written to a folder, and its commands run there; what
they print has to be what the page says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.device.shell import matches
from tests.pages import ROOT, blocks, steps
from tests.programs.one import packets_sent

__all__ = ["PAGES", "run_page"]

#: The pages, with the fewest packets that the adapter sends where their arrays go over RDMA.
PAGES = {"ray.md": 4 * 8_000_000 // 4096}
_LIMIT_S = 300


def run_page(page: str) -> str:
    """Run the page; what is wrong, or nothing."""
    address = os.environ["AIORDMA_SOFTROCE_ADDR"]
    before = packets_sent()
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
        for block in blocks(page):
            if block.name:
                (Path(folder) / block.name).write_text(block.text)
        for block in blocks(page):
            for step in steps(block.text) if block.kind == "console" else ():
                command = step.command.replace("10.80.0.1", address)
                done = subprocess.run(
                    command, shell=True, cwd=folder, env=env, stdout=subprocess.PIPE, text=True,
                    timeout=_LIMIT_S, check=False,
                )  # fmt: skip
                if done.returncode or not matches(done.stdout, "\n".join((*step.lines, ""))):
                    return f"{command}: {done.returncode}, {done.stdout!r}"
    if (sent := packets_sent() - before) < PAGES[page]:
        return f"the adapter has sent {sent} packets"
    return ""


def main(*pages: str) -> int:
    """Run pages; the exit status."""
    wrong = {page: told for page in pages if (told := run_page(page))}
    for page in pages:
        print(f"{'WRONG' if page in wrong else 'ok':5} {page:22} {wrong.get(page, '')}", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
