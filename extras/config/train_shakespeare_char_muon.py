# config/train_shakespeare_char.py with Muon, which gets there in half the steps.
#   python data/shakespeare_char/prepare.py
#   python train.py extras/config/train_shakespeare_char_muon.py
# Measured in fp32: validation loss over the whole split 1.864 to 1.883 (four seeds) after these 500
# steps, where AdamW takes 1,060 steps to 1.864 to 1.888.

out_dir = 'out-shakespeare-char'
dataset = 'shakespeare_char'
always_save_checkpoint = False  # a small text is overfitted: keep the best

n_layer = 4
n_head = 4
n_embd = 128
block_size = 64
dropout = 0.0
bias = True
weight_decay = 0.0  # less than an epoch does not overfit; with AdamW 0.1 without biases was worse

# 12 * 64 = 768 tokens per step; an epoch is 1,003,854 / 768 = 1,307 steps
batch_size = 12
gradient_accumulation_steps = 1

optimizer = 'muon'
learning_rate = 1e-2  # 10 x nanoGPT's
min_lr = 1e-4
beta1 = 0.7  # a step has 768 tokens: with large steps short averages did better than 0.9 and 0.99
beta2 = 0.95
warmup_iters = 60
max_iters = 500
lr_decay_iters = 500

eval_interval = 250
eval_iters = 20  # as nanoGPT: 20 * 12 * 64 = 15,360 tokens; 200 read all of the validation split
log_interval = 10
compile = False
