# A character-level GPT on tiny Shakespeare: nanoGPT's model, context and batch for CPUs, with
# a schedule that gets there sooner.
#   python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_char.py
# Measured in fp32: validation loss over the whole split 1.864 to 1.888 (four seeds) after these
# 1,060 steps; nanoGPT's own 2,000 steps end at 1.904.
# On a GPU, use nanoGPT's larger model; it reports 1.47 after 5,000 steps:
#   --n_layer=6 --n_head=6 --n_embd=384 --block_size=256 --batch_size=64 --dropout=0.2 \
#   --learning_rate=1e-3 --beta1=0.9 --beta2=0.99 --warmup_iters=100 --max_iters=5000 \
#   --lr_decay_iters=5000 --cuda_graph=True --compile=True

out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'
always_save_checkpoint = False  # a small text overfits: keep the best

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
dropout = 0.0
bias = True
weight_decay = 0.0  # less than an epoch does not overfit; 0.1 without biases was worse

# 12 * 64 = 768 tokens per step; an epoch is 1,003,854 / 768 = 1,307 steps
batch_size = 12
gradient_accumulation_steps = 1

learning_rate = 5e-3  # 5 x nanoGPT's
min_lr = 1e-4
beta1 = 0.7  # a step has 768 tokens: with large steps short averages did better than 0.9 and 0.99
beta2 = 0.95
warmup_iters = 150
max_iters = 1060
lr_decay_iters = 1060

eval_interval = 250
eval_iters = 20  # as nanoGPT: 20 * 12 * 64 = 15,360 tokens; 200 read all of the validation split
log_interval = 10
compile = False
