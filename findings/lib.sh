# Sourced by each script of this folder: unpacks packages of Debian 12 in a temporary folder, and runs
# a guest with their kernel.  Needs Debian or Ubuntu on x86-64, apt-get, dpkg-deb, a C compiler,
# qemu-system-x86_64 and the archive's keyring, but no privileges.  Leaves nothing behind, unless
# $FINDINGS_KEEP names a folder: what was unpacked is then kept there for the next run.
#
# A script calls, in this order:
#
#   packages NAME=VERSION ...   unpack these, and all that they depend on; $GUEST is what a guest needs
#   compile NAME                compile NAME.c of its here-document into the guest's /bin
#   guest SECONDS               run its here-document in the guest; what that prints is in $seen
#   wheels NAME==VERSION ...    instead of these: install packages of PyPI, with pip, in the folder
#   python                      run its here-document by Python with them; $seen as with a guest
#   expect TEXT REGEX           fail if no line of $seen matches
#   as_described                say so, and end with 0

set -eu
export LC_ALL=C

KERNEL=linux-image-6.1.0-56-amd64=6.1.192-2
RDMA=44.0-2
# What a guest, and a program in C, needs.
GUEST="$KERNEL busybox-static kmod iproute2 rdmacm-utils=$RDMA ibverbs-providers=$RDMA
    librdmacm-dev=$RDMA libibverbs-dev=$RDMA libc6-dev"
# The mirror of this machine's own apt.
MIRROR=${FINDINGS_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Component: main' |
    sed -n 's,/debian/*$,,p' | head -n 1)}

tmp=$(mktemp -d "${TMPDIR:-/tmp}/findings.XXXXXX")
root=$tmp/root
seen=$tmp/seen
trap 'rm -rf "$tmp"' EXIT
trap 'exit 2' HUP INT TERM

# This machine cannot run it.
unable() {
    echo "$(basename "$0"): not run: $*" >&2
    exit 2
}

needs() {
    for program; do
        command -v "$program" >/dev/null || unable "$program is missing"
    done
}

