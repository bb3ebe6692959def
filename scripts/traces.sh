#!/usr/bin/env bash
# On two GPUs: how much communication hides behind backward, by DDP's bucket size, under fsdp2, and where nothing can hide.
# usage: scripts/traces.sh CORPUS FOLDER [options of fit]; PYTHON: the interpreter
set -euo pipefail
corpus=$1 folder=$2
shift 2
python=${PYTHON:-python3}
mkdir -p "$folder"
traced() {
    tag=$1
    shift
    "$python" -m lit_gpt_dist fit --tag "$tag" --data.corpus "$corpus" --trainer.default_root_dir "$folder" --profile 3 \
        --trainer.devices 2 --trainer.limit_val_batches 0 --checkpoint.save_at_end false --export false --sample_tokens 0 \
        --model.cuda_graph false "$@" > "$folder/$tag.log" 2>&1 || { tail -15 "$folder/$tag.log"; exit 1; }
    echo "== $tag"
    "$python" -m lit_gpt_dist trace "$folder/$tag"
}
# so many windows that the step takes longer than the host needs to launch it: else one rank waits for the other's host
options=(--model.size gpt2 --trainer.max_steps 30 --data.micro_batch 128 --data.global_batch 256 "$@")
for megabytes in 5 25 100; do
    traced "ddp-$megabytes" "${options[@]}" --trainer.strategy ddp --trainer.strategy.bucket_cap_mb "$megabytes"
done
for units in blocks model; do
    traced "fsdp2-$units" "${options[@]}" --trainer.strategy fsdp2 --trainer.strategy.units "$units"
done
traced ddp-no-overlap "${options[@]}" --trainer.strategy ddp --trainer.strategy.overlap false
