"""The cache: one build for many, whole or not at all."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from aiordma_softroce import cache, kernel_build
from aiordma_softroce.errors import InfrastructureError

from .conftest import LIMIT, REPOSITORY

_BUILDER = """
import sys
from aiordma_softroce import cache

def build(shop):
    (shop.result / "linux").write_text("made")
    print("building", flush=True)
    sys.stdin.readline()
    return "1.2"

print(cache.obtain("fake", "key", 1, build, what="the fake"), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(path))
    return path


def _build(shop: cache.Workshop) -> str:
    (shop.result / "linux").write_text("made")
    return "1.2"


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "softroce/src")},
    )


def test_a_result_is_kept(folder: Path) -> None:
    calls = []

    def build(shop: cache.Workshop) -> str:
        calls.append(shop)
        return _build(shop)

    first = cache.obtain("fake", "key", 1, build, what="the fake")
    second = cache.obtain("fake", "key", 1, build, what="the fake")
    assert first == second == folder / "fake-1.2-key"
    assert (first / "linux").read_text() == "made"
    assert len(calls) == 1
    assert not list(folder.glob(".*"))


def test_another_key_is_another_result(folder: Path) -> None:
    one = cache.obtain("fake", "key1", 1, _build, what="the fake")
    two = cache.obtain("fake", "key2", 1, _build, what="the fake")
    assert one != two
    assert cache.find("fake", "key1") == one
    assert cache.find("fake", "key") is None
    assert cache.find("other", "key1") is None


def test_the_key_depends_on_every_part() -> None:
    base = cache.digest(b"config", 12288, 1)
    assert base == cache.digest(b"config", 12288, 1)
    others = {
        cache.digest(b"other", 12288, 1),
        cache.digest(b"config", 16384, 1),
        cache.digest(b"config", 12288, 2),
        cache.digest(b"config1", 2288, 1),
    }
    assert base not in others
    assert len(others) == 4


def test_a_failed_build_leaves_nothing(folder: Path) -> None:
    def fail(shop: cache.Workshop) -> str:
        (shop.result / "linux").write_text("half")
        raise InfrastructureError("no compiler")

    with pytest.raises(InfrastructureError, match="no compiler"):
        cache.obtain("fake", "key", 1, fail, what="the fake")
    assert cache.find("fake", "key") is None
    assert not list(folder.glob(".*"))
    assert sorted(path.name for path in folder.iterdir()) == ["fake.lock", "fake.log"]


def test_a_killed_build_is_cleared_away_by_the_next(folder: Path) -> None:
    builder = _start()
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    builder.send_signal(signal.SIGKILL)
    builder.communicate(timeout=LIMIT)
    assert len(list(folder.glob(".fake-*"))) == 1
    assert cache.find("fake", "key") is None
    assert cache.obtain("fake", "key", 1, _build, what="the fake").is_dir()
    assert not list(folder.glob(".fake-*"))


def test_the_second_process_waits_and_says_so(folder: Path) -> None:
    first = _start()
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    second = _start()
    assert second.stderr is not None
    assert second.stderr.readline() == (
        "softroce: another process is making the fake; waiting for it\n"
    )
    out, _ = first.communicate("go\n", timeout=LIMIT)
    entry = f"{folder / 'fake-1.2-key'}\n"
    assert out == entry
    # Had it built as well, it would have said so.
    assert second.communicate(timeout=LIMIT) == (entry, "")


def test_a_full_disk_is_told_beforehand(folder: Path) -> None:
    too_much = shutil.disk_usage("/").total * 1000
    with pytest.raises(InfrastructureError, match="free some, or set AIORDMA_SOFTROCE_CACHE"):
        cache.obtain("fake", "key", too_much, _build, what="the fake")


def test_a_place_that_is_no_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InfrastructureError, match="set AIORDMA_SOFTROCE_CACHE"):
        cache.obtain("fake", "key", 1, _build, what="the fake")


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIORDMA_SOFTROCE_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.root() == Path("/home/someone/.cache/aiordma/softroce")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.root() == Path("/elsewhere/aiordma/softroce")


def test_registers_are_never_too_small() -> None:
    size = kernel_build.register_bytes()
    assert 12288 <= size <= 65536


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("\tDEFINE_LONGS(HOST_FP_SIZE, 2696);\n", "\tDEFINE_LONGS(HOST_FP_SIZE, 12288);\n"),
        ("\tDEFINE_LONGS(HOST_BX, RBX);\n", "\tDEFINE_LONGS(HOST_BX, RBX);\n"),
    ],
)
def test_registers_are_widened_in_the_source(text: str, changed: str, tmp_path: Path) -> None:
    file = tmp_path / "arch/x86/um/user-offsets.c"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    kernel_build.widen_registers(tmp_path, 12288, tmp_path / "log")
    assert file.read_text() == changed


def test_a_lost_option_is_told(tmp_path: Path) -> None:
    file = tmp_path / ".config"
    names = [name for name in kernel_build.ESSENTIAL if name != "RDMA_SIW"]
    file.write_text("".join(f"CONFIG_{name}=y\n" for name in names) + "# CONFIG_RDMA_SIW is off\n")
    with pytest.raises(InfrastructureError, match="cannot be configured with RDMA_SIW"):
        kernel_build.check_configuration(file, "9.9")


