#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2-4
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
#SBATCH --partition=gpu
#SBATCH --gpus-per-node=8
#SBATCH --time=4:00:00
#SBATCH --signal=USR1@300

module load cuda
export UNISHARD_CONFIG=/data/cfg.yaml
export UNISHARD_OVERRIDES='["training.seed=1"]'
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export NCCL_DEBUG=INFO
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))  # jobs that share a node have different ones

before=$(cat /data/runs/llama/latest 2>/dev/null)
srun --no-kill --kill-on-bad-exit=0 torchrun --nnodes "2:$SLURM_JOB_NUM_NODES" --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID" --max-restarts 3 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -- train.py --epochs 3
code=$?
if [ $code -ne 0 ] && [ "$(cat /data/runs/llama/latest 2>/dev/null)" != "$before" ]; then
    scontrol requeue "$SLURM_JOB_ID"  # a signal has ended them after a save: go on from there
fi
exit $code
