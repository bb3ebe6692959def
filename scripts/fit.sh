#!/usr/bin/env bash
# Installs into .venv where that is still to be done, then trains: scripts/fit.sh [options of `lit-gpt-dist fit`].
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh"
exec "$root/.venv/bin/lit-gpt-dist" fit "$@"
