# GPT-3 13B: on 8 GPUs as it stands, on one with most of it in host memory.
#   python -m extras.plan extras/config/gpt3_13b.py --world_size=8 --gpu_memory=80
#   torchrun --standalone --nproc_per_node=8 train.py extras/config/gpt3_13b.py
# On one, ask first which --cpu_offload fits:
#   python -m extras.plan extras/config/gpt3_13b.py --gpu_memory=80 --host_memory=512 \
#       --cpu_offload=0.9
#   torchrun --standalone --nproc_per_node=1 train.py extras/config/gpt3_13b.py --cpu_offload=0.9
# Or on one V100 of 32 GB with 256 GB of host memory, as on fairseq's page; that plans 12.2 GiB, and
# 228 of the host:
#   python -m extras.plan extras/config/gpt3_13b.py --gpu=V100 --host_memory=256 \
#       --cpu_offload=1.0 --batch_size=8 --gradient_accumulation_steps=1 --checkpoint=none
#   torchrun --standalone --nproc_per_node=1 train.py extras/config/gpt3_13b.py --dtype=float16 \
#       --loss_scale=4 --cpu_offload=1.0 --batch_size=8 --gradient_accumulation_steps=1 \
#       --checkpoint=none
# (CUDA 13 has no V100s any more: that takes a PyTorch wheel for CUDA 12.)
# 12 * 40 * 5120^2 = 12.58 billion in the blocks + (50,304 + 2,048) * 5120 = 0.27 billion: 12.85.
# fairseq's transformer_lm_gpt3_13 has 13,110,865,920 parameters: with biases (`bias = True` here),
# 50,272 symbols, two more positions, and a head that is not tied to the embedding. Ours is tied.
# 16 bytes each (fp32 master, gradient, two moments) are 206 GB, 25.7 GB per GPU on 8.
# On 8 GPUs the plan's peak is 32.1 GiB.

out_dir = 'out-gpt3-13b'
dataset = 'fineweb_edu'
strategy = 'full_shard'
activation_checkpointing = 'full'
loss_chunks = 8  # logits: 12 * 4 * 2048 * 50,304 = 4.9 GB whole, an eighth of it in pieces

n_layer = 40
n_head = 40  # GPT-3's table has 5140 / 40, which no head size divides
n_embd = 5120
block_size = 2048

# 4 * 2048 * 256 = 2.1M tokens per step (256 = 32 micro-batches on each of 8 GPUs), GPT-3's batch
batch_size = 4
gradient_accumulation_steps = 256

# 300 billion tokens / 2.1M = 143,000 steps
learning_rate = 1e-4
min_lr = 1e-5
max_iters = 143000
lr_decay_iters = 143000
warmup_iters = 180  # 375M tokens

eval_interval = 1000
eval_iters = 40
checkpoint = 'sharded'  # 12 bytes per parameter are 154 GB
