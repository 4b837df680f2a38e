# Evaluate OpenAI's GPT-2-large on OpenWebText: 36 layers, 20 heads, 1280 wide: 774M parameters.
#   python train.py extras/config/eval_gpt2_large.py

init_from = 'gpt2-large'
dataset = 'openwebtext'
eval_only = True
eval_iters = 500  # 500 * 8 windows of 1,024 tokens of each split
batch_size = 8
gradient_accumulation_steps = 8
out_dir = 'out-eval-gpt2-large'
compile = False
