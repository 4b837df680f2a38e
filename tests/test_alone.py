"""
fsdp.py alone: copied into an empty directory it shards somebody else's model, by the lines that
its docstring shows. And models that are not ours: with buffers, with values, oddly used.

    python -m pytest -q tests/test_alone.py
"""

import ast
import copy
import os
import re
import shutil
import sys
import textwrap
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import HERE, on_ranks, shell, values
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import activations
import fsdp

# somebody's own program: a stack of PyTorch's encoder layers, which knows nothing of this project
PROGRAM = '''
import os, zlib
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 36)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(36, 3, 70, dropout=0.0, batch_first=True)
            for _ in range(4))
        self.head = nn.Linear(36, 50)
        self.head.weight = self.embedding.weight  # tied
        # On the CPU, since nobody could know its values on the meta device.
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 36, device="cpu"))

    def embed(self, x):
        x = self.embedding(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        return self.head(self.embed(x))

def my_initial_value(name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.1 + float(name.endswith("norm.weight"))

def my_loss(logits, y):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())

def tokens(step, i, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * i + rank)
    return torch.randint(50, (2, 3, 8), generator=generator)  # x, y

STEPS, MICRO_BATCHES, seed = 3, 2, 0
'''
ON_RANKS = '''
import checks
from fsdp import *

rank = int(os.environ["RANK"])
torch.cuda.set_device = print  # there is none
steps = [[tokens(s, i, rank) for i in range(MICRO_BATCHES)] for s in range(STEPS)]
DOCSTRING
rows = {name: p.to_local().shape for name, p in model.named_parameters()}
assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
found = dict(state=state, norm=norm, loss=loss.detach(), logits=logits, rows=rows)

for t in model.state_dict().values():  # all that rank 0 must send
    (t.to_local() if isinstance(t, DTensor) else t).zero_()
DOCUMENTED
with inference(model):
    found["embedded"] = model.embed(x)


def one_more_step():
    x, y = tokens(STEPS, 0, rank)
    my_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return [gather_full(p) for p in model.parameters()]


save("saved", STEPS)
found["after"] = one_more_step()
update_average(0.9)
swap_average()
found["average"] = [gather_full(p) for p in model.parameters()]
swap_average()
for p in model.parameters():  # all that a resumed run must set
    p.data.zero_()
    for t in optimizer.state[p].values():
        t.zero_()
assert resume("saved") == STEPS
found["resumed"] = one_more_step()
torch.save(found, f"found-{rank}.pt")
dist.barrier()
os._exit(0)
'''


def docstring_lines():
    with open(os.path.join(HERE, "fsdp.py")) as f:
        block = re.search(r"your own project:\n\n(.*?)\n\nA \*unit\*", f.read(), re.S)[1]
    return textwrap.dedent(block)


