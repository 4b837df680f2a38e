# A small GPT (45M) on WikiText-103, with the sizes and settings of fairseq's transformer_lm.
#   python data/wikitext103/prepare.py
#   torchrun --standalone --nproc_per_node=2 train.py extras/config/train_wikitext103.py
# The validation text is the published one. But fairseq's tokens are words, some 268,000 of them,
# and here they are GPT-2's, so a loss per token does not compare with published ones.

out_dir = 'out-wikitext103'
dataset = 'wikitext103'
strategy = 'ddp'  # it fits any GPU

# 6 * 12 * 512^2 = 18.9M in the blocks, 50,304 * 512 + 512 * 512 = 26.0M in the embeddings
n_layer = 6
n_head = 8
n_embd = 512
block_size = 512
dropout = 0.1

# 16 * 512 * 8 = 65,536 tokens per step, fairseq's 2,048 * 16 on each of 2 GPUs; logits take
# 12 * 16 * 512 * 50,304 = 4.9 GB
batch_size = 16
gradient_accumulation_steps = 8

# 50,000 * 65,536 = 3.28 billion tokens: 28 epochs of 118 million
max_iters = 50000
lr_decay_iters = 50000
warmup_iters = 4000
learning_rate = 5e-4
min_lr = 5e-5  # a cosine; fairseq's falls as 1 / sqrt(step)
beta2 = 0.98
weight_decay = 0.01
grad_clip = 0.0

eval_interval = 1000
eval_iters = 40  # 40 * 16 * 512 = 327,680 tokens of each split
log_interval = 10
