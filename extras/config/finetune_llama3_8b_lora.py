# Llama-3-8B with LoRA, fully sharded over 2 GPUs of 24 GB.
#   python -m extras.plan extras/config/finetune_llama3_8b_lora.py --world_size=2 --gpu_memory=24
#   torchrun --standalone --nproc_per_node=2 train.py extras/config/finetune_llama3_8b_lora.py
# The base: 8.03 billion parameters, 2 bytes each, are 16.1 GB, 8.0 GB per GPU.
# The adapters: 32 blocks * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
# = 41.9M, 16 bytes each, are 0.7 GB.
# On 2 GPUs the plan's peak is 10.7 GiB (with torch 2.13 a GiB more).

model = 'llama+lora'
out_dir = 'out-llama3-8b-lora'
base = 'meta-llama/Meta-Llama-3-8B'  # accept its license there first
dataset = 'my_data'  # python data/prepare.py my_data FILES --tokenizer=meta-llama/Meta-Llama-3-8B
always_save_checkpoint = False  # only when the validation loss improves
strategy = 'full_shard'
activation_checkpointing = 'full'
loss_chunks = 8  # logits: 2048 * 128,256 in fp32 are 1.05 GB whole, an eighth of it in pieces

lora_rank = 16
lora_alpha = 32
dtype = 'bfloat16'
frozen_dtype = 'bfloat16'

block_size = 2048
vocab_size = 128256
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
n_inner = 14336
rope_theta = 5e5
tie_embeddings = False

# 1 * 2048 * 16 = 32,768 tokens per step (16 = 8 micro-batches on each of 2 GPUs)
batch_size = 1
gradient_accumulation_steps = 16

learning_rate = 2e-4  # ten times the rate for training all weights
min_lr = 2e-5
weight_decay = 0.0
max_iters = 500
lr_decay_iters = 500
warmup_iters = 20
eval_interval = 50
eval_iters = 20
