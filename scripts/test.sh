#!/usr/bin/env bash
# Installs into .venv where that is still to be done, then checks everything: scripts/test.sh [options of pytest].
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh" dev
cd "$root"
bin=$root/.venv/bin
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # many small processes: threads of each would only get in the others' way
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy"
exec "$bin/python" -m pytest "$@"
