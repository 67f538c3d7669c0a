# Run a command in a system of tools/systems.py:
#
#   unshare --mount sh tools/enter.sh ROOT COPY HOME REPORTS KERNELS [NAME=VALUE...] COMMAND...
#
# ROOT is the folder of the system. COPY is found in it as HOME, which is the place of the
# repository outside; REPORTS and KERNELS are found in their own places. What is mounted here ends
# with the namespace.
set -e
root=$1 copy=$2 home=$3 reports=$4 kernels=$5
shift 5

at() {
    [ -e "$1" ] || return 0
    if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "${2%/*}" && : >>"$2"; fi
    mount --rbind "$1" "$2"
}

# The machine's own settings of the network are the system's, too.
for path in /dev /proc /sys /tmp /etc/resolv.conf /etc/hosts /etc/ssl/certs /etc/pip.conf; do
    at "$path" "$root$path"
done
mkdir -p "$kernels"
at "$kernels" "$root$kernels"
at "$copy" "$root$home"
at "$reports" "$root$home/build/test"
exec chroot "$root" env --chdir="$home" "$@"
