# The first run: a small byte-level GPT on Python's own standard library; a minute or two on
# 2 CPU cores.
#   python data/python_stdlib/prepare.py
#   torchrun --standalone --nproc_per_node=2 train.py config/quickstart.py
# (In one process: python train.py config/quickstart.py)

out_dir = 'out-quickstart'
dataset = 'python_stdlib'

# 0.84M parameters: 12 * 4 * 128^2 = 786,432 in the blocks' matrices, 256 * 128 + 128 * 128
# in the embeddings, 9 * 128 in the norms
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128

# 8 * 128 * 2 = 2,048 tokens per step; 2 micro-batches, so that it also runs on 2 ranks
batch_size = 8
gradient_accumulation_steps = 2

learning_rate = 5e-3  # small models take large steps
min_lr = 5e-4
warmup_iters = 60
max_iters = 700
lr_decay_iters = 700
beta2 = 0.99  # a step has few tokens, so average the second moment over more of them

eval_interval = 350
eval_iters = 20
log_interval = 10
compile = False  # compiling takes longer than it saves here
