# Fine-tune GPT-2 XL on Shakespeare, as nanoGPT does.
#   python data/shakespeare/prepare.py && python train.py extras/config/finetune_shakespeare.py

out_dir = 'out-shakespeare'
dataset = 'shakespeare'
init_from = 'gpt2-xl'
always_save_checkpoint = False  # only when the validation loss improves

# 1 * 32 * 1024 = 32,768 tokens per step; 301,966 tokens are 9.2 steps
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20
eval_interval = 5
eval_iters = 40

learning_rate = 3e-5
decay_lr = False
compile = False