# The parts of a kernel that a guest needs.
modules="./boot/vmlinuz* */modules.* */kernel/drivers/infiniband/* */kernel/drivers/virtio/*
    */kernel/drivers/net/dummy.ko */kernel/drivers/net/veth.ko */kernel/fs/9p/* */kernel/fs/netfs/*
    */kernel/fs/fscache/* */kernel/fs/configfs/* */kernel/net/* */kernel/lib/* */kernel/crypto/* */kernel/arch/x86/crypto/*"

packages() {
    echo "packages:" "$@" | tr '\n' ' ' | tr -s ' '
    echo
    same=${FINDINGS_KEEP:-$tmp}/root-$(echo "$@" | cksum | cut -d ' ' -f 1)
    if [ -d "$same" ]; then
        cp -a "$same" "$root"
        return
    fi
    needs apt-get dpkg-deb
    [ -n "$MIRROR" ] || unable "apt knows no archive of Debian (apt-get update): set FINDINGS_MIRROR"
    [ "$(dpkg --print-architecture)" = amd64 ] || unable "it needs x86-64"
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -e $keys ] || unable "$keys is missing: install debian-archive-keyring"
    mkdir -p "$tmp/apt/lists/partial" "$tmp/apt/archives/partial" "$root"
    # Nothing is installed there, so everything that is needed is fetched.
    : >"$tmp/apt/status"
    cat >"$tmp/apt/sources.list" <<END
deb [signed-by=$keys] $MIRROR/debian bookworm main
deb [signed-by=$keys] $MIRROR/debian bookworm-updates main
deb [signed-by=$keys] $MIRROR/debian-security bookworm-security main
END
    fetch="apt-get -qq -o Dir::State=$tmp/apt -o Dir::State::status=$tmp/apt/status
        -o Dir::State::lists=$tmp/apt/lists -o Dir::Cache=$tmp/apt -o Dir::Etc::sourceparts=-
        -o Dir::Etc::sourcelist=$tmp/apt/sources.list -o Dir::Etc::preferencesparts=-
        -o APT::Install-Recommends=false -o Acquire::Languages=none -o APT::Sandbox::User=
        -o Acquire::Retries=3"
    $fetch update >"$tmp/log" 2>&1 || unable "apt-get update: $(tail -n 1 "$tmp/log")"
    $fetch --download-only --yes install "$@" >"$tmp/log" 2>&1 ||
        unable "apt-get install $*: $(tail -n 1 "$tmp/log")"
    for package in "$tmp"/apt/archives/*.deb; do
        only=
        case $(basename "$package") in
            # These are not used: they come with the scripts that install others.
            adduser_* | debconf_* | dpkg_* | gpgv_* | initramfs-* | klibc-* | linux-base_* | passwd_* | \
                perl* | libperl* | systemd* | udev_* | usrmerge_*) continue ;;
            linux-image-*) only=$modules ;;
        esac
        # shellcheck disable=SC2086
        dpkg-deb --fsys-tarfile "$package" |
            tar -x -C "$root" --no-same-owner --no-same-permissions --wildcards $only ||
            unable "$package cannot be unpacked"
    done
    rm -rf "$tmp/apt" "$root/usr/share/doc" "$root/usr/share/locale" "$root/usr/share/man"
    [ -z "${FINDINGS_KEEP:-}" ] || { cp -a "$root" "$same.$$" && mv "$same.$$" "$same"; }
}

wheels() {
    echo "wheels:" "$@"
    needs python3
    python3 -m venv "$tmp/venv" >"$tmp/log" 2>&1 || unable "python3 -m venv: $(tail -n 1 "$tmp/log")"
    "$tmp/venv/bin/python" -m pip install -q --disable-pip-version-check "$@" >"$tmp/log" 2>&1 ||
        unable "pip install $*: $(tail -n 1 "$tmp/log")"
}

python() {
    cat >"$tmp/program.py"
    timeout 120 "$tmp/venv/bin/python" "$tmp/program.py" >"$seen" 2>"$tmp/log" ||
        unable "the program ended with $?: $(tail -n 1 "$tmp/log")"
    show
}

compile() {
    needs gcc
    cat >"$tmp/$1.c"
    mkdir -p "$root/bin"
    gcc --sysroot="$root" -O2 -Wall -I"$(dirname "$0")" -o "$root/bin/$1" "$tmp/$1.c" \
        -lrdmacm -libverbs -lpthread || unable "gcc does not compile $1.c"
}

# In the guest: Soft-RoCE rxe0 on dummy0, which has the address 10.80.0.1; $PATH has all programs.
guest() {
    needs qemu-system-x86_64 gzip
    release=$(ls "$root/lib/modules")
    mkdir -p "$root/proc" "$root/sys" "$root/dev" "$root/tmp" "$root/run" "$root/etc" "$tmp/first/bin"
    [ -e "$root/bin/sh" ] || ln -s busybox "$root/bin/sh"
    "$root/lib64/ld-linux-x86-64.so.2" --argv0 depmod \
        --library-path "$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu" \
        "$root/bin/kmod" -b "$root" "$release" 2>"$tmp/log" || unable "depmod: $(cat "$tmp/log")"
    cat >"$root/etc/passwd" <<'END'
root:x:0:0:root:/:/bin/sh
nobody:x:65534:65534:nobody:/:/bin/sh
END
    echo "127.0.0.1 localhost" >"$root/etc/hosts"
    mkdir -p "$root/etc/libibverbs.d"
    cat >"$root/script"
    cat >"$root/start" <<'END'
export PATH=/bin:/usr/bin:/sbin:/usr/sbin LD_LIBRARY_PATH=/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu
busybox mount -t proc proc /proc
busybox --install -s /run
export PATH=$PATH:/run
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm
ip link set lo up
modprobe dummy && modprobe rdma_rxe && modprobe rdma_ucm && modprobe ib_uverbs
ip link add dummy0 type dummy 2>/dev/null
ip link set dummy0 up
ip address add 10.80.0.1/24 dev dummy0
rdma link add rxe0 type rxe netdev dummy0
ulimit -l unlimited
cd /tmp
sh -u /script >/seen 2>&1
echo $? >/status
sync
poweroff -f
END
    # The initial file system has what mounts the root.
    mkdir -p "$tmp/first/lib/modules/$release"
    cp "$root/bin/busybox" "$tmp/first/bin/"
    (cd "$root/lib/modules/$release" && cp modules.* "$tmp/first/lib/modules/$release/" &&
        cp --parents -r kernel/drivers/virtio kernel/fs/9p kernel/net/9p kernel/fs/netfs \
            kernel/fs/fscache "$tmp/first/lib/modules/$release/" 2>/dev/null || true)
    cat >"$tmp/first/init" <<'END'
#!/bin/busybox sh
export PATH=/bin
/bin/busybox mkdir -p /proc /root
/bin/busybox mount -t proc proc /proc
for module in virtio_pci 9p 9pnet_virtio; do /bin/busybox modprobe $module; done
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,cache=loose,msize=262144 root /root
exec /bin/busybox switch_root /root /bin/busybox sh /start
END
    chmod +x "$tmp/first/init"
    (cd "$tmp/first" && find . | "$root/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$tmp/initramfs"
    rm -f "$root/status"
    timeout "$1" qemu-system-x86_64 -machine q35,accel=tcg -cpu max,la57=off -smp 1 -m 1G \
        -nodefaults -no-user-config -no-reboot -display none \
        -kernel "$root/boot/vmlinuz-$release" -initrd "$tmp/initramfs" \
        -append "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on no_timer_check" \
        -serial "file:$tmp/console" \
        -fsdev "local,id=root,path=$root,security_model=none,multidevs=remap" \
        -device virtio-9p-pci,fsdev=root,mount_tag=root </dev/null 2>"$tmp/log" || true
    [ -e "$root/status" ] ||
        unable "the guest did not end: $(tail -n 5 "$tmp/log" "$tmp/console" 2>/dev/null)"
    cp "$root/seen" "$seen"
    show
    [ "$(cat "$root/status")" = 0 ] || unable "the program in the guest ended with $(cat "$root/status")"
}

show() {
    sed 's/^/    /' "$seen"
}

# expect WHAT REGEX: a line of what was seen must match.
expect() {
    if grep -Eq -- "$2" "$seen"; then
        echo "as described: $1"
    else
        echo "CHANGED: $1" >&2
        exit 1
    fi
}

as_described() {
    echo "$(basename "$0"): as described"
    exit 0
}
