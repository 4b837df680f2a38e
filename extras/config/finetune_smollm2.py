# Fine-tune SmolLM2-135M on chats; a CPU is enough.
#   python train.py extras/config/finetune_smollm2.py
# extras/docs/finetuning.md prepares its data set my_chats.
# 30 blocks * (576 * (576 + 2 * 192 + 576) + 3 * 576 * 1536) = 106.2M, and 49,152 * 576 = 28.3M in
# the embedding, which is the head too: 134.5M parameters. 16 bytes each are 2.2 GB.

out_dir = 'out-smollm2'
dataset = 'my_chats'
init_from = 'HuggingFaceTB/SmolLM2-135M'
model = 'llama'
always_save_checkpoint = False  # only when the validation loss improves
block_size = 512  # it was trained with 2,048 and takes 8,192; a shorter context saves memory

# 2 * 512 * 8 = 8,192 tokens per step; a micro-batch's logits, 1,024 * 49,152 in fp32,
# are 0.2 GB
batch_size = 2
gradient_accumulation_steps = 8
max_iters = 100  # 0.8M tokens
eval_interval = 20
eval_iters = 20

learning_rate = 1e-4
warmup_iters = 10
lr_decay_iters = 100
min_lr = 1e-5
compile = False
