"""
fsdp.py function by function, on models that are not ours; and by the lines of its header. What
strategies make of it: ../test_fsdp.py.

    python -m pytest -q tests/test_fsdp_functions.py
"""

import os
import re
import shutil
import sys
import textwrap
import zlib
from functools import partial
from types import SimpleNamespace

import nets
import pytest
import torch
import torch.distributed as dist
from harness import HERE, python
from nets import Net, assert_exact, backward, cases, distance, fill, inputs, says, sharded, square
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import plain_gpt

import checks
import fsdp
import test_fsdp
from model import GPT

# ---------- alone, as its header says -------------------------------------------


class MyModel(nn.Module):
    """Somebody's: PyTorch's encoder layers."""

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

    def forward(self, x):
        x = self.embedding(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def my_initial_value(name, shape):
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.1 + float(name.endswith("norm.weight"))


def my_loss(logits, y):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def printed():
    """The code of fsdp.py's header, for ranks that are there, on CPUs, in fp32."""
    with open(os.path.join(HERE, "fsdp.py")) as f:
        header = re.search(r"your own project:\n\n(.*?)\n\nA \*unit\*", f.read(), re.S)[1]
    header = re.sub(r"^ *(torch.cuda.set_device|dist.\w+_process_group).*", "", header, flags=re.M)
    assert '"cuda"' in header
    header = header.replace('"cuda"', '"cpu"').replace("torch.bfloat16", "torch.float32")
    return textwrap.dedent(header)


def case_what_is_printed_shards_another_model():
    batches = torch.randint(50, (3, 2, 2, 6, 8), generator=torch.Generator().manual_seed(0))
    rank = dist.get_rank()
    # The same training in plain PyTorch: all ranks' rows as one batch.
    plain = MyModel()
    for name, p in plain.named_parameters():
        p.data.copy_(my_initial_value(name, p.shape))
    optimizer = torch.optim.AdamW(plain.parameters())
    for step in batches:
        for x, y in step:
            (my_loss(plain(x), y) / 2).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def require_equal(found, expected):
        for one, other in zip(found, expected, strict=True):
            assert distance([one], [other]) < 2e-5

    own = [[(x[rank::2], y[rank::2]) for x, y in step] for step in batches]
    mine = dict(MyModel=MyModel, my_initial_value=my_initial_value, my_loss=my_loss)
    scope = dict(vars(fsdp), checks=checks, rank=rank, steps=own, seed=0, **mine)
    exec(printed(), scope)
    state = scope["state"]
    assert abs(scope["norm"] - norm) < 1e-5 * norm
    require_equal([scope["logits"]], [plain(scope["x"])])
    expected = plain.state_dict()
    assert state.keys() == expected.keys()  # the tied head and the buffer are there
    if rank == 0:
        require_equal([state[name] for name in expected], expected.values())
    else:
        assert set(state.values()) == {None}


def test_it_needs_only_torch(tmp_path):
    for name in ("fsdp.py", "checks.py", "compare.py"):
        shutil.copy(os.path.join(HERE, name), tmp_path)
    p = python("-c", "import checks, fsdp", cwd=tmp_path, env=dict(PYTHONPATH=""))
    assert p.returncode == 0, p.stderr


# ---------- units ---------------------------------------------------------------


def test_units_by_size_are_the_innermost_that_are_large_enough():
    """c_fc and c_proj of the MLP have 3,720 and 3,630 parameters, attention's two matrices
    2,790 + 930 = 3,720; norms go to the root, and so does a tied embedding."""
    gpt = plain_gpt()
    expected = []
    for block in gpt.blocks:
        expected += [block.attn, block.mlp.c_fc, block.mlp.c_proj]
    assert fsdp.find_units(gpt, gpt.blocks, 3000) == expected


@pytest.mark.parametrize("vocab_size, tied, is_unit", [
    (9000, False, True), (9000, True, False), (200, False, False)])
def test_units_are_blocks_and_a_large_embedding_that_is_not_tied(vocab_size, tied, is_unit):
    sizes = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=vocab_size)
    gpt = plain_gpt(GPT if tied else test_fsdp.Model, **sizes)
    expected = [gpt.transformer.wte] * is_unit + list(gpt.blocks)
    twice = [*gpt.blocks, gpt.blocks[0]]
    assert fsdp.find_units(gpt, gpt.blocks) == fsdp.find_units(gpt, twice) == expected


