# Llama-3-8B, fully sharded over the 8 GPUs of a node.
#   python -m extras.plan extras/config/llama3_8b.py --world_size=8 --gpu_memory=80
#   torchrun --standalone --nproc_per_node=8 train.py extras/config/llama3_8b.py
# 32 blocks * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) = 6.98 billion, 2 * 128,256 * 4096 =
# 1.05 billion in embedding and head: 8.03. 16 bytes each (fp32 master, gradient, two moments) are
# 128 GB, 16.1 GB per GPU on 8. For Llama 3.1 add rope_factor = 8.0, unless it starts from the
# hub's model, which brings its own.
# On 8 GPUs the plan's peak is 22.4 GiB.
# With --gpu=H100 it plans 8.618 s per step and an MFU of 44.5%; 1,000 steps are 0.10 days.

out_dir = 'out-llama3-8b'
init_from = 'meta-llama/Meta-Llama-3-8B'  # accept its license there first; scratch: a new one
dataset = 'my_data'  # python data/prepare.py my_data FILES --tokenizer=meta-llama/Meta-Llama-3-8B
strategy = 'full_shard'
activation_checkpointing = 'full'
loss_chunks = 8  # logits: 12 * 8192 * 128,256 = 12.6 GB whole, an eighth of it in pieces

model = 'llama'
block_size = 8192
vocab_size = 128256
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096
n_inner = 14336
rope_theta = 5e5
tie_embeddings = False

# 1 * 8192 * 64 = 524,288 tokens per step (64 = 8 micro-batches on each of 8 GPUs)
batch_size = 1
gradient_accumulation_steps = 64

learning_rate = 2e-5
min_lr = 2e-6
max_iters = 1000  # 0.52 billion tokens
lr_decay_iters = 1000
warmup_iters = 30
eval_interval = 100
eval_iters = 20
checkpoint = 'sharded'  # 12 bytes per parameter are 96 GB: every rank writes its own share
