"""The kernel of the ``qemu`` engine: the distribution's own, unpacked, with a small initramfs."""

from __future__ import annotations

import gzip
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from . import cache, packages, tools
from .errors import InfrastructureError

_KIND = "qemu"
_WHAT = "the kernel of the qemu engine"
#: To be raised with each change of this file that changes the image.
_RECIPE = 1
_NEEDED_BYTES = 1500 << 20
_DEPMOD_SECONDS = 300.0

#: The packages that depend on the newest generic kernel, in Debian and in Ubuntu. The cloud kernel
#: of either has no RDMA.
_META = ("linux-image-amd64", "linux-image-generic")
_IMAGE = re.compile(r"linux-image-([0-9][^ ]*-(?:amd64|generic))")
#: Ubuntu has the modules in packages of their own.
_MODULES = ("linux-modules-{}", "linux-modules-extra-{}")

#: The modules that are needed to see the root and to talk to the runner; the rest is loaded from
#: the root.
_EARLY = ("virtio_pci", "9pnet_virtio", "9p", "virtio_console")
_REQUIRED = ("rdma_rxe", "rdma_ucm", "ib_umad", "dummy", "veth", "sch_netem")
#: Most of the modules are for hardware that is not there.
_UNNEEDED = (
    *("drivers/gpu", "drivers/media", "drivers/net/wireless", "drivers/net/ethernet", "sound"),
    *("drivers/scsi", "drivers/usb", "drivers/staging", "drivers/iio", "drivers/infiniband/hw"),
)

_INIT = """\
#!/bin/busybox sh
b=/bin/busybox
$b mkdir -p /proc /sys /dev /root
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do $b insmod "$module" || echo "cannot load $module"; done
$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose root /root
port() {
    for name in /sys/class/virtio-ports/*/name; do
        if [ -e "$name" ] && [ "$($b cat "$name")" = "$1" ]; then
            name=${name%/name}
            echo "/dev/${name##*/}"
            return
        fi
    done
}
# The ports appear one after the other, some time after their driver.
tries=0
while [ -z "$(port out)" ] || [ -z "$(port err)" ] || [ -z "$(port control)" ]; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || { echo "the ports have not appeared"; $b poweroff -f; }
    $b sleep 0.1
done
set -- "$@" "$(port out)" "$(port err)" "$(port control)"
$b umount /sys
$b mount --move /dev /root/dev
$b umount /proc
exec $b switch_root /root "$@"
"""

_MODPROBE = """\
#!/bin/sh
# The kernel asks for modules through this: they are not where they would be on their own system.
PATH=/usr/sbin:/sbin:/usr/bin:/bin
exec modprobe -d "$(dirname "$0")" "$@"
"""


def image(*, verbose: bool = False) -> Path:
    """Return a folder with ``vmlinuz``, ``initramfs``, ``modprobe`` and ``lib/modules``.

    Raises:
        InfrastructureError: it cannot be made; the message says what to do.
        Interrupted: a signal came.
    """
    return cached() or cache.obtain(
        _KIND, _key(), _NEEDED_BYTES, lambda shop: _make(shop, verbose), what=_WHAT
    )


def cached() -> Path | None:
    """Return the folder of `image` if it has been made, or None.

    Raises:
        InfrastructureError: It is not to be trusted.
    """
    return cache.find(_KIND, _key())


def _key() -> str:
    return cache.digest(_RECIPE, _INIT, _MODPROBE)


def has_module(folder: Path, name: str) -> bool:
    """Return whether the kernel in `folder` has a module."""
    return any(folder.glob(f"lib/modules/*/kernel/**/{name}.ko*"))


