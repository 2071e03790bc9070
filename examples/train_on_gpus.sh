#!/usr/bin/env bash
# From a model and a data folder to a policy trained by PPO: SFT, a reward model, PPO, each by one command.
#
#     examples/train_on_gpus.sh MODEL DATA OUT
#
# MODEL: folder or hub name of a base or chat model. DATA: folder or hub name with the splits sft, preference, unlabeled
# and eval. OUT: a folder, which all machines share; called again, each stage goes on where it was. What to run it on:
#
#     GPUS=1                                 one GPU: LoRA (the default)
#     GPUS=2, GPUS=4, GPUS=8                 of one machine: LoRA, each GPU with its share of the responses
#     GPUS=8 PRESET=llama_7b_full            all weights, sharded over the GPUs
#     GPUS=8 NODES=2 NODE=0 HEAD=host        the first of two machines, by whose name HEAD the other finds it
#     GPUS=8 NODES=2 NODE=1 HEAD=host        the second one
#     PRESET=small_chat                      a model of up to 3 B parameters on 24 GB
#     DRY_RUN=1                              memory and hours of each stage; PPO's once there is a reward model
#
# More options for all stages go after OUT, such as --template alpaca of a base model; STEPS is PPO's number of steps.
set -euo pipefail

model=${1:?"MODEL DATA OUT"} data=${2:?"MODEL DATA OUT"} out=${3:?"MODEL DATA OUT"}
shift 3
launch=(torchrun --nproc_per_node "${GPUS:-1}")
if [ "${NODES:-1}" -gt 1 ]; then
    launch+=(--nnodes "$NODES" --node_rank "$NODE" --master_addr "$HEAD" --master_port "${PORT:-29500}")
else
    launch+=(--standalone)
fi

stage() {
    "${launch[@]}" -m alpacafarm_env.benchmarks.train "$@" \
        --dataset "$data" --preset "${PRESET:-llama_7b_lora}" ${DRY_RUN:+--dry-run}
}

sft="$out/sft/runs/sft-seed-0/policy" reward="$out/reward/reward_model"
if [ -n "${DRY_RUN:-}" ]; then
    sft=$model # of the same shape
fi
stage sft --policy "$model" --out "$out/sft" "$@"
stage reward_modeling --policy "$sft" --out "$out/reward" --save adapter "$@" # PPO reads it on its own base
if [ -n "${DRY_RUN:-}" ] && [ ! -d "$reward" ]; then
    echo "PPO's dry run needs the reward model: run the second stage first." && exit
fi
stage ppo --policy "$sft" --reward-model "$reward" --out "$out/ppo" --steps "${STEPS:-80}" "$@"
