# GPT-2 XL (1.5B), fully sharded.
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_xl.py
# 1.56 billion parameters * 16 bytes (fp32 master, gradient, two moments) = 25 GB: 3.1 GB on each of
# 8 GPUs. The activations of one sequence in bf16, 32 bytes * 48 * 1024 * 1600, are another 2.5 GB,
# so checkpointing allows a larger batch.
# On 8 GPUs the plan's peak is 16.8 GiB.

out_dir = 'out-gpt2-xl'
dataset = 'openwebtext'
strategy = 'full_shard'
activation_checkpointing = 'selective'
loss_chunks = 8  # logits: 12 * 8 * 1024 * 50,304 = 4.9 GB whole, an eighth of it in pieces

n_layer = 48
n_head = 25
n_embd = 1600

# 8 * 1024 * 64 = 524,288 tokens per step (64 = 8 micro-batches on each of 8 GPUs)
batch_size = 8
block_size = 1024
gradient_accumulation_steps = 8 * 8

learning_rate = 2e-4
min_lr = 2e-5
max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
log_interval = 10
