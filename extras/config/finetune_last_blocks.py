# Fine-tune only the last two blocks of GPT-2 (124M) and the final LayerNorm: the rest has no
# gradients and no optimizer state.
#   python data/shakespeare/prepare.py && python train.py extras/config/finetune_last_blocks.py

out_dir = 'out-last-blocks'
dataset = 'shakespeare'
init_from = 'gpt2'
always_save_checkpoint = False

# trained: 2 blocks * 12 * 768^2 = 14.2M of 124M parameters; only those have gradients and moments,
# 12 bytes each
freeze = r'wte|wpe|h\.[0-9]\.'

# 4 * 8 * 1024 = 32,768 tokens per step
batch_size = 4
gradient_accumulation_steps = 8
max_iters = 40
eval_interval = 10
eval_iters = 10

learning_rate = 1e-4
decay_lr = False
compile = False
