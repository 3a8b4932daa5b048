#!/bin/bash
export NCCL_DEBUG=WARN

torchrun --nproc_per_node 8 --master_port 29501 run_clm.py \
    --model_name_or_path "$MODEL" \
    --dataset_name wikitext \
    --deepspeed examples/configs/ds_auto.json \
    --output_dir out \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --learning_rate 1e-4 \
    --weight_decay 0.1 \
    --lr_scheduler_type cosine \
    --warmup_steps 100 \
    --max_steps 2000 \
    --bf16 \
    --log_level warning 2>&1 | tee train.log
