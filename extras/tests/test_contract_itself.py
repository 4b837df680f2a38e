"""
What test_contract.py says of copies of moe.py with a mistake, one each. Then experts without
tokens.

    python -m pytest -q extras/tests/test_contract_itself.py
"""

import os
import re

import pytest
import test_contract as contract
import torch
from harness import HERE, on_ranks, plain_model, read_ckpt, run_training

import metrics
from data.loader import Batches
from ranks import World

NORMAL = "return normal(shape, 0.02, key=(seed, name))"
LAST = "ModelConfig = MoEConfig\nModel = MoE"
LOSS = "loss + self.config.balance * unbalanced / self.config.n_layer"
EXPERTS = "self.mlp = Experts(config)"
BLOCKS = "blocks = [Block(config) for _ in range(config.n_layer)]"
CALLS = "zip(self.blocks, caches)"
HEAD = "logits, loss = self.head_loss(x, targets)"
OWN = "logits = self.lm_head(x)\n        loss = F.cross_entropy(logits.mT"
OF_FLOATS = f"{OWN}.float(), targets, ignore_index=-1"
COMPUTE = "            y = F.linear"
BRANCH = f"            if not weights[..., e].any():\n                continue\n{COMPUTE}"
STACK = "nn.Parameter(torch.empty(E, 2 * C, C))"
LIST = "nn.ParameterList([torch.empty(2 * C, C) for _ in range(E)])"
IN_LIST = (STACK, LIST, "self.c_fc.unbind()", "[*self.c_fc]")
LAYERS = "        self.transformer.h ="
REVERSED = "        self.transformer = nn.ModuleDict(dict(reversed(self.transformer.items())))\n"
MATRICES = "    def matrices(self):"
ANSWER = "return answer, unbalanced"
SKIPPED = "if self.training and self.config.dropout and {}() < .5:\n            answer = 0 * answer"
PRODUCT = "y = F.linear(y, c_proj[e])  # (B, T, C)"
RNN = f"{EXPERTS}\n        self.rnn = nn.LSTM(config.n_embd, config.n_embd)"
DROP = "x = self.transformer.drop(x)"
IN_FORWARD = "self.scale = nn.Parameter(torch.ones(1))\n        answer = answer * self.scale"
FAULTS = {  # name: (what it says, then what moe.py has, what its copy has instead, ...)
    # the parts
    "sizes": ("add block_size to ModelConfig", LAST,
              "@dataclass\nclass ModelConfig:\n    vocab_size: int = 9\n\n\nModel = MoE"),
    "annotations": ("and the file without from __future__", "import math\n",
                    "from __future__ import annotations\nimport math\n"),
    "union": (r"ModelConfig\.n_active, a int \| None, must be an int", "n_active: int = 2",
              "n_active: int | None = 2"),
    "buffer": (r"buffer transformer\.h\.0\.angles .* compute it in forward", EXPERTS,
               f"{EXPERTS}\n        self.register_buffer('angles', torch.empty(2))"),
    "blocks": (r"take .*h\.0 out of", "[Block(config) for", "[nn.Identity() for"),
    "one block": ("a block stands in Model.blocks twice", BLOCKS,
                  "blocks = [Block(config)] * config.n_layer"),
    "shared": (r"h\.0\.mlp\.c_fc and .*h\.1\.mlp\.c_fc are one parameter in two units", BLOCKS,
               f"{BLOCKS}\n        blocks[1].mlp = blocks[0].mlp"),
    "list": ("make it an nn.ModuleList", f"{LAYERS} nn.ModuleList(blocks)",
             "        self.layers = blocks", MATRICES,
             f"    blocks = property(lambda self: self.layers)\n\n{MATRICES}"),
    "method": ("or a property that returns one", MATRICES,
               f"    def blocks(self):\n        return self.transformer.h\n\n{MATRICES}"),
    "reads": (r"reads no values \(RuntimeError", EXPERTS,
              f"{EXPERTS}\n        if torch.ones(1): 0"),
    "scalar": (r"make transformer\.h\.0\.bias a vector of one number", EXPERTS,
               f"{EXPERTS}\n        self.bias = nn.Parameter(torch.empty(()))"),
    "device": ("c_fc must be made where", "(E, 2 * C, C)", "(E, 2 * C, C, device='cpu')"),
    "bf16 parameter": ("c_fc trains in torch.bfloat16", "(E, 2 * C, C)",
                       "(E, 2 * C, C, dtype=torch.bfloat16)"),
    "complex": ("c_fc must be in float32, not complex64", "(E, 2 * C, C)",
                "(E, 2 * C, C, dtype=torch.complex64)"),
    "syntax": (r"moe_syntax does not run \(SyntaxError", "import math", "import math math"),
    # initial values
    "other random": ("name: use normal", NORMAL, "return torch.randn(shape)"),
    "no seed": ("from its seed", "kind = name.s", "seed = 7\n        kind = name.s"),
    "no name": ("start equal", NORMAL, "return normal(shape, 0.02, key=(seed,))"),
    "no value": (r"initial_value must know .*h\.0\.mlp\.c_fc \(ValueError", NORMAL, "pass"),
    "none": (r"c_fc\) must return \(4, 60, 30\) in float32", NORMAL, "return None"),
    # forward
    "length": (r"any T up to block_size; .*\(AssertionError: T", "        pos =",
               "        assert idx.size(1) == 16, 'T'\n        pos ="),
    "batch": (r"any B, and any T .*moe_batch.py:\d+", DROP, f"{DROP}.view(3, -1, x.size(-1))"),
    "nan": ("a loss of nan", HEAD, f"x = x / (x - x)\n        {HEAD}"),
    "infinite gradient": (r"the gradient of \S+ is not finite", HEAD,
                          f"x = x + (x - x).sqrt()\n        {HEAD}"),
    "no pair": ("must return a pair", "return logits, loss", "return loss"),
    "item": ("one number in float32", "return logits, loss", "return logits, loss.item()"),
    "in place": ("in place that backward needs", "return x + y,", "x += y\n        return x,"),
    "attribute": ("tensors in forward, or parameters", EXPERTS,
                  f"{EXPERTS}\n        self.half = torch.ones(1)",
                  "return x + y,", "return x + y * self.half,"),
    "dropout": ("no random numbers in eval", HEAD, f"x = F.dropout(x, 0.1)\n        {HEAD}"),
    "lazy": (r"make transformer\.h\.0\.mlp\.scale in Model.__init__, and leave", ANSWER,
             f"{IN_FORWARD}\n        {ANSWER}"),
    "hooks": ("call each block once", "block(x, block_cache)", "block.forward(x, block_cache)"),
    "backwards": ("in their order", CALLS, "zip(reversed(self.blocks), caches)"),
    "last": ("of the last position", "self.lm_head(last)", "self.lm_head(x)"),
    "python random": ("not from Python's random", "import math", "import math\nimport random",
                      ANSWER, f"{SKIPPED.format('random.random')}\n        {ANSWER}"),
    "numpy random": ("or NumPy's", "import math", "import math\nimport numpy as np",
                     ANSWER, f"{SKIPPED.format('np.random.rand')}\n        {ANSWER}"),
    "state": ("keep no state", HEAD, f"{HEAD}\n        loss = loss * self.grown()", MATRICES,
              f"    def grown(self):\n        self.n = getattr(self, 'n', 99) + 1\n"
              f"        return self.n / 100\n\n{MATRICES}"),
    "meta": ("forward must run on any device.*moe_meta.py:", COMPUTE, BRANCH),
    "cpu": (r"device=idx.device", "pos = torch.arange(past, past + idx.size(1), device=idx.device)",
            "pos = torch.arange(past, past + idx.size(1))"),
    "writes": (r"c_fc in Model.__init__, and leave it alone", ANSWER,
               f"with torch.no_grad():\n            self.c_fc.clamp_(-.01, .01)\n        {ANSWER}"),
    "outside": (r"the parameters of transformer\.h\.0 in its own", LOSS,
                f"{LOSS} + 0 * self.blocks[0].ln_1.weight.sum()"),
    "by size": (r"the parameters of c_attn in its own .* wrap_min_params", BLOCKS,
                f"self.c_attn = nn.Linear(config.n_embd, 50, bias=False)\n        {BLOCKS}",
                HEAD, f"x = x + F.linear(x, self.c_attn.weight).mean(-1, True)\n        {HEAD}"),
    "object": ("must return tensors", "return x + y, unbalanced",
               "return type('O', (), dict(two=(x + y, unbalanced)))()",
               "block(x, block_cache)\n", "block(x, block_cache).two\n"),
    # the loss
    "rows": ("mixes the rows of a batch", HEAD, f"x = x + x.mean(0)\n        {HEAD}"),
    "lstm": ("mixes the rows of a batch", EXPERTS, RNN, "x + y, unb", "x + self.rnn(y)[0], unb",
             '"router" in name', '"r" in name'),
    "future": ("must depend on no later token", HEAD, f"x = x + x.mean(1, True)\n        {HEAD}"),
    "asleep": ("must depend on no later token", EXPERTS,
               f"{EXPERTS}\n        self.bias = nn.Parameter(torch.empty(1))",
               "return x + y,", "return x + y + self.bias * x.mean(1, True),"),
    "padding": ("targets of -1 do not count", HEAD, f"{OWN}, targets)"),
    "sum": (r"here 4\.\d+, not 1\d\d\.\d+: use model\.cross", HEAD,
            f"{OF_FLOATS}, reduction='sum')"),
    "padded mean": (r"here 4\.\d+, not 2\.\d+: use model\.cross", HEAD,
                    f"{OF_FLOATS}, reduction='sum') / targets.numel()"),
    "row by row": (r"not 4\.\d+: use model.cross_entropy", HEAD,
                   f"{OF_FLOATS}, reduction='none')\n"
                   "        loss = (loss.sum(1) / (targets != -1).sum(1)).mean()"),
    "always": ("add what is for training only if self.training", "if self.training:", "if True:"),
    "bf16": ("take the loss of bf16 logits in float32", HEAD,
             f"{OWN}, targets, ignore_index=-1).float()"),
    "bf16 loss": ("compute the loss in float32: use", HEAD, f"{OWN}, targets, ignore_index=-1)"),
    "nan in bf16": ("in bf16 the loss is nan", DROP,
                    f"{DROP} * (1 - torch.full_like(x, 1 - 1e-3)) ** -.5"),
    "fp32 mask": (r"\.type_as\(x\) .*moe_fp32_mask.py:\d+", PRODUCT,
                  f"{PRODUCT}\n            y = y * torch.ones(x.size(1), 1, device=x.device)"),
    "autocast": ("under torch.autocast", PRODUCT,
                 f"{PRODUCT}\n            z = torch.zeros_like(x)\n            "
                 "z[x > 0] = y[x > 0]\n            y = z"),
    "sum in training": (r"in training the loss is 1\d\d\.\d+, and in eval mode 4\.", LOSS,
                        "loss * (targets != -1).sum()"),
    # the rest
    "chunks": ("forward call self.head_loss", HEAD, f"{OF_FLOATS})"),
    "idle": (r"c_fc\.\d has no gradient .* ddp", *IN_LIST, COMPUTE,
             BRANCH.replace("if not", "if not x.is_meta and not")),
    "detached": (r"wpe\S* has no gradient .* detached", "block(x, block_cache)",
                 "block(x.detach(), block_cache)"),
    "order": ("register modules in the order", LAYERS, REVERSED + LAYERS),
    "in place product": ("write y = y [+] x, not y [+]= x", PRODUCT,
                         f"{PRODUCT}\n            y += x"),
    "positions": ("generation differs", "0 if cache is None else cache[0].length", "0"),
}


