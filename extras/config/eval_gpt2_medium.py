# Evaluate OpenAI's GPT-2-medium on OpenWebText: 24 layers, 16 heads, 1024 wide: 350M parameters.
#   python train.py extras/config/eval_gpt2_medium.py

init_from = 'gpt2-medium'
dataset = 'openwebtext'
eval_only = True
eval_iters = 500  # 500 * 8 windows of 1,024 tokens of each split
batch_size = 8
gradient_accumulation_steps = 8
out_dir = 'out-eval-gpt2-medium'
compile = False
