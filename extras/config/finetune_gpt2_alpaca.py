# Fine-tune GPT-2 (124M) on Alpaca's instructions and answers, 64 sequences a step.
#   python extras/data/alpaca/prepare.py
#   python train.py extras/config/finetune_gpt2_alpaca.py
# The model, data, batch and rate of LambdaLabs' distributed-training-guide (chapter 1, with
# --batch-size 64). Its script trains an untrained GPT-2: that is --init_from=scratch.

out_dir = 'out-alpaca'
dataset = 'alpaca'
init_from = 'gpt2'
always_save_checkpoint = False  # only when the validation loss improves
dropout = 0.1  # GPT-2's own

# 8 * 8 = 64 sequences of 1,024 are 65,536 tokens per step, on 1, 2, 4 or 8 GPUs. In one
# micro-batch of 64 the logits alone would take 12 * 65,536 * 50,304 = 39.6 GB; of 8, 4.9 GB.
batch_size = 8
block_size = 1024
gradient_accumulation_steps = 8

# a cosine to a hundredth, without warm-up, over 1,000 steps; the run's first lines say how many
# steps an epoch has
learning_rate = 3e-5
min_lr = 3e-7
warmup_iters = 0
max_iters = 1000
lr_decay_iters = 1000
beta2 = 0.999  # this and the next two are PyTorch's defaults, as there
weight_decay = 0.01
grad_clip = 0.0

eval_interval = 50
eval_iters = 8  # 8 * 8 * 1024 = 65,536 tokens of each split
log_interval = 10
compile = False