@pytest.fixture
def copy(models):
    """copy(name, before, after, ...): --model=moe_<name> is moe.py with changes."""
    def make(name, *changes):
        with open(os.path.join(HERE, "extras", "moe.py")) as f:
            code = f.read()
        for before, after in zip(changes[::2], changes[1::2]):
            assert before in code
            code = code.replace(before, after)
        (models / f"moe_{name}.py").write_text(code)
        return f"moe_{name}"
    return make


@pytest.mark.parametrize("name", FAULTS)
def test_contract_says_what_to_change(tmp, copy, name):
    """One sentence, from the file alone."""
    sentence, *changes = FAULTS[name]
    faulty = copy(name.replace(" ", "_"), *changes)
    with pytest.raises(pytest.fail.Exception, match=sentence) as e:
        contract.test_contract_of_the_file(tmp, faulty)
    assert "\n" not in str(e.value) and e.value.__suppress_context__  # nor the error's traceback
    if name != "in place product":
        assert faulty in contract.WRONG  # so it is not trained
        return
    with pytest.raises(pytest.fail.Exception, match=sentence):  # the other modes are right
        contract.test_contract_modes(tmp, faulty, "selective-checkpointing")


# ---------- experts without tokens, in a copy that leaves them out ------------
# Some idle in each micro-batch. In a whole step none does, but expert 0, which is never used.