def documented_lines():
    """The code of the section "In your own project", and own_model.py's functions that it names,
    with the average as it says."""
    with open(os.path.join(HERE, "docs", "your_model.md")) as f:
        section = re.search(r"\n## In your own project\n(.*?)\n## ", f.read(), re.S)[1]
    with open(os.path.join(HERE, "docs", "own_model.py")) as f:
        own = f.read()
    functions = [node for node in ast.parse(own).body if getattr(node, "name", "") in OWN]
    assert len(functions) == len(OWN) and all(f"`{name}`" in section for name in OWN)
    average = re.search(r'`("average": .*?)`', section)[1]
    code = "\n".join(ast.get_source_segment(own, node) for node in functions)
    code, changed = re.subn(r'("step": \w+)}', rf"\1, {average}}}", code)
    assert changed == 2
    imports = re.search(r"^import torch.distributed.checkpoint .*\n", own, re.M)[0]
    imports += re.search(r"^from torch.distributed.checkpoint.state_dict .*\n", own, re.M)[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    return "\n".join([imports, code, *blocks])


OWN = ("save", "resume")


def one_process():
    """The same training in plain PyTorch: all ranks' rows as one batch."""
    scope = {}
    exec(PROGRAM, scope)
    model = scope["MyModel"]()
    for name, p in model.named_parameters():
        p.data.copy_(scope["my_initial_value"](name, p.shape))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        for i in range(2):
            x, y = torch.cat([scope["tokens"](step, i, rank) for rank in (0, 1)], dim=1)
            loss = scope["my_loss"](model(x), y) / 2
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = dict(norm=norm, loss=loss, logits=model(x), embedded=model.embed(x))
    before = copy.deepcopy(model)
    x, y = torch.cat([scope["tokens"](3, 0, rank) for rank in (0, 1)], dim=1)
    scope["my_loss"](model(x), y).backward()
    optimizer.step()
    pairs = list(zip(before.parameters(), model.parameters()))
    found["average"] = [(0.9 * p + 0.1 * later).detach() for p, later in pairs]
    return dict(found, model=before, after=[*model.parameters()])


def test_alone_it_shards_another_model(tmp_path):
    """Partial offload, selective checkpointing, accumulation, clipping, inference, full gather; and
    of docs/your_model.md: resuming, an average of the weights, another method than forward."""
    program = PROGRAM + ON_RANKS.replace("DOCSTRING", docstring_lines())
    program = program.replace("DOCUMENTED", documented_lines())
    program = re.sub(r"dist.destroy_process_group\(\).*\n", "", program, count=1)  # it goes on
    for printed, here in {'"nccl"': '"gloo"', '"cuda"': '"cpu"',
                          "torch.bfloat16": "torch.float32"}.items():
        assert printed in program
        program = program.replace(printed, here)
    (tmp_path / "program.py").write_text(program)
    shutil.copy(os.path.join(HERE, "fsdp.py"), tmp_path)
    shutil.copy(os.path.join(HERE, "checks.py"), tmp_path)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    p = shell(sys.executable, *launcher, "program.py", cwd=tmp_path, env=dict(PYTHONPATH=""))
    assert p.returncode == 0, p.stderr
    zero, one = (torch.load(tmp_path / f"found-{rank}.pt") for rank in (0, 1))
    expected = one_process()
    assert set(one["state"].values()) == {None}
    loaded = copy.deepcopy(expected["model"])
    for t in loaded.state_dict().values():
        t.zero_()
    loaded.load_state_dict(zero["state"])  # strict: the tied head and the buffer are there
    for (name, p), q in zip(loaded.state_dict().items(), expected["model"].state_dict().values()):
        assert (p - q).norm() <= 1e-5 * q.norm(), name
    for name, p in loaded.named_parameters():
        rows = [found["rows"][name][0] for found in (zero, one)]
        assert rows == [-(-len(p) // 2), len(p) // 2], name
    assert zero["norm"] == one["norm"] == pytest.approx(expected["norm"].item(), rel=1e-5)
    mean = (zero["loss"] + one["loss"]).item() / 2
    assert mean == pytest.approx(expected["loss"].item(), rel=1e-5)
    for name in ("logits", "embedded"):
        found = torch.cat((zero[name], one[name]))
        assert (found - expected[name]).norm() <= 2e-5 * expected[name].norm(), name
    for name, theirs in [("after", "after"), ("average", "average"), ("resumed", "after")]:
        for p, q in zip(zero[name], expected[theirs]):
            assert (p - q).norm() <= 1e-5 * q.norm(), name
    assert all(map(torch.equal, zero["resumed"], zero["after"]))


# ---------- models with buffers, models with values ----------------------------


class Scale(nn.Module):
    """No parameters; a buffer that checkpoints leave out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, 12), persistent=False)

    def forward(self, x):
        return x * self.table


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12, bias=False)  # BatchNorm would cancel it
        self.norm = nn.BatchNorm1d(12)
        self.scale = Scale()

    def forward(self, x):
        return x + self.scale(self.norm(self.linear(x)).relu())


class Net(nn.Module):
    """prompt is registered last and used first."""

    def __init__(self, layer=Layer, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(12, 5)
        self.prompt = nn.Parameter(torch.randn(12))

    def forward(self, x):
        x = x + self.prompt
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def three_steps(model, x):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        model(x).square().mean().backward()
        norm = fsdp.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return norm.item()


def inputs():
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(1))


def state_of(model):
    """As lists, which travel: {name: values}, of parameters gathered to rank 0."""
    full = {name: fsdp.gather_full(p) for name, p in model.named_parameters()}
    full.update(model.named_buffers())
    return {name: t.tolist() for name, t in full.items() if t is not None}


def case_model(meta, offload, freeze=0):
    """Three steps of a model with buffers: on meta, filled later, or with values from the start."""
    model = Net()
    if meta:
        given = dict(model.named_parameters())
        with torch.device("meta"):
            empty = Net()
        for module, filled in zip(empty.modules(), model.modules()):
            for key, buffer in filled.named_buffers(recurse=False):
                setattr(module, key, buffer)
        model = empty
    model.layers[:freeze].requires_grad_(False)
    before = {name: b.clone() for name, b in model.named_buffers()}
    fsdp.shard(model, model.layers, fsdp.make_mesh("cpu"), cpu_offload=offload)
    kept = [name for name, b in model.named_buffers() if torch.equal(b, before[name])]
    if meta:
        for name, p in model.named_parameters():
            fsdp.write_full(p, given[name].detach())
    rows = [len(p.to_local()) for p in model.parameters()]
    norm = three_steps(model, inputs())
    return dict(kept=kept == list(before), rows=rows, norm=norm, state=state_of(model))


def case_file_in_bf16():
    """Parameters from whole values of another dtype: on every rank the largest difference of its
    rows, or of its copy."""
    layer = nn.Linear(12, 5)
    fsdp.shard(layer, [], fsdp.make_mesh("cpu"))
    plain = torch.zeros(5, 12)
    in_bf16 = torch.zeros(5, 12, dtype=torch.bfloat16)
    whole = torch.arange(60.0).view(5, 12)
    first = int(os.environ["RANK"]) * 3  # rows 0 to 2, and 3 to 4
    found = []
    for t in (layer.weight, plain, in_bf16):
        fsdp.write_full(t, whole.bfloat16())
        own = t.to_local() if t is layer.weight else t
        expected = whole[first:first + 3] if t is layer.weight else whole
        found.append((own - expected).abs().max().item())
    return found


MODELS = {
    "meta": dict(meta=True, offload=0.0),
    "meta, offloaded": dict(meta=True, offload=1.0),
    "values": dict(meta=False, offload=0.0),
    "values, half offloaded": dict(meta=False, offload=0.5),
    "a prompt before frozen layers": dict(meta=False, offload=0.0, freeze=2),
}


class Table(nn.Embedding):
    """A unit whose forward, unlike its base's, needs the table in backward."""

    def forward(self, x):
        return x + x @ self.weight


def tables():
    return Net(lambda: Table(12, 12))


def case_table():
    model = tables()
    fsdp.shard(model, model.layers, fsdp.make_mesh("cpu"))
    return three_steps(model, inputs())


class Tied(nn.Module):
    """A table and a head that share their weight, and a norm between them: one unit, as a list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.table = nn.Linear(12, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def case_lists(offload, prefetch_units):
    """[the norms of three steps, units, is the weight still one?] where some units are lists."""
    with torch.device("meta"):
        model = Tied()
    together = [model.table, model.norm, model.head]
    units = [model.layers[0], (model.layers[1], model.layers[2]), together]
    fsdp.shard(model, units, fsdp.make_mesh("cpu"), cpu_offload=offload,
               prefetch_units=prefetch_units)
    for (_, p), q in zip(model.named_parameters(), Tied().parameters()):
        fsdp.write_full(p, q.detach())
    with CommDebugMode() as comm, torch.no_grad():
        model(inputs())
    with fsdp.inference(model):
        pass
    gathers = sum(comm.get_comm_counts().values())
    return [three_steps(model, inputs()), gathers, model.head.weight is model.table.weight]


def case_own_types():
    """How far a sharded model without a policy is from itself, in types of its own."""
    class Ends(nn.Module):
        def __init__(self, *dtypes):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(12, 12).to(dtype) for dtype in dtypes)
            for layer, dtype in zip(self.layers, dtypes):
                layer.requires_grad_(dtype != torch.bfloat16)

        def forward(self, x):
            for layer in self.layers:
                x = layer((x - 1.7e9).to(layer.weight.dtype))
            return x

    found = []
    for dtypes in ((torch.float64, torch.float64), (torch.float32,),
                   (torch.bfloat16, torch.float32)):
        x = 1.7e9 + inputs().double() * 8  # as Unix time, which no fp32 holds
        plain, model = Ends(*dtypes), Ends(*dtypes)
        fsdp.shard(model, model.layers[:1], fsdp.make_mesh("cpu"))
        out, expected = model(x), plain(x)
        out.sum().backward()
        expected.sum().backward()
        grads = [(p.grad.full_tensor() - q.grad).abs().max().item()
                 for p, q in zip(model.parameters(), plain.parameters()) if q.requires_grad]
        found.append([(out - expected).abs().max().item(), max(grads)])
        assert out.dtype == expected.dtype
    return found


def case_own_mesh():
    """With a mesh of one's own, with another name or none: [norm, a tensor out and in]."""
    found = []
    for names in (None, ("dp",)):
        torch.manual_seed(0)
        model = Net(lambda: nn.Linear(12, 12))
        whole = model.head.weight.detach().clone()
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=names)
        fsdp.shard(model, model.layers, mesh)
        model(inputs()).square().sum().backward()
        norm = fsdp.clip_grad_norm(model, 1.0).item()
        out = fsdp.gather_full(model.head.weight)
        fsdp.write_full(model.head.weight, 2 * whole)
        again = model.head.weight.full_tensor()
        found.append([norm > 0, out is None or torch.equal(out, whole),
                      torch.equal(again, 2 * whole)])
    return found


def case_misuse():
    """What each of these says, on this rank."""
    with pytest.raises(ValueError) as e:
        fsdp.make_mesh("cpu", 3)
    model = Net(lambda: nn.Linear(12, 12))
    mesh = fsdp.make_mesh("cpu")
    fsdp.shard(model, model.layers, mesh)
    with fsdp.autocast(model, "cpu", torch.bfloat16):
        is_autocast = torch.is_autocast_enabled("cpu")
    norm = fsdp.clip_grad_norm(model, 1.0).item()
    return dict(said=str(e.value), norm=norm, is_autocast=is_autocast)


LISTS = [dict(offload=0.0, prefetch_units=0), dict(offload=0.5, prefetch_units=1)]


@pytest.fixture(scope="module")
def found():
    cases = {name: (case_model, keys) for name, keys in MODELS.items()}
    cases["bf16"] = (case_file_in_bf16, {})
    cases["own mesh"] = (case_own_mesh, {})
    cases["table"] = (case_table, {})
    cases["own types"] = (case_own_types, {})
    for keys in LISTS:
        cases[str(keys)] = (case_lists, keys)
    return on_ranks(2, {**cases, "misuse": (case_misuse, {})})


def test_alone_a_file_in_bf16_fills_parameters_in_fp32_on_every_rank(found):
    assert values(found, "bf16") == 2 * [[0, 0, 0]]


@pytest.mark.parametrize("name", MODELS)
def test_alone_buffers_and_values_are_kept(found, name):
    """All ranks see the same rows, so BatchNorm's statistics are one process's too."""
    zero, one = values(found, name)
    expected = Net()
    expected.layers[:MODELS[name].get("freeze", 0)].requires_grad_(False)
    norm = three_steps(expected, inputs())
    lengths = [len(p) for p in expected.parameters()]
    assert zero["kept"] and one["kept"]
    assert (zero["rows"], one["rows"]) == ([-(-n // 2) for n in lengths], [n // 2 for n in lengths])
    assert zero["norm"] == pytest.approx(norm, rel=1e-5)
    theirs = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert zero["state"].keys() == theirs.keys()
    for key, t in theirs.items():
        torch.testing.assert_close(
            torch.tensor(zero["state"][key]), t.detach(), rtol=1e-5, atol=1e-6, check_dtype=False)


def test_alone_a_table_that_forward_reads_is_gathered_for_backward(found):
    assert values(found, "table") == 2 * [pytest.approx(three_steps(tables(), inputs()), rel=1e-5)]


@pytest.mark.parametrize("keys", LISTS)
def test_alone_several_modules_may_be_one_unit(found, keys):
    assert values(found, str(keys)) == 2 * [
        [pytest.approx(three_steps(Tied(), inputs()), rel=1e-5), 3, True]]


def test_alone_without_a_policy_nothing_is_cast(found):
    assert values(found, "own types") == 2 * [3 * [[0, 0]]]


def test_alone_the_last_dimension_of_any_mesh_shards(found):
    assert values(found, "own mesh") == 2 * [2 * [[True, True, True]]]


def test_alone_misuse_is_said(found):
    for misuse in values(found, "misuse"):
        assert "groups of 3" in misuse["said"]
        assert misuse["norm"] == 0  # before any backward
        assert not misuse["is_autocast"]  # FSDP2 casts by itself


def test_alone_allocate_keeps_values_and_ties():
    model = Net()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    fsdp.allocate(model, "cpu")
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    model.head.to("meta")
    model.prompt = model.head.bias  # tied
    fsdp.allocate(model, "cpu")
    assert model.prompt is model.head.bias and not model.head.weight.is_meta
    assert torch.equal(model.layers[0].norm.running_var, state["layers.0.norm.running_var"])
    moved = []
    with patch.object(torch.Tensor, "to", lambda t, device: moved.append([id(t), device]) or t):
        fsdp.allocate(model, "cuda")  # which need not be there
    everything = (*model.parameters(), *model.buffers())
    assert moved == [[id(t), "cuda"] for t in everything]


def case_last_block_kept():
    """All-gathers of a step, without and with the last block kept from forward to backward."""
    counts = []
    for keeps in (False, True):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        fsdp.shard(model, list(model)[:3], fsdp.make_mesh("cpu"))
        if keeps:
            model[2].set_reshard_after_forward(False)
        with CommDebugMode() as counter:
            model(torch.ones(2, 8)).sum().backward()
        counts.append(counter.get_comm_counts()[torch.ops.c10d._allgather_base_])
    return counts


def test_alone_last_block_kept_spares_one_gather():
    """docs/switches.md names the call."""
    assert values(on_ranks(2, {"": (case_last_block_kept, {})}), "") == [[7, 6]] * 2


def case_8_bits():
    """Two steps of a model whose weights are gathered in 8 bits; what was gathered, and used."""
    scope = {}
    with open(os.path.join(HERE, "docs", "switches.md")) as f:
        section = re.search(r"### Gathering in another form\n(.*?)\n## ", f.read(), re.S)[1]
    exec(re.search(r"```python\n(.*?)```", section, re.S)[1], scope)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 32, bias=False))
    plain = copy.deepcopy(model)
    for layer in model:
        layer.weight = nn.Parameter(scope["In8Bits"](layer.weight.detach()))
    fsdp.shard(model, list(model), fsdp.make_mesh("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    others = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    used = []

    def note(layer, args):
        used.append(layer.weight.detach().clone())

    model[0].register_forward_pre_hook(note)
    sent = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if "_allgather_base_" in str(op):
                sent.append(args[1].nbytes)
            return op(*args, **(kwargs or {}))

    losses = []
    for step in range(2):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        expected = plain[0].weight.detach().clone()
        with Watch():
            loss = model(x.chunk(2)[dist.get_rank()]).square().mean()
            loss.backward()
        theirs = plain(x).square().mean()
        theirs.backward()
        for one in (optimizer, others):
            one.step()
            one.zero_grad()
        dist.all_reduce(loss.detach_())
        losses.append((loss.item() / 2, theirs.item()))
        scales = expected.abs().amax(1, keepdim=True) / 127
        if step == 0:
            torch.testing.assert_close(used[0], (expected / scales).round() * scales)
        assert not torch.equal(used[step], expected)
    whole = fsdp.gather_full(model[0].weight)
    if whole is not None:  # rows that are updated are in fp32
        torch.testing.assert_close(whole.rows, plain[0].weight.detach(), atol=0.05, rtol=0)
    return sent, losses


def test_alone_weights_gathered_in_8_bits():
    """As docs/switches.md does it: a byte for each number and a scale for each row are sent."""
    for sent, losses in values(on_ranks(2, {"": (case_8_bits, {})}), ""):
        first = 8 * 32 + 8 * 4  # of a rank's 8 rows
        second = 16 * 16 + 16 * 4
        assert set(sent) == {first, second} and len(sent) == 2 * 4
        for ours, theirs in losses:
            assert ours != theirs and ours == pytest.approx(theirs, rel=0.03)


def test_alone_inference_leaves_each_module_in_its_mode():
    model = Net()
    model.layers[1].eval()  # a frozen backbone's
    modes = [module.training for module in model.modules()]
    with fsdp.inference(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(SystemExit), fsdp.inference(model):
        sys.exit()  # what fails inside leaves nothing behind either
    assert [module.training for module in model.modules()] == modes


def test_alone_inference_calls_a_train_of_the_models_own():
    class Merges(nn.Linear):
        """As LoRA does: its weights are merged for evaluation."""
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = Net(lambda: Merges(12, 12))
    model.layers[1].eval()
    with fsdp.inference(model):
        assert [layer.merged for layer in model.layers] == [True, True, True]
    assert [layer.merged for layer in model.layers] == [False, True, False]


def test_alone_a_number_is_written_whole():
    t = torch.zeros(())
    fsdp.write_full(t, torch.tensor(3.0))
    assert t == 3


def test_alone_what_is_gathered_is_a_copy():
    t = torch.zeros(3)
    whole = fsdp.gather_full(t)
    t += 1
    assert whole.tolist() == [0, 0, 0]


def test_alone_checkpointing_none_is_none():
    layer = Layer()
    activations.checkpoint_activations([layer], "none")
    assert "forward" not in vars(layer)
    with pytest.raises(ValueError):
        activations.checkpoint_activations([layer], "nothing")
    for mode in ("none", "selective"):  # what is offloaded is what "full" keeps
        with pytest.raises(ValueError, match="offload_to_host"):
            activations.checkpoint_activations([layer], mode, offload_to_host=True)
