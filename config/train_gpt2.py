# GPT-2 (124M) on OpenWebText, nanoGPT's run: it reports a validation loss of ~2.85 after 600,000
# steps, about 4 days on 8 A100.
#   python data/openwebtext/prepare.py
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
# P = 124M parameters easily fit any GPU, so use DDP: it sends 2 P per step, full_shard 3 P.

out_dir = 'out-gpt2'
dataset = 'openwebtext'
strategy = 'ddp'

# 12 * 1024 * 40 = 491,520 tokens per step (40 = 5 micro-batches on each of 8 GPUs)
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

# 600,000 * 491,520 = 295 billion tokens
max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10
weight_decay = 1e-1
