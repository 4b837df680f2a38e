# Llama-2-7B, as the field's guide to sharding trains it: fully sharded over the 8 GPUs of a node.
#   python -m extras.plan extras/config/llama2_7b.py --world_size=8 --gpu_memory=80
#   torchrun --standalone --nproc_per_node=8 train.py extras/config/llama2_7b.py
# 32 blocks * (4 * 4096^2 + 3 * 4096 * 11008) = 6.48 billion, 2 * 32,000 * 4096 = 0.26 billion in
# embedding and head: 6.74. 16 bytes each (fp32 master, gradient, two moments) are 108 GB, 13.5 GB
# per GPU on 8.
# On 8 GPUs the plan's peak is 18.4 GiB.
# Llama-2 70B is --n_layer=80 --n_head=64 --n_kv_head=8 --n_embd=8192 --n_inner=28672, and on 8 GPUs
# --batch_size=1 --cpu_offload=1.0 (15.0 GiB, 1,890 of the host; with OMP_NUM_THREADS=cores / 8).
# Llama 3 8B: --n_kv_head=8 --n_inner=14336 --vocab_size=128256 --rope_theta=5e5 --block_size=8192
# --batch_size=1 (22.4 GiB), and for a new Llama 3.1 --rope_factor=8.0 too.

out_dir = 'out-llama2-7b'
init_from = 'meta-llama/Llama-2-7b-hf'  # accept its license there first; scratch trains a new one
dataset = 'my_data'  # python data/prepare.py my_data FILES --tokenizer=meta-llama/Llama-2-7b-hf
strategy = 'full_shard'
# units by size, as published: embedding and head (131M each), each block's MLP (135M), and the
# attention (67M) in the root; without this line a unit per block
# wrap_min_params = 100_000_000

model = 'llama'
block_size = 4096
vocab_size = 32000
n_layer = 32
n_head = 32
n_kv_head = 32
n_embd = 4096
n_inner = 11008
rope_theta = 1e4
tie_embeddings = False
activation_checkpointing = 'full'
loss_chunks = 8  # logits: 12 * 2 * 4096 * 32,000 = 3.1 GB whole, an eighth of it in pieces

# 2 * 4096 * 64 = 524,288 tokens per step (64 = 8 micro-batches on each of 8 GPUs)
batch_size = 2
gradient_accumulation_steps = 64

learning_rate = 2e-5
min_lr = 2e-6
max_iters = 1000  # 0.52 billion tokens
lr_decay_iters = 1000
warmup_iters = 30
eval_interval = 100
eval_iters = 20
checkpoint = 'sharded'  # 12 bytes per parameter are 81 GB: every rank writes its own share
