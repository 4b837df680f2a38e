# A Llama of 1.2 billion parameters, on 100 billion tokens of FineWeb-Edu, by the 8 GPUs of a node.
#   python data/fineweb_edu/prepare.py --subset=sample-100BT    # 200 GB
#   python -m extras.plan extras/config/llama_1b.py --world_size=8 --gpu=H100 --tokens=1e11
#   torchrun --standalone --nproc_per_node=8 train.py extras/config/llama_1b.py --init_from=auto
# 16 blocks * (2048 * (2 * 2048 + 2 * 512) + 3 * 2048 * 8192) = 0.97 billion, 2 * 50,304 * 2048 =
# 0.21 billion in embedding and head: 1.18. 16 bytes each (fp32 master, gradient, two moments) are
# 18.9 GB, 2.4 GB per GPU on 8.
# On 8 GPUs the plan's peak is 27.6 GiB.
# With --gpu=H100 it plans 2.134 s per step and an MFU of 50.1%; 95,000 steps are 2.35 days.

out_dir = 'out-llama-1b'
dataset = 'fineweb_edu'
# ddp fits too, in 49.8 GiB, and is planned to take 5% longer
strategy = 'full_shard'

# the blocks of Llama 3.2 1B (huggingface.co/meta-llama/Llama-3.2-1B, config.json)
model = 'llama'
block_size = 4096
n_layer = 16
n_head = 32
n_kv_head = 8
n_embd = 2048
n_inner = 8192
rope_theta = 5e5
vocab_size = 50304  # GPT-2's, as the data has it; Llama 3's 128,256 are for many languages
tie_embeddings = False  # Llama 3.2 ties them, as its vocabulary would be a third of all parameters

# 4 * 4096 * 64 = 1,048,576 tokens per step (64 = 8 micro-batches on each of 8 GPUs)
batch_size = 4
gradient_accumulation_steps = 64
loss_chunks = 8  # logits: 12 * 4 * 4096 * 50,304 = 9.9 GB whole, an eighth of it in pieces

# GPT-3 1.3B (arXiv 2005.14165, table 2.1) has batches of 1M tokens and a rate of 2e-4; TinyLlama
# 1.1B (arXiv 2401.02385, section 2.2) of 2M and 4e-4. Both clip at 1, decay weights by 0.1, and
# end a cosine at a tenth of the rate.
learning_rate = 3e-4
min_lr = 3e-5
weight_decay = 0.1
grad_clip = 1.0
beta1 = 0.9
beta2 = 0.95
warmup_iters = 2000  # TinyLlama's; 2% of all
max_iters = 95000  # 99.6 billion tokens: one epoch
lr_decay_iters = 95000

# 12 bytes per parameter are 14 GB. One checkpoint every 20 minutes, and nine that stay
checkpoint = 'sharded'
save_interval = 500
keep_every = 10000
eval_interval = 1000
eval_iters = 40  # 40 * 4 * 4096 = 655,360 tokens of each split
log_interval = 10