@pytest.fixture
def idle(copy):
    never = BRANCH.replace("if not", "if e == 0 or not")
    return copy("sparse", *IN_LIST, COMPUTE, never, "n_expert: int = 4", "n_expert: int = 8",
                "n_active: int = 2", "n_active: int = 1")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_contract_idle_experts_train_when_sharded(tmp, idle, world):
    """As in one process with the same rows, which has gradients of all but expert 0. That one
    AdamW leaves alone there. Sharded it has a gradient of zeros: its weights decay. DDP stops."""
    cfg = contract.small(tmp, idle, batch_size=1)
    lacking = []
    for micro in range(2):  # of the first two ranks
        ours = plain_model(cfg).train()
        ours(*Batches(cfg, World()).get(0, micro)[:2])[1].backward()
        lacking.append({name for name, p in ours.named_parameters() if p.grad is None})
    assert lacking[0] - lacking[1] and lacking[1] - lacking[0]  # else this proves nothing

    runs = contract.cases_of(tmp, idle, world, batch_size=1)
    apart = ("half", "muon", "compiled-ddp", "ddp-3")
    names = [name for name, (n, _) in contract.MODES.items()
             if n == world and not name.startswith(apart)]
    results = on_ranks(world, {name: runs[f"{idle}-{name}"] for name in names}, timeout=150)
    if world == 2:
        with pytest.raises(pytest.fail.Exception, match="ddp-2 does not run.*reduction") as e:
            contract.ran(results, "ddp-2")
        assert "\n" not in str(e.value)
        del results["ddp-2"]

    expected = contract.plain(tmp, idle, batch_size=1)
    unused = "transformer.h.1.mlp.c_fc.0"
    start = plain_model(cfg).get_parameter(unused)
    assert torch.equal(expected[2][unused], start)
    for name in results:
        run = f"{idle}-{name}"
        contract.compare(tmp, run, contract.ran(results, name), expected, "FSDP2 fills in zeros")
        left = read_ckpt(os.path.join(tmp, run))["model"][unused]
        assert 0.9 < left.norm() / start.norm() < 1  # it decays


def test_contract_run_without_flops_says_so_once(tmp, idle, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 1e12)  # else nobody counts
    rows = run_training(tmp, "idle-single", model=idle, **contract.KEYS)
    assert [row["mfu"] for row in rows] == [None] * 3
    assert len(re.findall("^mfu n/a: .* meta ", capsys.readouterr().out, re.M)) == 1
