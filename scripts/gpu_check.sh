#!/usr/bin/env bash
# On a machine with two GPUs: baby learns, one curve on 1 and 2 cards in bf16 (every difference should be 0), and big with and without recomputation.
# usage: scripts/gpu_check.sh CORPUS OUTPUT_FOLDER
set -u
corpus=$1 out=$2
mkdir -p "$out"
fit() {
    tag=$1
    shift
    echo "== $tag: $*"
    ${PYTHON:-python3} -m lit_gpt_dist fit --tag "$tag" --data.corpus "$corpus" --trainer.default_root_dir "$out/$tag" "$@" \
        > "$out/$tag.log" 2>&1 || { echo "failed: $tag"; tail -15 "$out/$tag.log"; exit 1; }
    tail -30 "$out/$tag.log" | grep -E "^(loss|validation|speed|memory)"
}
small="--model.size baby --data.global_batch 64 --export false"
fit baby-3000 --model.size baby --data.global_batch 64 --data.micro_batch 64 --trainer.devices 1 --trainer.max_steps 3000 \
    --model.dropout 0.2 --sample_tokens 400
sed -n '/a sample/,/────$/p' "$out/baby-3000.log"
curve="$small --data.micro_batch 32 --trainer.max_steps 300"
for rate in 1e-4 3e-4; do
    fit "single-$rate" $curve --optim.lr $rate --trainer.devices 1
    fit "ddp2-$rate" $curve --optim.lr $rate --trainer.devices 2 --trainer.strategy ddp
    for units in blocks model; do
        fit "fsdp2-$units-$rate" $curve --optim.lr $rate --trainer.devices 2 --trainer.strategy fsdp2 \
            --trainer.strategy.units $units
    done
done
big="--model.size big --data.global_batch 64 --data.micro_batch 4 --trainer.devices 2 --trainer.strategy fsdp2 --trainer.strategy.units blocks --export false"
fit big-fsdp2 $big --trainer.max_steps 20 --trainer.val_check_interval 100 --checkpoint.save_at_end false
fit big-fsdp2-recompute $big --trainer.max_steps 20 --trainer.val_check_interval 100 --checkpoint.save_at_end false --model.recompute full
${PYTHON:-python3} - "$out" <<'P'
import json, sys
def line(tag):
    return json.loads(open(f"{sys.argv[1]}/{tag}/results.jsonl").read().splitlines()[-1])
kinds = ("single", "ddp2", "fsdp2-blocks", "fsdp2-model")
groups = [[f"{kind}-{rate}" for kind in kinds] for rate in ("1e-4", "3e-4")]
for single, *others in groups:
    reference = line(single)["losses"]
    for tag in others:
        gaps = [abs(a - b) for a, b in zip(reference, line(tag)["losses"], strict=True)]
        first = ", ".join(f"first {n}: {max(gaps[:n]):.2e}" for n in (20, 100))
        print(f"{tag}: largest difference to one card over {len(gaps)} steps {max(gaps):.2e} ({first})")
for tag in ("baby-3000", *groups[1], "big-fsdp2", "big-fsdp2-recompute"):
    try:
        r = line(tag)
        print(tag, *(f"{k}={r[k]:.4g}" for k in ("tok_s", "step_ms", "mem_gib", "mfu", "mfu_half_attention", "val_loss") if r[k]))
    except OSError as error:
        print(tag, error)
P
