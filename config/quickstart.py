# The first run: a small byte-level GPT on Python's own standard library; a minute or two on 2 CPU
# cores.
#   python data/python_stdlib/prepare.py && python train.py config/quickstart.py

out_dir = 'out-quickstart'
dataset = 'python_stdlib'

# 0.84M parameters: 12 * 4 * 128^2 = 786,432 in the blocks' matrices, 256 * 128 + 128 * 128 in the
# embeddings, 9 * 128 in the norms
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

# 16 * 128 * 2 = 4,096 tokens a step; 2 micro-batches, so that it also runs on 2 ranks
batch_size = 16
gradient_accumulation_steps = 2

# Muon: validation loss 1.424 to 1.426 (three seeds, fp32). AdamW takes 1,000 steps and 2.5 times as
# long to 1.448 to 1.475 (docs/measurements.md):
#   --optimizer=adamw --learning_rate=2e-3 --min_lr=2e-4 --warmup_iters=100 --max_iters=1000 \
#   --lr_decay_iters=1000
optimizer = 'muon'
learning_rate = 2e-2  # small models take large steps
min_lr = 1e-4
warmup_iters = 35
max_iters = 350
lr_decay_iters = 350
beta2 = 0.99  # a step has few tokens, so average the second moment over more of them

eval_interval = 175
eval_iters = 20
log_interval = 10
compile = False  # compiling takes longer than it saves here
