# Llama-2-70B: on 8 GPUs of 80 GB only with blocks in host memory; or on 64 without.
#   python -m extras.plan extras/config/llama2_70b.py --world_size=8 --gpu_memory=80 \
#       --host_memory=2000
#   python -m extras.plan extras/config/llama2_70b.py --world_size=64 --gpu_memory=80 \
#       --cpu_offload=0.0
# 80 blocks * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672) = 68.45 billion, 2 * 32,000 * 8192 =
# 0.52 billion in embedding and head: 68.98. 16 bytes each (fp32 master, gradient, two moments) are
# 1,104 GB, 138 GB per GPU on 8.
# On 8 GPUs the plan's peak is 15.0 GiB, with 1,890 GiB of host memory; on 64 without it 31.0 GiB.
# With --gpu=H100 it plans 8.829 s per step and an MFU of 41.7% on those 64; 1,000 steps are
# 0.10 days. On 8, with copies to and from the host at 50 GB/s, 79.871 s, 36.9% and 0.92 days.

out_dir = 'out-llama2-70b'
init_from = 'meta-llama/Llama-2-70b-hf'  # accept its license there first; scratch trains a new one
dataset = 'my_data'  # python data/prepare.py my_data FILES --tokenizer=meta-llama/Llama-2-70b-hf
strategy = 'full_shard'
activation_checkpointing = 'full'
cpu_offload = 1.0
# units by size, as published: embedding and head (262M each), each block's attention (151M), each
# of gate, up and down projection (235M); without this line a unit per block
# wrap_min_params = 100_000_000

model = 'llama'
block_size = 4096
vocab_size = 32000
n_layer = 80
n_head = 64
n_kv_head = 8
n_embd = 8192
n_inner = 28672
rope_theta = 1e4
tie_embeddings = False

# 1 * 4096 * 128 = 524,288 tokens per step (128 = 16 micro-batches on each of 8 GPUs)
batch_size = 1
gradient_accumulation_steps = 128

learning_rate = 1e-5
min_lr = 1e-6
max_iters = 1000  # 0.52 billion tokens
lr_decay_iters = 1000
warmup_iters = 30
eval_interval = 100
eval_iters = 20
checkpoint = 'sharded'  # 12 bytes per parameter are 828 GB: every rank writes its own share
