"""distributed's own tests of comms, over `rdma://` in place of `tcp://`.

    python -m tests.conformance.dask_suite CHECKOUT [PYTEST OPTION...]

CHECKOUT is a copy of distributed's repository: its packages have no tests.  Runs where a device is,
on its tests of comms, whose text names the scheme and addresses of loopback; they are replaced.
Prints a table of those that pass and of those that are left out, with the reasons.  The status is 1
if a test that is not left out fails, or is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

LIMIT_S = 900
TESTS = Path("distributed/comm/tests/test_comms.py")

_OTHER = "the test of another backend"
_PRIVATE = "replaces private parts of the backend over TCP"
_IPV6 = "listens on addresses of IPv6, which the device has not"
#: Of tests, by their names; the first pattern that fits is the reason.
LEFT_OUT = {
    "test_inproc_*": _OTHER,
    "test_tls_*": _OTHER,
    "test_parse_host_port*": "a function by itself",
    "test_unparse_host_port*": "a function by itself",
    "test_register_backend_entrypoint*": "makes a backend of its own",
    "test_get_stream_address_raises_if_closed": _OTHER,
    "test_default_client_server_*": "the default scheme, which is tcp://",
    "test_tcp_listener_does_not_call_handler_on_handshake_error*": _PRIVATE,
    "test_tcp_specific*": _PRIVATE,
    "test_comm_closed_on_write_error*": _PRIVATE,
    "test_stop_listener_during_handle_stream*": _PRIVATE,
    "test_tcp_client_server_ipv6*": _IPV6,
    "test_resolve_address*": "expects the addresses of loopback to stay as they are",
    "test_get_local_address_for*": "expects a way to the Internet",
}


def why_left_out(name: str) -> str:
    """The reason, or an empty text for a test that runs."""
    fits = (reason for pattern, reason in LEFT_OUT.items() if fnmatchcase(name, pattern))
    return next(fits, "")


def over_rdma(source: str, address: str) -> str:
    """The text of the tests, with our scheme, and the device's address in place of this host's."""
    for old, new in (
        ("tcp://", "rdma://"),
        ("127.0.0.1", address),
        ("EXTERNAL_IP4 = get_ip()", f'EXTERNAL_IP4 = "{address}"'),
    ):
        source = source.replace(old, new)
    return source


def outcomes(report: Path) -> dict[str, str]:
    """Of each test, out of a file of JUnit: "passed", or the element that says otherwise."""
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = [each.tag for each in case if each.tag in ("error", "failure", "skipped")]
        found[case.attrib["name"]] = kinds[0] if kinds else "passed"
    return found


def run(checkout: Path, options: list[str]) -> dict[str, str]:
    """The outcome of each test that is not left out."""
    address = os.environ["AIORDMA_SOFTROCE_ADDR"]
    with tempfile.TemporaryDirectory() as folder:
        tests, report = Path(folder, "test_comms_rdma.py"), Path(folder, "report.xml")
        tests.write_text(over_rdma((checkout / TESTS).read_text(), address))
        words = (
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio",
            "-c", os.devnull, "--rootdir", folder, "--tb=short", f"--junit-xml={report}",
        )  # fmt: skip
        paths = os.pathsep.join((str(checkout), os.environ.get("PYTHONPATH", "")))
        subprocess.run(
            [*words, *options, str(tests)],
            env={**os.environ, "PYTHONPATH": paths}, check=False, timeout=LIMIT_S, cwd=folder,
        )  # fmt: skip
        return outcomes(report)


def main(words: list[str]) -> int:
    """Run them; returns the exit status."""
    found = run(Path(words[0]).resolve(), words[1:])
    chosen = {name: kind for name, kind in found.items() if not why_left_out(name)}
    passed = [name for name, kind in chosen.items() if kind == "passed"]
    print("\n| Tests | |\n| --- | --- |")
    print(f"| {len(passed)} | pass: " + ", ".join(f"`{name}`" for name in passed) + " |")
    for reason, count in Counter(why_left_out(name) for name in found).items():
        if reason:
            print(f"| {count} | left out: {reason} |")
    wrong = {name: kind for name, kind in chosen.items() if kind != "passed"}
    for name, kind in wrong.items():
        print(f"{kind}: {name}")
    return 1 if wrong or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