def _make(shop: cache.Workshop, verbose: bool) -> str:
    tools.say(f"fetching {_WHAT}, once; the log is {shop.log}")
    release, names = _names(shop.log, verbose)
    version = ""
    tree = shop.result
    archives = packages.download(names, shop.scratch / "archives", shop.log, verbose=verbose)
    for name, archive in archives.items():
        version = packages.version_of(archive)
        unpacked = packages.unpack(archive, shop.scratch / name, shop.log, verbose=verbose)
        archive.unlink()
        for folder in (unpacked / "lib/modules", unpacked / "usr/lib/modules"):
            if folder.is_dir() and not folder.is_symlink():
                shutil.copytree(folder, tree / "lib/modules", dirs_exist_ok=True, symlinks=True)
        for kernel in unpacked.glob("boot/vmlinuz-*"):
            shutil.copyfile(kernel, tree / "vmlinuz")
    modules = tree / "lib/modules" / release
    for name in _UNNEEDED:
        shutil.rmtree(modules / "kernel" / name, ignore_errors=True)
    # A distribution that has moved everything below /usr looks there.
    (tree / "usr").mkdir()
    (tree / "usr/lib").symlink_to("../lib")
    tools.run(
        ["depmod", "-b", str(tree), release],
        title="listing the kernel's modules",
        log=shop.log,
        limit=_DEPMOD_SECONDS,
        verbose=verbose,
        environment={"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
    )
    _check(tree, modules, release)
    (tree / "modprobe").write_text(_MODPROBE)
    (tree / "modprobe").chmod(0o755)
    (tree / "initramfs").write_bytes(_initramfs(modules, shop.log))
    return version


def _names(log: Path, verbose: bool) -> tuple[str, list[str]]:
    """Return the release of the newest generic kernel and the packages that it is in."""
    for attempt in ("listed", "updated"):
        for meta in _META:
            depends = tools.query(["apt-cache", "depends", meta]).stdout
            found = _IMAGE.search(depends)
            if found and packages.candidate(found[0]):
                release = found[1]
                extra = [pattern.format(release) for pattern in _MODULES]
                return release, [found[0], *filter(packages.candidate, extra)]
        if attempt == "listed":
            packages.update(log, verbose=verbose)
    raise InfrastructureError(
        f"no generic kernel is available ({' or '.join(_META)}): check the sources of apt "
        "(/etc/apt/sources.list)"
    )


def _check(tree: Path, modules: Path, release: str) -> None:
    if not (tree / "vmlinuz").is_file():
        raise InfrastructureError(f"the package of kernel {release} has no vmlinuz")
    built_in = (modules / "modules.builtin").read_text()
    lost = [
        name
        for name in (*_EARLY, *_REQUIRED)
        if not has_module(tree, name) and f"/{name}.ko" not in built_in
    ]
    if lost:
        raise InfrastructureError(f"kernel {release} has no {', '.join(lost)}")


def _initramfs(modules: Path, log: Path) -> bytes:
    archive = bytearray()
    number = 0

    def add(name: str, mode: int, data: bytes = b"") -> None:
        nonlocal number
        number += 1
        encoded = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(encoded), 0)
        archive.extend(b"070701" + b"".join(b"%08X" % field for field in fields) + encoded)
        archive.extend(b"\0" * (-len(archive) % 4) + data)
        archive.extend(b"\0" * (-len(archive) % 4))

    busybox = next(
        (path for path in map(Path, ("/bin/busybox", "/usr/bin/busybox")) if path.is_file()), None
    )
    if busybox is None:
        raise InfrastructureError("the qemu engine needs busybox (package busybox-static)")
    for folder in ("bin", "modules"):
        add(folder, 0o040755)
    add("bin/busybox", 0o100755, busybox.read_bytes())
    add("init", 0o100755, _INIT.encode())
    for position, path in enumerate(_load_order(modules, _EARLY)):
        name = path.name.split(".")[0]
        add(f"modules/{position:02}-{name}.ko", 0o100644, _plain(path, log))
    add("TRAILER!!!", 0)
    return gzip.compress(bytes(archive), compresslevel=1)


def _load_order(modules: Path, wanted: Sequence[str]) -> list[Path]:
    """Return the files of `wanted` and of all they need, each after the files that it needs."""
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        file, _, others = line.partition(":")
        needs[_module_name(file)] = (file, others.split())
    order: list[str] = []
    for name in wanted:
        if name not in needs:
            # Built in.
            continue
        module, needed = needs[name]
        # modules.dep has the module that is loaded first at the end.
        for path in (*reversed(needed), module):
            if path not in order:
                order.append(path)
    return [modules / path for path in order]


def _module_name(file: str) -> str:
    return Path(file).name.split(".")[0].replace("-", "_")


def _plain(path: Path, log: Path) -> bytes:
    """Return a module's contents; the loader of the initramfs reads no compressed ones."""
    tool = {".xz": "xz", ".zst": "zstd", ".gz": "gzip"}.get(path.suffix)
    if tool is None:
        return path.read_bytes()
    if shutil.which(tool) is None:
        package = {"xz": "xz-utils", "gz": "gzip"}.get(tool, tool)
        raise InfrastructureError(f"{path.name} is unpacked by {tool}: install {package}")
    copy = log.parent / f".{_KIND}-{path.name}"
    try:
        shutil.copyfile(path, copy)
        tools.run(
            [tool, "-d", "-f", "-q", str(copy)], title=f"unpacking {path.name}", log=log, limit=60.0
        )
        return copy.with_suffix("").read_bytes()
    finally:
        copy.unlink(missing_ok=True)
        copy.with_suffix("").unlink(missing_ok=True)
