#!/usr/bin/env bash
# One loss curve on every fast path: eager first, then compiled and recorded; counts recompilations; `report` judges.
# usage: benchmarks/curves.sh CORPUS FOLDER [options of fit, as --model.size baby --trainer.max_steps 300]
set -euo pipefail
corpus=$1 folder=$2
shift 2
python=${PYTHON:-python3}
mkdir -p "$folder"
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    paths=("none false" "none true" "model false" "model true" "blocks false" "blocks true")
else
    paths=("none false" "model false" "blocks false")
fi
for path in "${paths[@]}"; do
    read -r compile graph <<< "$path"
    tag=compile-$compile-graph-$graph
    TORCH_LOGS=recompiles "$python" -m lit_gpt_dist fit --tag "$tag" --data.corpus "$corpus" --trainer.devices 1 \
        --trainer.default_root_dir "$folder" --trainer.limit_val_batches 0 --checkpoint.save_at_end false --export false \
        --sample_tokens 0 --model.compile "$compile" --model.cuda_graph "$graph" "$@" > "$folder/$tag.log" 2>&1 ||
        { tail -15 "$folder/$tag.log"; exit 1; }
    echo "$tag: $(grep -c 'Recompiling function' "$folder/$tag.log" || true) recompilations"
done
"$python" -m lit_gpt_dist report "$folder/results.jsonl" --reference compile-none-graph-false
