# System packages: what is missing, what it is called here, and how to get it.
# Sourced by tools/setup, after say() and die() are defined.
# shellcheck shell=bash

# group | how to see that it is there | package
# cmd:NAME  a program;  file:GLOB  a file (a shell pattern);  pkg:  the package itself, where
# aiordma_softroce asks for it by that name. The kernel's source it downloads on its own.
PACKAGE_TABLE='
build  | cmd:gcc                                            | gcc
build  | file:/usr/include/stdio.h                          | libc6-dev
build  | file:/usr/include/infiniband/verbs.h               | libibverbs-dev
build  | file:/usr/include/rdma/rdma_cma.h                  | librdmacm-dev
device | pkg:                                               | iproute2
device | pkg:                                               | rdma-core
device | pkg:                                               | ibverbs-providers
uml    | pkg:                                               | gcc
uml    | pkg:                                               | libc6-dev
uml    | pkg:                                               | make
uml    | pkg:                                               | flex
uml    | pkg:                                               | bison
uml    | pkg:                                               | bc
uml    | pkg:                                               | xz-utils
uml    | pkg:                                               | bzip2
lint   | cmd:git                                            | git
peers  | cmd:rping                                          | rdmacm-utils
peers  | cmd:rstream                                        | rdmacm-utils
peers  | file:/usr/lib/python3/dist-packages/pyverbs/cmid.* | python3-pyverbs
peers  | file:/usr/share/doc/rdma-core/tests/run_tests.py   | python3-pyverbs
peers  | cmd:ibv_devinfo                                    | ibverbs-utils
perf   | cmd:ib_send_lat                                    | perftest
peers  | cmd:readelf                                        | binutils
peers  | cmd:openssl                                        | openssl
peers  | cmd:socat                                          | socat
projects | cmd:ctest                                        | cmake
peers  | cmd:curl                                           | curl
peers  | cmd:strace                                         | strace
debug  | cmd:python3-dbg                                    | python3-dbg
qemu   | cmd:qemu-system-x86_64                             | qemu-system-x86
qemu   | cmd:modprobe                                       | kmod
qemu   | cmd:busybox                                        | busybox-static
systems | cmd:debootstrap                                   | debootstrap
systems | cmd:unshare                                       | util-linux
systems | file:/usr/share/keyrings/debian-archive-keyring.gpg | debian-archive-keyring
release | cmd:readelf                                        | binutils
qemu   | cmd:zstd                                           | zstd
qemu   | pkg:                                               | make
qemu   | pkg:                                               | xz-utils
'

# A user's PATH may lack the folders of rdma, tc and modprobe.
PATH="$PATH:/usr/sbin:/sbin"

# _is_there CHECK PACKAGE
_is_there() {
    case $1 in
        cmd:*) command -v "${1#cmd:}" >/dev/null ;;
        file:*) compgen -G "${1#file:}" >/dev/null ;;
        pkg:) ! command -v dpkg-query >/dev/null ||
            [[ $(dpkg-query -W -f '${db:Status-Status}' "$2" 2>/dev/null) == installed* ]] ;;
    esac
}

# True if apt knows a version of $1 that can be installed.
_has_candidate() {
    # Not through grep -q: it would end apt-cache by a broken pipe, which counts as a failure here.
    [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) == *'Candidate: '[!\(]* ]]
}

# How to run apt-get: empty as root, sudo if there is one; fails if there is neither.
_as_root() {
    if [[ $(id -u) == 0 ]]; then
        echo env
    elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [[ -t 0 ]]; }; then
        echo "sudo env"
    else
        return 1
    fi
}

# Sets APT to the words that run apt-get here; fails if this user may not.
_apt_choose() {
    local root
    root=$(_as_root) || return 1
    # shellcheck disable=SC2206  # "sudo env" is two words
    APT=($root DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a timeout 1500
        apt-get -q -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
}

_apt_update() {
    say "updating the package lists"
    "${APT[@]}" update >>"$LOGS/apt.log" 2>&1 || die_with_log "apt-get update failed" "$LOGS/apt.log"
}

# packages_ensure GROUP... [+PACKAGE...]: install what is missing; +PACKAGE is wanted in any case.
packages_ensure() {
    local -a missing=()
    local word group check package updated=no
    for word in "$@"; do
        [[ $word == +* ]] && missing+=("${word#+}")
    done
    while IFS='|' read -r group check package; do
        group=${group// /} check=${check// /} package=${package// /}
        [[ -n $group && " $* " == *" $group "* ]] || continue
        _is_there "$check" "$package" || missing+=("$package")
    done <<<"$PACKAGE_TABLE"
    ((${#missing[@]})) || return 0
    mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
    command -v apt-get >/dev/null || die "these things are missing: ${missing[*]} (Debian's names)." \
        "This machine has no apt-get: install them under the names they have here, then try again."
    _apt_choose || die "system packages are missing, and this is neither root nor a user with sudo." \
        "Run as root, then try again:" "    apt-get update && apt-get install -y ${missing[*]}"
    : >"$LOGS/apt.log"
    for package in "${missing[@]}"; do
        # Package lists are absent on fresh container images.
        _has_candidate "$package" || { _apt_update && updated=yes && break; }
    done
    say "installing system packages: ${missing[*]}"
    local -a install=("${APT[@]}" install -y --no-install-recommends "${missing[@]}")
    "${install[@]}" >>"$LOGS/apt.log" 2>&1 && return
    # Old lists name versions that the mirror no longer has.
    [[ $updated == no ]] && say "that failed; once more with fresh package lists" && _apt_update &&
        "${install[@]}" >>"$LOGS/apt.log" 2>&1 && return
    die_with_log "apt-get could not install: ${missing[*]}" "$LOGS/apt.log"
}

# The engines of softroce look kernels up in apt's lists and can download them without root, but
# only root can fetch the lists.
package_lists_ensure() {
    command -v apt-cache >/dev/null || return 0
    [[ -z $(apt-cache pkgnames linux-source- 2>/dev/null) ]] || return 0
    _apt_choose || die "apt has no package lists, and this is neither root nor a user with sudo." \
        "Run as root, then try again:" "    apt-get update"
    _apt_update
}
