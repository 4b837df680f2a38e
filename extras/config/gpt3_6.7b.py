# GPT-3 6.7B, fully sharded over the GPUs of a node.
#   python -m extras.plan extras/config/gpt3_6.7b.py --world_size=8 --gpu_memory=80
#   torchrun --standalone --nproc_per_node=8 train.py extras/config/gpt3_6.7b.py
# Or on one V100 of 32 GB with 128 GB of host memory, which plans 12.7 GiB, 104 of the host and 569
# tokens/s:
#   python -m extras.plan extras/config/gpt3_6.7b.py --gpu=V100 --host_memory=128 \
#       --cpu_offload=1.0 --activation_checkpointing=full --batch_size=8 \
#       --gradient_accumulation_steps=1 --checkpoint=none
#   torchrun --standalone --nproc_per_node=1 train.py extras/config/gpt3_6.7b.py --dtype=float16 \
#       --loss_scale=4 --cpu_offload=1.0 --activation_checkpointing=full \
#       --batch_size=8 --gradient_accumulation_steps=1 --checkpoint=none
# 12 * 32 * 4096^2 = 6.44 billion in the blocks + (50,304 + 2,048) * 4096 = 0.21 billion: 6.66.
# 16 bytes each (fp32 master, gradient, two moments) are 107 GB, 13.3 GB per GPU on 8.
# On 8 GPUs the plan's peak is 36.8 GiB.
# With --gpu=H100 it plans 21.594 s per step and an MFU of 52.9%; 143,000 steps are 35.7 days.

out_dir = 'out-gpt3-6.7b'
dataset = 'fineweb_edu'
strategy = 'full_shard'
activation_checkpointing = 'selective'
loss_chunks = 8  # logits: 12 * 4 * 2048 * 50,304 = 4.9 GB whole, an eighth of it in pieces

n_layer = 32
n_head = 32
n_embd = 4096
block_size = 2048

# 4 * 2048 * 256 = 2.1M tokens per step (256 = 32 micro-batches on each of 8 GPUs), GPT-3's batch
batch_size = 4
gradient_accumulation_steps = 256

# 300 billion tokens / 2.1M = 143,000 steps
learning_rate = 1.2e-4
min_lr = 1.2e-5
max_iters = 143000
lr_decay_iters = 143000
warmup_iters = 180  # 375M tokens

eval_interval = 1000
eval_iters = 40
checkpoint = 'sharded'  # 12 bytes per parameter are 80 GB: every rank writes its own share of them
