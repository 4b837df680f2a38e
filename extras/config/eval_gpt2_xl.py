# Evaluate OpenAI's GPT-2-xl on OpenWebText: 48 layers, 25 heads, 1600 wide: 1558M parameters.
#   python train.py extras/config/eval_gpt2_xl.py

init_from = 'gpt2-xl'
dataset = 'openwebtext'
eval_only = True
eval_iters = 500  # 500 * 4 windows of 1,024 tokens of each split
batch_size = 4
gradient_accumulation_steps = 8
out_dir = 'out-eval-gpt2-xl'
compile = False
