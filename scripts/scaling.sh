#!/usr/bin/env bash
# The scaling table of this machine's cards in one call of under ten minutes: all-reduce bandwidth at 2, 4, 8 ranks, then
# weak scaling of three models under every strategy with accumulate 4 and 1, then strong scaling, then the report.
# Rounds for which there is no time are left out; the same call goes on where it stopped.
#
#   scripts/scaling.sh [FOLDER] [SECONDS] [MARKDOWN]     e.g. scripts/scaling.sh logs/scaling 540 docs/scaling.md
set -euo pipefail
cd "$(dirname "$0")/.."

root=${1:-logs/scaling}
seconds=${2:-540}
markdown=${3:-}
began=$SECONDS
python=${PYTHON:-python}
tool=("$python" -m lit_gpt_dist)
left() { echo $((seconds - (SECONDS - began) - 20)); } # the report takes some seconds at the end

cards=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$cards" -eq 0 ]; then
    echo "error: this machine has no usable GPU; configs/bench/cpu.yaml is the table for CPU processes" >&2
    exit 2
fi
counts=()
for count in 8 4 2; do
    if [ "$count" -le "$cards" ]; then counts+=("$count"); fi
done
mkdir -p "$root"

# what the links carry; the planner's column of the report is computed from it
rates=()
for count in "${counts[@]}"; do
    if [ -e "$root/all-reduce-$count.json" ]; then continue; fi
    "${tool[@]}" doctor --measure --ranks "$count" "${rates[@]}" \
        --calibration "$root/calibration.json" --output "$root/all-reduce-$count.json" || true
    rates=(--only_collectives)
done

measure() { # options of bench; a failed case is in the report and does not end the script
    if [ "$(left)" -gt 0 ]; then
        "${tool[@]}" bench --precision bf16-mixed --steps 24 --rounds 1 --timeout 150 --root "$root" --time_limit "$(left)" "$@" || true
    fi
}

many=$(IFS=,; echo "${counts[*]:-1}")
for accumulate in 4 1; do
    measure --sizes gpt2-124m,big,baby --strategies single --devices 1 --accumulate "$accumulate"
    measure --sizes gpt2-124m,big,baby --strategies ddp,fsdp2,hsdp --devices "$many" --accumulate "$accumulate"
done
# the global batch of the largest weak case, on fewer cards
measure --sizes gpt2-124m --strategies single,ddp,fsdp2 --devices "1,$many" --scaling strong --global_batch 512

options=(--title "Scaling on $cards cards")
if [ -e "$root/calibration.json" ]; then options+=(--calibration "$root/calibration.json"); fi
if [ -n "$markdown" ]; then options+=(--markdown "$markdown"); fi
"${tool[@]}" report "$root/results.jsonl" --out "$root/report" "${options[@]}"
