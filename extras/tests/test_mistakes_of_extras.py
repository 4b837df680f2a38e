"""
What the files of extras/ refuse, as test_mistakes.py says: one line with the key and a remedy.

    python -m pytest -q extras/tests/test_mistakes_of_extras.py
"""

from test_mistakes import (  # noqa: F401  pytest finds them here
    odd,
    pytest_generate_tests,
    test_mistake_is_one_line,
)

TABLE = r"""
load
  --model=llama --dropout=0.1 | --help
  --model=llama --bias=True | qkv_bias
  --model=llama --n_embd=577 | multiple of n_head
  --model=llama --n_kv_head=4; config/quickstart.py --model=llama --n_kv_head=3 | a divisor of it
  --model=llama --head_dim=63 | even
  --model=moe --n_active=5 | n_expert=4
train.py TOY
  --init_from=no/such/dir | local directory
  --init_from=ODD/nothing | config.json
train.py TOY --init_from=resume --eval_only=True
  --out_dir=ODD/whole --optimizer=muon | --optimizer=adamw
extras/bench.py TOY
  --variants=strategy=dpp | 'ddp'
  --variants=strategy=ddp | torchrun
extras/plan
  --world_size=96 extras/config/gpt3_175b.py --shard_group_size=128 | divisor of 96
  --world_size=0; --gpu_memory=-1; --gpu_memory=nan; --host_memory=0; --gpus_per_node=0 | above 0
  --world_size=8 --strategy=single | --world_size=1
  --world_size=8 --strategy=ddp --cpu_offload=0.5 | hybrid_shard
  --gpu=bogus; --gpu=1:2:3 | A100
  --tokens=1e9; --mfu=0.4; --link=100 | --gpu=H100
  --gpu=H100 --tokens=0; --gpu=H100 --mfu=-1; --gpu=A100 --link=nan | above 0
extras/huggingface.py
  ODD/nothing ODD/nothing | no checkpoint
data/prepare.py x --tokenizer=bytes --out=ODD/new
  ODD/a.txt --tokenizer=ODD/tokenizer.json | tokenizers
  ODD/a.txt --tokenizer=ODD/folder; ODD/a.txt --tokenizer=ODD/bad.txt | .save_pretrained(DIR)
  ODD/a.txt --tokenizer=ODD/none.json | local directory
extras/masks.py x --tokenizer=bytes --out=ODD/new
  ODD/a.txt --learn=a; ODD/a.txt --template={a} --learn=a,b | --template
  ODD/a.txt --window=0 | --window
  ODD/a.txt --special | --tokenizer=
"""
