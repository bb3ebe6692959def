#!/usr/bin/env bash
# One curve: tiny, 200 steps, global batch 64 on one process, and on 2, 3 and 4 under ddp and fsdp2, on the CPU. Prints the
# worst difference of each pair and fails where one is over the bound: 1e-6 in 32-true, 1e-12 in 64-true.
#   scripts/same_curve.sh CORPUS [PRECISION] [STEPS] [FOLDER]
set -euo pipefail
corpus=$1 precision=${2:-32-true} steps=${3:-200} folder=${4:-$(mktemp -d)}
export OMP_NUM_THREADS=1
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

run() { # tag, then options of fit
    tag=$1
    shift
    "$python" -m lit_gpt_dist fit --tag "$tag" --trainer.default_root_dir "$folder/$tag" --data.corpus "$corpus" \
        --trainer.accelerator cpu --trainer.precision "$precision" --trainer.max_steps "$steps" --model.size tiny \
        --data.global_batch 64 --data.micro_batch 16 --export false --quiet true "$@"
}
run single
run ddp-2 --trainer.strategy ddp --trainer.devices 2
run ddp-4 --trainer.strategy ddp --trainer.devices 4
run fsdp2-2 --trainer.strategy fsdp2 --trainer.devices 2
run fsdp2-4 --trainer.strategy fsdp2 --trainer.devices 4
run fsdp2-2-recompute --trainer.strategy fsdp2 --trainer.devices 2 --model.recompute full
run single-48 --data.global_batch 48
run ddp-3 --data.global_batch 48 --trainer.strategy ddp --trainer.devices 3

"$python" - "$folder" "$precision" <<'P'
import json
import sys

folder, precision = sys.argv[1:]
bound = 1e-12 if precision == "64-true" else 1e-6


def losses(tag):
    return json.loads(open(f"{folder}/{tag}/results.jsonl").read().splitlines()[-1])["losses"]


pairs = [("single", tag) for tag in ("ddp-2", "ddp-4", "fsdp2-2", "fsdp2-4", "fsdp2-2-recompute")]
worst = 0.0
for one, other in [*pairs, ("single-48", "ddp-3")]:
    gaps = [abs(a - b) for a, b in zip(losses(one), losses(other), strict=True)]
    print(f"{precision}: {one} and {other}: {max(gaps):.1e} at most over {len(gaps)} steps")
    worst = max(worst, *gaps)
sys.exit(f"over the bound of {bound:.0e}" if worst > bound else 0)
P
