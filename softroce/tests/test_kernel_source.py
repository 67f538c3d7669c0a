"""Where the source of a kernel comes from: the system's packages, or another release of Debian."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiordma_softroce import cache, kernel_build, kernel_source, packages, tools
from aiordma_softroce.errors import InfrastructureError

#: As apt tells of them: of another distribution, of Debian's releases, and of one without a list.
MIRRORS = """\
http://other.example/ubuntu/ noble Ubuntu
http://mirror.example/debian/ bookworm Debian
http://mirror.example/debian-security/ bookworm-security Debian
http://mirror.example/debian/ bookworm-updates Debian
http://mirror.example/none/
"""


@pytest.fixture
def shop(tmp_path: Path) -> cache.Workshop:
    return cache.Workshop(tmp_path, tmp_path / "result", tmp_path / "log")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A system that knows 6.1, and releases of Debian that know 7.2; what was run for it."""
    ran: list[str] = []

    def query(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        other = any(word.startswith("Dir::Etc::SourceList=") for word in argv)
        known = "linux-source-7.2" if other else "linux-source-6.1"
        out = f"{known}\n" if "pkgnames" in argv else ""
        if argv[1] == "indextargets":
            out = MIRRORS
        if argv[0] == "dpkg-deb":
            out = "1.0\n"
        if argv[-2] == "policy":
            out = f"  Candidate: {'1.0' if argv[-1] == known else '(none)'}\n"
        return subprocess.CompletedProcess(argv, 0, out, "")

    def run(argv: Sequence[str], **options: object) -> None:
        ran.append(" ".join(argv))
        if "download" in argv:
            (Path(str(options["directory"])) / f"{argv[-1]}_1.0_all.deb").touch()
        elif argv[0] == "dpkg":
            source = Path(argv[3], "usr/src")
            source.mkdir(parents=True)
            (source / f"{Path(argv[2]).name.partition('_')[0]}.tar.xz").touch()

    monkeypatch.setattr(tools, "query", query)
    monkeypatch.setattr(tools, "run", run)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    keys = tmp_path / "keys"
    keys.touch()
    monkeypatch.setattr(kernel_source, "KEYS", keys)
    return ran


def test_the_system_has_it(fetched: list[str], shop: cache.Workshop) -> None:
    archive, version = kernel_source.get(shop, "6.1")
    assert (archive.name, version) == ("linux-source-6.1.tar.xz", "1.0")
    assert [line.split()[0] for line in fetched] == ["apt-get", "dpkg"]
    assert "SourceList" not in fetched[0]


def test_another_release_has_it(fetched: list[str], shop: cache.Workshop) -> None:
    archive, _ = kernel_source.get(shop, "7.2")
    assert archive.name == "linux-source-7.2.tar.xz"
    update, download, _ = fetched
    assert update.endswith(" update")
    assert download.endswith(" download linux-source-7.2")
    # Neither the system's sources nor its lists, and signatures by Debian's keys alone.
    for line in (update, download):
        assert f"Dir::State={shop.scratch}" in line
        assert "Dir::Etc::SourceParts=-" in line
    sources = (shop.scratch / "apt/sources.list").read_text().splitlines()
    assert all(line.startswith(f"deb [signed-by={kernel_source.KEYS}] ") for line in sources)
    # Of the mirrors that the system has.
    assert sources[0].endswith("] http://mirror.example/debian/ bookworm main")
    assert sources[1].endswith("] http://mirror.example/debian-security/ bookworm-security main")


@pytest.mark.usefixtures("fetched")
def test_there_is_no_mirror_of_debian(
    shop: cache.Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.MIRRORS", "http://other.example/ubuntu/ noble Ubuntu\n")
    with pytest.raises(InfrastructureError, match="apt has no mirror of Debian"):
        kernel_source.get(shop, "7.2")


def test_no_release_has_it(fetched: list[str], shop: cache.Workshop) -> None:
    with pytest.raises(
        InfrastructureError, match=r"no source of Linux 6\.6 .* they have 6\.1, 7\.2"
    ):
        kernel_source.get(shop, "6.6")
    assert len(fetched) == 1


@pytest.mark.usefixtures("fetched")
def test_the_keys_are_missing(shop: cache.Workshop) -> None:
    kernel_source.KEYS.unlink()
    with pytest.raises(InfrastructureError, match="install debian-archive-keyring"):
        kernel_source.get(shop, "7.2")


def test_no_apt(shop: cache.Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InfrastructureError, match="no apt-cache here"):
        kernel_source.get(shop, "7.2")


def test_kernels_by_name_do_not_stand_in_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIORDMA_SOFTROCE_CACHE", str(tmp_path))
    tmp_path.chmod(0o700)
    (tmp_path / "uml-6.12.117-1-nokey").mkdir()
    assert kernel_build.cached() is None

    def make(name: str | None, version: str) -> Path:
        def obtain(kind: str, key: str, *_: object, **__: object) -> Path:
            entry = tmp_path / f"{kind}-{version}-{key}"
            entry.mkdir()
            (entry / "linux").touch(mode=0o755)
            return entry

        monkeypatch.setattr(cache, "obtain", obtain)
        return kernel_build.kernel(name).parent

    monkeypatch.setattr(packages, "missing", lambda names: [])
    oldest = make("6.1", "6.1.192-2")
    newest = make(None, "6.12.117-1~deb12u1")
    assert kernel_build.cached("6.1") == oldest
    assert kernel_build.cached() == newest
    assert kernel_build.cached("6.12") == newest
    assert kernel_build.cached("7.2") is None
    assert kernel_build.series(kernel_build.version_of(newest)) == "6.12"
    assert kernel_build.series("7.2~rc7-1~exp1") == "7.2"
