"""
What the files of extras/ refuse, as test_config.py says: one line with the key and a remedy.

    python -m pytest -q extras/tests/test_mistakes_of_extras.py
"""

from test_config import (  # noqa: F401  pytest finds them here
    odd,
    pytest_generate_tests,
    test_mistake_is_one_line,
)

TABLE = r"""
load
  --model=llama --dropout=0.1 | --help
  --model=llama --bias=True | --help
  --model=llama --n_embd=577 | multiple of n_head
  --model=llama --n_kv_head=4 | a divisor of it
train.py TOY
  --init_from=no/such/dir | local directory
  --init_from=ODD/nothing | config.json
extras/plan.py
  --world_size=8 --shard_group_size=4 | hybrid_shard
  --world_size=8 --strategy=single | python train.py
  --gpu=bogus | A100
data/prepare.py x --tokenizer=bytes --out=ODD/new
  ODD/a.txt --tokenizer=ODD/tokenizer.json | tokenizers
  ODD/a.txt --tokenizer=ODD/folder | .save_pretrained(DIR)
  ODD/a.txt --tokenizer=ODD/none.json | local directory
extras/masks.py x --tokenizer=bytes --out=ODD/new
  ODD/a.txt --learn=a; ODD/a.txt --template={a} --learn=a,b | --template
  ODD/a.txt --special | --tokenizer=
"""
