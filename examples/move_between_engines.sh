#!/usr/bin/env bash
# Moves one training between engines, strategies and numbers of ranks, and compares its losses with those of a run that never moved.
#
#     bash examples/move_between_engines.sh                                   # all on this machine; results in move-out/
#     bash examples/move_between_engines.sh elsewhere --set precision=bf16    # what follows the folder goes to every run
set -euo pipefail

out=${1:-move-out}
shift || true
here=$(dirname "$0")
if [ -e "$out" ]; then
    echo "$out already exists, and its checkpoints would be resumed; remove it, or choose another folder" >&2
    exit 1
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

moved=("$here/move_between_engines.py" --set checkpoint.dir="$out/checkpoints" --set checkpoint.on_existing=resume \
    --out "$out/moved.jsonl" --steps 30 "$@")
torchrun --standalone --nproc-per-node 2 "${moved[@]}"
torchrun --standalone --nproc-per-node 4 "${moved[@]}" --set backend=deepspeed --set training.gradient_accumulation_steps=1
torchrun --standalone --nproc-per-node 1 "${moved[@]}" --set backend=deepspeed --set sharding.strategy=zero1 \
    --set training.gradient_accumulation_steps=4 --export "$out/model"

stayed=("$here/move_between_engines.py" --set checkpoint.dir="$out/stayed" --out "$out/stayed.jsonl" --steps 90 "$@")
torchrun --standalone --nproc-per-node 2 "${stayed[@]}"

python "$here/draw_move.py" "$out/stayed.jsonl" "$out/moved.jsonl" "$out/resuming.png"