# ---- what is run from there -----------------------------------------------------------------


def _obtain() -> Path:
    return cache.obtain("fake", "key", 1, _build, what="the fake")


def _refused(why: str) -> None:
    with pytest.raises(InfrastructureError, match=why) as caught:
        _obtain()
    assert "AIORDMA_SOFTROCE_CACHE" in str(caught.value) or "made again" in str(caught.value)


def test_g08_the_folder_is_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        entry = _obtain()
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not stat.S_IMODE((entry / "linux").stat().st_mode) & 0o022
    assert _obtain() == entry


@pytest.mark.parametrize("place", ["folder", "entry", "linux"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_g08_what_others_may_write_is_not_run(folder: Path, place: str, mode: int) -> None:
    entry = _obtain()
    path = {"folder": folder, "entry": entry, "linux": entry / "linux"}[place]
    path.chmod(path.stat().st_mode | mode)
    _refused("may be written to by others")


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it seem to belong to another user."""
    real = Path.lstat

    def lstat(self: Path) -> os.stat_result:
        found = list(real(self))
        if self == path:
            found[stat.ST_UID] = os.geteuid() + 4321
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", lstat)


@pytest.mark.parametrize("place", ["folder", "entry", "linux"])
def test_g08_what_another_user_has_planted_is_not_run(
    folder: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _obtain()
    path = {"folder": folder, "entry": entry, "linux": entry / "linux"}[place]
    _give_away(path, monkeypatch)
    _refused(f"belongs to another user, of ID {os.geteuid() + 4321}")


def test_g08_a_file_that_has_changed_is_not_run(folder: Path) -> None:
    entry = _obtain()
    (entry / "linux").write_text("evil")
    _refused("has changed since it was made")
    (entry / "linux").write_text("made")
    assert _obtain() == entry
    (entry / "more").write_text("more")
    _refused("has changed since it was made")
    (entry / "more").unlink()
    (entry / "more").symlink_to("/bin/sh")
    _refused("has changed since it was made")


def test_g08_an_entry_from_before_gets_its_hashes(folder: Path) -> None:
    entry = _obtain()
    (entry / ".sha256").unlink()
    assert _obtain() == entry
    (entry / "linux").write_text("evil")
    _refused("has changed since it was made")


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that has two folders of the test's above it."""
    path = tmp_path / "above" / "parent" / "cache"
    path.parent.mkdir(parents=True)
    for each in (path.parent, path.parent.parent):
        each.chmod(0o755)
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(path))
    return path


@pytest.mark.parametrize("level", [0, 1])
def test_g08_what_others_may_replace_is_not_run(deep: Path, level: int) -> None:
    entry = _obtain()
    path = deep.parents[level]
    path.chmod(0o777)
    _refused(f"{path} may be written to by others")
    path.chmod(0o1777)  # as /tmp is
    assert _obtain() == entry
    path.chmod(0o755)
    assert _obtain() == entry


@pytest.mark.parametrize("present", [True, False])
def test_g08_a_folder_in_one_that_others_may_change_is_not_made(deep: Path, present: bool) -> None:
    deep.parent.chmod(0o777)
    if present:
        deep.mkdir(0o700)
    _refused("may be written to by others")
    assert not list(deep.glob("fake-*"))


def test_g08_a_group_of_several_may_replace(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = _obtain()
    deep.parent.chmod(0o775)
    own = deep.parent.stat().st_gid
    user = pwd.getpwuid(os.geteuid())
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user_of(user, own))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group_of(gid, []))
    assert _obtain() == entry, "of a user's own group, with a umask of 002"
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group_of(gid, [user.pw_name, "mallory"]))
    _refused("may be written to by others")
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group_of(gid, []))
    if own:
        monkeypatch.setattr(pwd, "getpwuid", lambda _: user_of(user, own + 1))
        _refused("may be written to by others")


def user_of(user: pwd.struct_passwd, gid: int) -> pwd.struct_passwd:
    return pwd.struct_passwd((*user[:3], gid, *user[4:]))


def group_of(gid: int, members: list[str]) -> grp.struct_group:
    return grp.struct_group(("group", "x", gid, members))


def test_g08_a_link_leads_to_a_private_place_only(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = _obtain()
    link = tmp_path / "link"
    link.symlink_to(deep.parent)
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(link / "cache"))
    assert _obtain() == link / "cache" / entry.name
    deep.parent.chmod(0o777)
    _refused(f"{deep.parent} may be written to by others")


@pytest.mark.parametrize("level", [0, 1])
def test_g08_what_another_user_may_replace_is_not_run(
    deep: Path, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _obtain()
    path = deep.parents[level]
    _give_away(path, monkeypatch)
    _refused(f"{path} belongs to another user, of ID {os.geteuid() + 4321}")


def test_g08_the_default_folder_is_made_private_and_becomes_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIORDMA_SOFTROCE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        entry = _obtain()
    finally:
        os.umask(before)
    for path in (entry.parent, *entry.parent.parents[:2]):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    entry.parent.chmod(0o755)  # as versions before have left it
    cache.log_file("fake")
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert _obtain() == entry


def test_g08_a_chosen_folder_stays_readable(folder: Path) -> None:
    """Several users may run what one of them, or root, has built."""
    _obtain()
    folder.chmod(0o755)
    cache.log_file("fake")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
