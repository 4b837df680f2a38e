# LoRA on what the config before this one starts from. Later flags may change it:
#   python train.py extras/config/finetune_smollm2.py extras/config/lora.py --lora_rank=8

base = init_from  # noqa: F821
init_from = 'scratch'
model = f'{model}+lora'  # noqa: F821
lora_rank = 16
