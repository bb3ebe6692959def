#!/usr/bin/env bash
# Makes or reuses .venv beside pyproject.toml and installs this project into it, with the versions of constraints.txt.
# Does nothing where the last installation was of the same pyproject.toml and constraints.txt.
#
#   scripts/setup.sh          what training needs
#   scripts/setup.sh dev      and what the tests need
#
# PYTHON names the interpreter that .venv is made from; by default the first of python3, python3.13, ... that is new enough.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1:-}
venv=$root/.venv

fail() {
    echo "error: $*" >&2
    exit 2
}

new_enough() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of 3.11 or newer; name one that is, or leave PYTHON unset"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "found $(python3 --version 2>&1 || true), but Python 3.11 or newer is needed; install one, or name it: PYTHON=/path/to/python3.12 $0"
}

# Whether the last installation, with the extra wanted now or with more, was of these very files.
is_current() {
    new_enough "$venv/bin/python" || return 1
    [ -x "$venv/bin/lit-gpt-dist" ] || return 1
    [ "$(cat "$venv/installed-dev" 2>/dev/null)" = "$want" ] && return 0
    [ -z "$extra" ] && [ "$(cat "$venv/installed" 2>/dev/null)" = "$want" ]
}

want="$root $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
if is_current; then
    exit 0
fi

if ! new_enough "$venv/bin/python"; then
    python=$(find_python)
    echo "making $venv with $("$python" --version)" >&2
    "$python" -m venv --clear "$venv" || fail "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
fi
rm -f "$venv/installed" "$venv/installed-dev" # half an installation must not look like a whole one
echo "installing lit_gpt_dist${extra:+ with $extra} and the packages of constraints.txt (once; torch is large)" >&2
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root${extra:+[$extra]}" >&2 ||
    fail "pip could not install; its message stands above. Without a network, point PIP_FIND_LINKS at a folder of wheels"
echo "$want" >"$venv/installed${extra:+-$extra}"
