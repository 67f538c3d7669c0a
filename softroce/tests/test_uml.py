"""A command in a User-Mode Linux guest: devices, output, status, surroundings."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiordma_softroce as package
from aiordma_softroce import cache

from .building import call_tool
from .conftest import LIMIT, REPOSITORY, Runner, eventually
from .programs import rping, rstream

pytestmark = pytest.mark.uml

UML = ("--engine", "uml")


def test_rping(softroce: Runner) -> None:
    done = softroce(*UML, "--", "sh", "-c", rping("$AIORDMA_SOFTROCE_ADDR"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"ping data: rdma-ping-") == 5


def test_a_processor_without_xsave(softroce: Runner) -> None:
    """The registers of FXSAVE are saved; softroce/tests runs on processors with far more."""
    folder = REPOSITORY / "softroce/tests"
    words = (sys.executable, folder / "no_xsave.py", *UML, "--", sys.executable, "-I", "-S")
    said = call_tool(*words, folder / "registers.py", cwd=REPOSITORY, seconds=LIMIT)
    assert said == "equal\n"
    done = softroce(*UML, "--", sys.executable, "-I", "-S", str(folder / "registers.py"))
    assert done.stdout == b"equal\n", done.stderr


def test_rping_over_ipv6(softroce: Runner) -> None:
    done = softroce(*UML, "--", "sh", "-c", rping("fd80::1"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"ping data: rdma-ping-") == 5


def test_rstream(softroce: Runner) -> None:
    done = softroce(*UML, "--", "sh", "-c", rstream("$AIORDMA_SOFTROCE_ADDR"))
    assert done.returncode == 0, done.stderr
    assert b"64k" in done.stdout


def test_siw(softroce: Runner) -> None:
    script = "ls /sys/class/infiniband; echo $AIORDMA_SOFTROCE_DEVICE; " + rping("10.80.0.1")
    done = softroce(*UML, "--device", "siw", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [b"siw0", b"siw"]
    assert done.stdout.count(b"ping data: rdma-ping-") == 5


@pytest.mark.parametrize("verbose", [(), ("-v",)])
@pytest.mark.parametrize("status", [0, 139])
def test_a_process_for_which_the_host_had_no_memory(
    softroce: Runner, verbose: tuple[str, ...], status: int
) -> None:
    """The words are those of the kernel; here nothing is short of memory."""
    words = "UML ran out of memory on the host side! This can happen due to a memory limitation"
    script = f"echo '<3>{words}' > /dev/kmsg; exit {status}"
    done = softroce(*UML, *verbose, "--", "sh", "-c", script)
    assert done.returncode == status
    assert (b"sudo sysctl -w vm.max_map_count=" in done.stderr) == (status != 0)


def test_virtual_time(softroce: Runner) -> None:
    begin = time.monotonic()
    # From uptime to uptime: the boot may sleep in virtual time, too, for as long as it likes.
    script = "echo $AIORDMA_SOFTROCE_VIRTUAL_TIME; cat /proc/uptime; sleep 3600; cat /proc/uptime"
    done = softroce(*UML, "--virtual-time", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 60
    flag, before, after = done.stdout.splitlines()
    assert flag == b"1"
    slept = float(after.split()[0]) - float(before.split()[0])  # of hundredths: 3600 may be 3599.99
    assert 3599.9 < slept < 3610


def test_the_port_is_as_wide_as_it_gets(softroce: Runner) -> None:
    script = "cat /sys/class/net/dummy0/mtu; ibv_devinfo -d rxe0 | grep active_mtu"
    done = softroce(*UML, "--", "sh", "-c", script)
    assert done.stdout.split()[:3] == [b"9000", b"active_mtu:", b"4096"]
    done = softroce(*UML, "--mtu", "1500", "--", "sh", "-c", script)
    assert done.stdout.split()[:3] == [b"1500", b"active_mtu:", b"1024"]


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -SEGV $$"], 128 + 11),
        (["no-such-command"], 127),
        (["/no/such/file"], 127),
        (["/etc/passwd"], 126),
        (["/etc"], 126),
    ],
)
def test_status(softroce: Runner, command: list[str], status: int) -> None:
    done = softroce(*UML, "--", *command)
    assert done.returncode == status
    assert done.stdout == b""
    if status in (126, 127):
        assert done.stderr.startswith(f"softroce: {command[0]}: ".encode())
        assert len(done.stderr.splitlines()) == 1
    else:
        assert done.stderr == b""


def test_time_limit(softroce: Runner) -> None:
    begin = time.monotonic()
    done = softroce(*UML, "--timeout", "15", "--", "sh", "-c", "echo started; sleep 1000")
    assert done.returncode == 124
    assert time.monotonic() - begin < 60  # the guest boots within the limit
    assert done.stdout == b"started\n"
    assert done.stderr == b"softroce: timed out after 15 s; everything was killed\n"


def test_a_program_that_spins_in_virtual_time_is_ended(softroce: Runner) -> None:
    done = softroce(
        *UML, "--virtual-time", "--timeout", "3", "--", "sh", "-c", "while :; do :; done"
    )
    assert done.returncode == 124


def test_output_is_unchanged_and_separate(softroce: Runner, tmp_path: Path) -> None:
    size = 10_000_000
    script = tmp_path / "noise.py"
    script.write_text(
        "import random, sys\n"
        "out, err = (random.Random(seed).randbytes(int(sys.argv[1])) for seed in (1, 2))\n"
        "sys.stdout.buffer.write(out); sys.stderr.buffer.write(err[:1000000])\n"
    )
    begin = time.monotonic()
    done = softroce(*UML, "--", sys.executable, str(script), str(size))
    elapsed = time.monotonic() - begin
    expected = [random.Random(seed).randbytes(size) for seed in (1, 2)]
    assert len(done.stdout) == size
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(expected[0]).digest()
    assert done.stderr == expected[1][:1_000_000]
    assert done.returncode == 0
    assert elapsed < 60


def test_output_is_live(softroce: Runner) -> None:
    process = softroce.start(*UML, "--", "sh", "-c", "echo now; sleep 1000")
    assert process.stdout is not None
    assert process.stdout.readline() == b"now\n"
    assert process.poll() is None


def test_a_reader_that_leaves_ends_the_run(softroce: Runner) -> None:
    process = softroce.start(*UML, "--", "yes")
    assert process.stdout is not None
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(timeout=30) == 128 + 13


def test_surroundings(softroce: Runner, tmp_path: Path) -> None:
    here = tmp_path / "a folder, ünïcode"
    here.mkdir()
    odd = b"not \xff utf-8"
    program = (
        "import json, os, sys; old = os.umask(0); json.dump([[os.fsencode(a).hex() "
        "for a in sys.argv[1:]], os.fsencode(os.getcwd()).hex(), os.environb[b'ODD'].hex(), "
        "len(os.environ['LARGE']), old, sys.stdin.read(), os.environ['AIORDMA_SOFTROCE'], "
        "os.environ['AIORDMA_SOFTROCE_ENGINE']], sys.stdout); "
        "open('left behind', 'w').write('here')"
    )
    words = [b"two words", "ünï".encode(), odd, b"", b'"quoted" $HOME \\', b"--engine"]
    done = softroce(
        *UML, "--", sys.executable, "-c", program, *words,
        cwd=here,
        umask=0o027,
        environment={"ODD": os.fsdecode(odd), "LARGE": "x" * 100_000},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    argv, directory, value, large, umask, stdin, flag, engine = json.loads(done.stdout)
    assert [bytes.fromhex(word) for word in argv] == words
    assert bytes.fromhex(directory) == os.fsencode(here)
    assert bytes.fromhex(value) == odd
    assert large == 100_000
    assert umask == 0o027
    assert stdin == ""
    assert (flag, engine) == ("1", "uml")
    assert (here / "left behind").read_text() == "here"


def test_limits(softroce: Runner) -> None:
    program = (
        "import resource as r; print([r.getrlimit(x)[0] for x in "
        "(r.RLIMIT_MEMLOCK, r.RLIMIT_NOFILE, r.RLIMIT_NPROC)], r.getrlimit(r.RLIMIT_CORE))"
    )
    done = softroce(*UML, "--", sys.executable, "-c", program)
    core = resource.getrlimit(resource.RLIMIT_CORE)
    assert done.stdout.decode() == f"[-1, 65536, -1] {core}\n"


def test_a_directory_that_the_guest_has_not_is_told(softroce: Runner) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        done = softroce(*UML, "--", "true", cwd=folder)
    assert done.returncode == 125
    assert b"does not exist in the guest" in done.stderr
    assert b"start from another directory" in done.stderr


def test_a_panic_is_no_verdict_of_the_command(softroce: Runner) -> None:
    done = softroce(*UML, "--", "sh", "-c", "echo c > /proc/sysrq-trigger; sleep 1000")
    assert done.returncode == 125
    assert b"the guest ended before the command did" in done.stderr
    assert b"sysrq triggered crash" in done.stderr


@pytest.mark.parametrize("limit", [500 << 20, 1 << 30])  # the guest is to have as much
def test_a_limit_of_memory_is_told(softroce: Runner, limit: int) -> None:
    limited = ("prlimit", f"--as={limit}")
    done = softroce(*UML, "--", "true", prefix=limited)
    assert done.returncode == 125
    first, *said = done.stderr.decode().splitlines()
    assert first.startswith("softroce: the guest ended before it had started: this process may not")
    assert "(ulimit -v)" in first
    assert said
    assert not any("make_umid" in line for line in said)  # each guest says that
    done = softroce(*UML, "--memory", "300M", "--", "true", prefix=limited)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_directory_that_is_gone_is_told(softroce: Runner, tmp_path: Path) -> None:
    remove = ("sh", "-c", f'cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec "$@"', "sh")
    (tmp_path / "gone").mkdir()
    done = softroce(*UML, "--", "true", prefix=remove)
    assert done.returncode == 2
    assert done.stderr == b"softroce: the current directory is gone: start from another one\n"


def test_a_wrong_discipline_is_told(softroce: Runner) -> None:
    done = softroce(*UML, "--net", "no-such-discipline", "--", "true")
    assert done.returncode == 125
    assert b"tc qdisc add dev veth0 root no-such-discipline: exit status" in done.stderr
    assert b"kernel said" not in done.stderr  # which is of no help there


def test_what_is_left_running_is_ended(softroce: Runner) -> None:
    begin = time.monotonic()
    done = softroce(*UML, "--", "sh", "-c", "sleep 1000 & setsid sleep 1000 & echo done")
    assert (done.returncode, done.stdout) == (0, b"done\n")
    assert time.monotonic() - begin < 60


def test_the_function(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert package.run(["sh", "-c", "echo hello; exit 5"], engine="uml") == 5
    assert capfd.readouterr().out == "hello\n"
    with (tmp_path / "out").open("wb") as file:
        assert package.run(["echo", "aside"], engine="uml", stdout=file.fileno()) == 0
    assert (tmp_path / "out").read_bytes() == b"aside\n"
    assert capfd.readouterr().out == ""


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder that every user may use, with the kernel in it."""
    # tmp_path lies in a folder that is closed to others.
    folder = Path(tempfile.mkdtemp(prefix="softroce-test-", dir="/tmp"))
    try:
        folder.chmod(0o1777)  # as /tmp is
        shutil.copytree(
            cache.root(), folder / "cache", ignore=shutil.ignore_patterns(".*", "qemu*")
        )
        (folder / "cache").chmod(0o755)
        yield folder
    finally:
        shutil.rmtree(folder)


