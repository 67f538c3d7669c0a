# The Python that .venv is made of, .venv itself, and what is installed in it.
# Sourced by tools/setup, after packages.sh.
# shellcheck shell=bash

VENV=$ROOT/.venv
PY=$VENV/bin/python
STAMPS=$VENV/.aiordma

_is_suitable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints the path of a Python >= 3.11: PYTHON from the user, python3, or any python3.N.
_find_python() {
    local name
    if [[ -n ${PYTHON:-} ]]; then
        _is_suitable "$PYTHON" || die "PYTHON=$PYTHON does not run, or is older than 3.11."
        command -v "$PYTHON"
        return
    fi
    for name in python3 $(compgen -c python3. | grep -E '^python3\.[0-9]+$' | sort -uVr); do
        # The program itself, not a wrapper that picks one by the working directory.
        _is_suitable "$name" && "$name" -c 'import sys; print(sys.executable)' && return
    done
    return 1
}

# True if .venv runs, stands where it was made, and is of the Python that the user may have named.
_venv_is_usable() {
    stamp_is root "$ROOT" && "$PY" -c '' 2>/dev/null || return 1
    [[ -z ${PYTHON:-} ]] || [[ $(_home "$PYTHON") == "$(_home "$PY")" ]]
}

_home() {
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)'
}

# Sets BASE_PYTHON, and PYTHON_PACKAGES to what has to be installed with it (as +NAME words).
python_choose() {
    PYTHON_PACKAGES=()
    local name
    _venv_is_usable && return
    if ! BASE_PYTHON=$(_find_python); then
        [[ -z ${PYTHON:-} ]] || exit 1
        # Older releases offer a newer Python beside their own.
        for name in $(apt-cache search --names-only '^python3\.[0-9]+$' 2>/dev/null |
            cut -d' ' -f1 | sort -Vr) python3; do
            [[ $name == python3 || ${name#python3.} -ge 11 ]] || continue
            packages_ensure "+$name" "+$name-venv" "+$name-dev"
            break
        done
        BASE_PYTHON=$(_find_python) ||
            die "no Python >= 3.11 here. Install one, then: make PYTHON=/path/to/python3 ..."
    fi
    local include
    include=$("$BASE_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    name=$("$BASE_PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    local -a lacking=()
    "$BASE_PYTHON" -c 'import venv, ensurepip' 2>/dev/null || lacking+=("$name-venv")
    [[ -f $include/Python.h ]] || lacking+=("$name-dev")
    ((${#lacking[@]})) || return 0
    [[ $BASE_PYTHON == /usr/bin/* ]] ||
        die "$BASE_PYTHON cannot build extensions: ${lacking[*]} is missing." \
            "Choose another one: make PYTHON=/path/to/python3 ..."
    PYTHON_PACKAGES=("${lacking[@]/#/+}")
}

# stamp_is NAME KEY: true if step NAME was last done for exactly KEY. Keys are made of file
# contents, since a fresh clone gives every file a new time.
stamp_is() {
    [[ -f $STAMPS/$1 && $(<"$STAMPS/$1") == "$2" ]]
}

stamp_set() {
    echo "$2" >"$STAMPS/$1"
}

# Scripts and the editable install hold absolute paths: a moved or copied tree starts anew.
venv_ensure() {
    _venv_is_usable && return
    say "making .venv with $BASE_PYTHON ($("$BASE_PYTHON" -V 2>&1))"
    rm -rf "$VENV"
    "$BASE_PYTHON" -m venv "$VENV" || die "could not make $VENV with $BASE_PYTHON."
    mkdir -p "$STAMPS"
    stamp_set root "$ROOT"
}

# CPython's own tests of asyncio, which tests/conformance runs over RDMA. They come with Python
# itself, but Debian and Ubuntu put them into a package of their own.
cpython_tests_ensure() {
    local name
    "$PY" -c 'import test.test_asyncio' 2>/dev/null && return
    name=$("$PY" -c 'import sys; print("libpython%d.%d-testsuite" % sys.version_info[:2])')
    packages_ensure "+$name"
    "$PY" -c 'import test.test_asyncio' 2>/dev/null ||
        die "$PY has no tests of CPython (test.test_asyncio), although $name is installed."
}

# pip_install LOG ARGUMENT...
pip_install() {
    local log=$1
    shift
    timeout 900 "$PY" -m pip install -q --disable-pip-version-check --no-input "$@" \
        >"$log" 2>&1 || die_with_log "pip install failed: $*" "$log"
}

# deps_ensure GROUP...: install the requirements of these extras ("build": of the build itself).
deps_ensure() {
    local stamp="deps-$*" key
    stamp=${stamp// /-}
    key=$(sha256sum <"$ROOT/pyproject.toml")
    stamp_is "$stamp" "$key" && return
    say "installing Python packages: $*"
    "$PY" "$ROOT/tools/requirements.py" "$@" >"$LOGS/$stamp.txt" || die "pyproject.toml is not readable."
    pip_install "$LOGS/$stamp.log" -r "$LOGS/$stamp.txt"
    stamp_set "$stamp" "$key"
}

# The extension and the editable installs, of aiordma and of aiordma-softroce: again whenever what
# goes into them has changed.
build_ensure() {
    local key
    # `pip install .` leaves it in the checkout, where its old entry points hide those of .venv.
    rm -rf "$ROOT"/*.egg-info "$ROOT"/softroce/src/*.egg-info
    key=$(cd "$ROOT" && cat pyproject.toml softroce/pyproject.toml setup.py build_ffi.py aiordma/_{core,ffi}/*.h \
        aiordma/testing/fabric/lib/*.{c,h,map} aiordma/testing/faults/*.c \
        $(compgen -G 'aiordma/_*/*.c' | grep -v '/_rdma') \
        /usr/include/infiniband/verbs.h /usr/include/rdma/rdma_cma.h | sha256sum) ||
        die "files of the build are missing: is this a whole copy of the repository?"
    stamp_is build "$key" && compgen -G "$ROOT/aiordma/_ffi/_rdma*.so" >/dev/null &&
        compgen -G "$ROOT/aiordma/_core/_compiled*.so" >/dev/null &&
        [[ -f $ROOT/aiordma/testing/fabric/_fabric.so ]] &&
        [[ -f $ROOT/aiordma/testing/faults/_shim.so ]] && return
    say "building the extension"
    rm -rf "$ROOT"/build/lib* "$ROOT"/build/temp* "$ROOT"/aiordma/{_core,_ffi,testing/fabric,testing/faults}/_*.so
    pip_install "$LOGS/build.log" --no-build-isolation --no-deps -e "$ROOT" -e "$ROOT/softroce"
    stamp_set build "$key"
}
