# A character-level GPT on tiny Shakespeare, nanoGPT's model, context and batch for CPUs, with a schedule that gets there sooner.
#   python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_char.py
# Measured (2 cores, fp32): validation loss 1.877 over the whole split after these 1,100 steps, 61 s with start-up and evaluations where
# nanoGPT's own 2,000 steps took it 98 s; its schedule,
#   --learning_rate=1e-3 --min_lr=1e-4 --max_iters=2000 --lr_decay_iters=2000, gives 1.894 (nanoGPT itself: 1.904 on the same windows)
# On a GPU take nanoGPT's larger model (1.47 there after 5,000 steps):
#   --n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --batch_size=64 --dropout=0.2 --learning_rate=1e-3 --max_iters=5000 --lr_decay_iters=5000

out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'
always_save_checkpoint = False  # a small text is overfitted: keep the best

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
dropout = 0.0
bias = True
weight_decay = 0.0  # 0.1 without biases ends 0.017 worse: one and a half epochs do not overfit

# 12 * 64 = 768 tokens a step; an epoch is 1,003,854 / 768 = 1,307 steps
batch_size = 12
gradient_accumulation_steps = 1

learning_rate = 6e-3  # 6 x nanoGPT's; 5e-3 ended 0.02 worse
min_lr = 1e-4
beta2 = 0.99
warmup_iters = 100
max_iters = 1100
lr_decay_iters = 1100

eval_interval = 550
eval_iters = 50  # 50 * 12 * 64 = 38,400 tokens, a third of the validation split; 200 read all of it
log_interval = 10
compile = False