def test_an_ordinary_user(softroce: Runner, public: Path) -> None:
    """It needs no rights, and what it writes belongs to the user."""
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    prefix = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    shutil.copytree(REPOSITORY / "softroce/src", public / "package")
    done = softroce(
        *UML, "--", "sh", "-c", f"id -u > made; {rping('10.80.0.1')}",
        cwd=public,
        prefix=prefix if os.geteuid() == 0 else (),
        # The one of the tests may lie in root's home.
        python="/usr/bin/python3",
        environment={
            "AIORDMA_SOFTROCE_CACHE": str(public / "cache"),
            "PYTHONPATH": str(public / "package"),
            "HOME": "/nonexistent",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"ping data: rdma-ping-") == 5
    made = public / "made"
    assert made.read_text() == "0\n"
    assert made.stat().st_uid == user
    assert not stat.S_IMODE(made.stat().st_mode) & 0o022


def test_nothing_is_left_in_the_file_system(softroce: Runner, tmp_path: Path) -> None:
    """Neither after a run nor after the runner was killed in the middle of one."""
    home = tmp_path / "home"
    home.mkdir()
    surroundings = {"HOME": str(home), "AIORDMA_SOFTROCE_CACHE": str(cache.root())}
    assert softroce(*UML, "--", "true", environment=surroundings).returncode == 0
    process = softroce.start(*UML, "--", "cat", "/dev/zero", environment=surroundings)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"\0"
    process.kill()
    process.wait(timeout=30)
    assert eventually(lambda: not list(home.iterdir()))
