# GPT-3 175B on 128 GPUs and more: sharded over groups of 128, replicated across them.
#   python -m extras.plan extras/config/gpt3_175b.py --world_size=1024 --gpu_memory=80
#   torchrun --nnodes=128 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST1:29500 \
#       train.py extras/config/gpt3_175b.py
# 12 * 96 * 12288^2 = 173.9 billion in the blocks + (50,304 + 2,048) * 12288 = 0.64 billion: 174.6.
# 16 bytes each (fp32 master, gradient, two moments) are 2.79 TB, 21.8 GB per GPU in groups of 128.
# On 1024 GPUs the plan's peak is 44.3 GiB.

out_dir = 'out-gpt3-175b'
dataset = 'fineweb_edu'
strategy = 'hybrid_shard'
shard_group_size = 128
activation_checkpointing = 'full'
loss_chunks = 8  # logits: 12 * 1 * 2048 * 50,304 = 1.2 GB whole, an eighth of it in pieces

n_layer = 96
n_head = 96
n_embd = 12288
block_size = 2048

# 1 * 2048 * 1536 = 3.1M tokens per step, GPT-3's batch: 12 micro-batches on each of 128 GPUs; on
# 1,024 take 2,048 (4.2M)
batch_size = 1
gradient_accumulation_steps = 1536

# 300 billion tokens / 3.1M = 95,000 steps
learning_rate = 6e-5
min_lr = 6e-6
max_iters = 95000
lr_decay_iters = 95000
warmup_iters = 120  # 375M tokens

eval_interval = 1000
eval_iters = 40
checkpoint = 'sharded'  # 12 bytes per parameter are 2.1 TB