def test_mesh_shares_a_copy_among_neighbours():
    """hybrid_shard: rank 5 of 8 shares a copy with rank 4, and the others have copies."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        mesh = fsdp.make_mesh("cpu", shard_group_size=2)
        assert mesh["shard"].mesh.tolist() == [4, 5]
        assert mesh["replicate"].mesh.tolist() == [1, 3, 5, 7]
        with pytest.raises(ValueError, match="groups of 3"):
            fsdp.make_mesh("cpu", 3)
    finally:
        dist.destroy_process_group()


def case_several_modules_may_be_one_unit():
    """Tied ones among them, as a list."""
    def net():
        model = Net()
        model.blocks[2].weight = model.blocks[0].weight
        return model

    for options in (dict(), dict(cpu_offload=0.5, prefetch_units=1)):
        with torch.device("meta"):
            model = net()
        sharded(model, [model.blocks[1], [model.blocks[0], model.blocks[2]]], **options)
        fill(model, net())
        with CommDebugMode() as counter, torch.no_grad():
            model(inputs(0))
        assert sum(counter.get_comm_counts().values()) == 3
        nets.reshard(model)
        assert_exact(model, net())
        assert model.blocks[2].weight is model.blocks[0].weight


class Reads(nn.Embedding):
    """Unlike its base's, its forward needs the table in backward."""

    def forward(self, x):
        return x + x @ self.weight


def case_a_table_that_forward_reads_is_gathered_for_backward():
    assert_exact(sharded(Net(lambda: Reads(8, 8))), Net(lambda: Reads(8, 8)))


# ---------- shard, and what it leaves alone ---------------------------------------


def case_buffers_values_and_marks_are_kept():
    """On meta and filled later, or with values from the start; offloaded; after frozen layers. In
    BatchNorm all ranks see the same rows."""
    def net():
        model = Net(nets.Normed)
        model.blocks[1].register_buffer("table", torch.ones(8), persistent=False)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p._no_weight_decay = True  # as Mamba and timm mark them
        return model

    def same(model, x):
        return square(model, inputs(0))

    for meta, frozen, offload in ((1, 0, 0), (1, 0, 1), (0, 0, 0.5), (0, 2, 0)):
        model, plain = net(), net()
        buffers = dict(plain.named_buffers())
        for each in (model, plain):
            each.blocks[:frozen].requires_grad_(False)
        if meta:
            for module in model.modules():
                for name, p in module.named_parameters(recurse=False):
                    marks = vars(p)
                    setattr(module, name, nn.Parameter(p.to("meta")))
                    vars(getattr(module, name)).update(marks)
        sharded(model, cpu_offload=offload)
        nothing = [p.to_local().isnan().all() for p in model.parameters()]
        assert all(nothing) if meta else not any(nothing)  # what is forgotten shows
        assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
        if meta:
            fill(model, plain)
        assert_exact(model, plain, same, limit=1e-5)
        for name, p in model.named_parameters():
            assert len(p.to_local()) == len(p) // 2
            assert getattr(p, "_no_weight_decay", False) == name.endswith("bias")


def case_a_value_of_another_shape():
    """Cut or broadcast, it would be taken; PyTorch's own load_state_dict refuses it too."""
    for t in (sharded(Net()).head.weight, Net().head.weight):
        for shape in ((9, 8), (7, 8), (1, 8), (8,), ()):
            a_slice = SimpleNamespace(get_shape=partial(list, shape))  # safetensors' have no .shape
            for full in (torch.zeros(shape), a_slice):
                with says(f"a value of shape {shape}, for one of (8, 8)"):
                    fsdp.write_full(t, full)


def case_what_is_not_cut_by_rows_is_refused():
    weight = sharded(Net()).head.weight.detach()
    strided = DTensor.from_local(
        weight.to_local(), weight.device_mesh, [_StridedShard(0, split_factor=2)])
    for t in (strided, weight.square().sum(0, keepdim=True)):
        with says(f"as {t.placements}: use t.full_tensor()"):
            fsdp.gather_full(t)
        with says(f"as {t.placements}: use t.full_tensor()"):
            fsdp.write_full(t, torch.zeros(t.shape))


def case_units_of_another_model_are_refused():
    for units in (Net().blocks, [[*Net().blocks]]):
        with says("a unit that is not inside the model"):
            sharded(Net(), units)


def test_allocate_keeps_values_ties_and_marks():
    model = Net(nets.Normed)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    fsdp.allocate(model, "cpu")
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    model.head.bias._no_weight_decay = True
    model.head.to("meta")
    model.prompt = model.head.bias  # tied
    fsdp.allocate(model, "cpu")
    assert model.prompt is model.head.bias and not model.head.weight.is_meta


