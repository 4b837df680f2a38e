# Evaluate OpenAI's GPT-2 on OpenWebText: 12 layers, 12 heads, 768 wide: 124M parameters.
#   python train.py extras/config/eval_gpt2.py

init_from = 'gpt2'
dataset = 'openwebtext'
eval_only = True
eval_iters = 500  # 500 * 12 windows of 1,024 tokens of each split
batch_size = 12
gradient_accumulation_steps = 8
out_dir = 'out-eval-gpt2'
compile = False