# ---------- in the step -----------------------------------------------------------


def case_a_unit_that_one_rank_leaves_out():
    """A parameter without a gradient has zeros there, so nobody waits."""
    if not nets.FILLS_IN:
        return
    model, plain = sharded(nets.Skips(), []), nets.Skips()

    def loss(model, x):
        model.skipped = 1 if torch.equal(x, inputs(1)) else None
        return square(model, x)

    assert_exact(model, plain, loss)


def case_a_wrapper_is_looked_through():
    model = sharded(Net())
    wrapped = torch.compile(model, backend="eager")
    fsdp.set_grad_sync(wrapped, False, every=False)
    backward(wrapped)
    assert model.blocks[0].weight.grad is None  # not reduced yet
    fsdp.set_grad_sync(wrapped, True, every=False)
    backward(wrapped)
    plain = Net()
    backward(plain, lambda model, x: 2 * square(model, x))
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert abs(fsdp.clip_grad_norm(wrapped, 1.0) - norm) < 1e-4 * norm
    with fsdp.autocast(wrapped, "cpu", torch.bfloat16):
        assert not torch.is_autocast_enabled("cpu")
    with fsdp.inference(wrapped):
        wrapped(inputs(0))
    assert all(isinstance(p, fsdp.DTensor) for p in model.parameters())


def case_inference_leaves_nothing_gathered():
    """Nor anything of torch.inference_mode, in which no backward could use what is gathered."""
    model = sharded(Net())
    assert fsdp.clip_grad_norm(model, 1.0) == 0  # before any backward
    with torch.inference_mode(), fsdp.inference(model):
        model(inputs(0))
    assert_exact(model, Net())
    model = sharded(Net())  # somebody's teacher
    weight = model.head.weight
    outputs = []
    for _ in range(2):
        with fsdp.inference(model):
            outputs.append(model(inputs(0)))
        weight.data.mul_(2)  # this rank's rows, as an average of the student's
    assert distance(outputs[:1], outputs[1:]) > 0.1
    for options in (dict(), dict(reshard_after_forward=False), dict(prefetch_units=2)):
        model, plain = sharded(nets.Skips(), **options), nets.Skips()
        for skipped in (1, 2):  # while it may have been prefetched
            model.skipped = skipped
            with fsdp.inference(model):
                model(inputs(0))
        model.skipped = None
        with pytest.raises(ZeroDivisionError), fsdp.inference(model):
            hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
            model(inputs(0))
        hook.remove()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for p in (*model.parameters(), *plain.parameters()):
            p.data.mul_(2)  # of this rank's rows
        assert_exact(model, plain)


def test_inference_leaves_each_module_in_its_mode():
    class Merges(nn.Linear):
        """As LoRA does: its weights are merged for evaluation."""
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    model = Net(lambda: Merges(8, 8))
    model.blocks[1].eval()  # a frozen backbone's
    modes = [module.training for module in model.modules()]
    with fsdp.inference(model):
        assert not any(module.training for module in model.modules())
        assert [block.merged for block in model.blocks] == [True, True, True]
    with pytest.raises(SystemExit), fsdp.inference(model):
        sys.exit()  # what fails inside leaves nothing behind either
    assert [module.training for module in model.modules()] == modes
    assert [block.merged for block in model.blocks] == [False, True, False]


# ---------- whole tensors -----------------------------------------------------------


def case_a_value_in_bf16_fills_fp32_on_every_rank():
    layer = nn.Linear(12, 5)
    fsdp.shard(layer, [], fsdp.make_mesh("cpu"))
    whole = torch.arange(60.0).view(5, 12)
    for t in (layer.weight, torch.zeros(5, 12), torch.zeros(5, 12, dtype=torch.bfloat16)):
        fsdp.write_full(t, whole.bfloat16())
        first = 3 * dist.get_rank()  # rows 0 to 2, and 3 to 4
        is_sharded = t is layer.weight
        assert torch.equal(t.to_local() if is_sharded else t.float(),
                           whole[first:first + 3] if is_sharded else whole)


def test_whole_tensors_may_be_numbers_and_are_copies():
    t = torch.zeros(())
    fsdp.write_full(t, torch.tensor(3.0))
    whole = fsdp.gather_full(t)
    t += 1
    assert (whole, t) == (3, 4)


cases(globals())
