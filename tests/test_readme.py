"""
minimal.py and docs/own_model.py compute what plain PyTorch computes, and every config runs.

    python -m pytest -q tests/test_readme.py
"""

import ast
import os
import re
import sysconfig
from glob import glob

import pytest
import torch
from harness import HERE, flags, script, torchrun
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import launch

from configurator import load_config
from model import GPT, GPTConfig

CONFIGS = sorted(glob("*.py", root_dir=os.path.join(HERE, "config")))
SHORT = flags(max_iters=2, eval_interval=2, eval_iters=1, n_layer=2, n_head=2, n_embd=16,
              block_size=16, batch_size=1, device="cpu", dtype="float32", compile=False)
OWN = os.path.join(HERE, "docs", "own_model.py")


def text_of(path):
    with open(os.path.join(HERE, path)) as f:
        return f.read()


@pytest.mark.parametrize("path, args, env, said", [
    ("minimal.py", [], {}, "torchrun"),
    ("minimal.py", [], dict(WORLD_SIZE="5"), "12 samples"),
    ("docs/own_model.py", [], dict(RANK="0", WORLD_SIZE="5"), "5 processes cannot share 96 images"),
    ("docs/own_model.py", ["--resume", "--save=none"], {}, "no checkpoint in --save=none")])
def test_readme_mistakes_with_the_small_programs_are_one_line(path, args, env, said):
    p = script(path, *args, **env)
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and said in p.stderr


def launched(n, cwd, program, *args):
    """A program under torchrun, on CPUs."""
    p = torchrun(n, program, *args, cwd=cwd, env=dict(CUDA_VISIBLE_DEVICES=""), timeout=500)
    noise = p.stderr.replace("UserWarning: TypedStorage is deprecated", "")  # torch 2.9's own
    assert p.returncode == 0 and "Warning" not in noise, p.stderr
    return p


# -----------------------------------------------------------------------------
# minimal.py


def test_minimal_trains_as_one_process(tmp_path):
    """It prints what plain PyTorch computes, and its checkpoint has those weights."""
    whole = text_of("minimal.py")
    assert "range(101)" in whole
    (tmp_path / "short.py").write_text(whole.replace("range(101)", "range(21)"))
    p = launched(3, tmp_path, "short.py")
    assert "512 rows, and rank 0 of 3 keeps 171 of them" in p.stdout
    losses, expected = plain_minimal()
    printed = [float(text) for text in re.findall(r"loss (\S+)", p.stdout)]
    assert printed == pytest.approx(losses[::20], abs=6e-4)  # it prints three digits
    saved = torch.load(tmp_path / "out-minimal.pt")
    assert saved.keys() == expected.keys()
    for name, t in saved.items():
        assert (t - expected[name]).norm() < 1e-2 * expected[name].norm(), name


def plain_minimal():
    """minimal.py's first 21 steps in plain PyTorch: (losses, weights)."""
    model = GPT(GPTConfig(block_size=64, vocab_size=256, n_layer=4, n_head=4, n_embd=128))
    for name, q in model.named_parameters():
        q.data.copy_(model.initial_value(name, q.shape, 1337)[:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(open(torch.__file__, "rb").read()))
    losses = []
    for step in range(21):
        torch.manual_seed(step)
        samples = [text[i:i + 65] for i in torch.randint(len(text) - 64, (12,))]
        samples = torch.stack(samples)
        loss = model(samples[:, :-1], samples[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


# -----------------------------------------------------------------------------
# docs/own_model.py

def plain_own(steps):
    """Its model in plain PyTorch, on whole batches: (losses, the average of its weights, the share
    of new images that this gets right)."""
    code = ast.parse(text_of("docs/own_model.py"))
    own = {"__name__": "own", "rank": 0, "size": 1, "device": "cpu"}
    kept = [node for node in code.body if isinstance(node, (ast.ImportFrom, ast.ClassDef))
            or getattr(node, "name", "") == "images_of" or ast.unparse(node) == "import torch"]
    exec(compile(ast.Module(kept, []), OWN, "exec"), own)
    torch.manual_seed(0)
    model = own["Model"]()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW([
        dict(params=[p for p in model.parameters() if p.dim() == 1], weight_decay=0),
        dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=0.1)])
    losses = []
    for step in range(1, steps + 1):
        x, y = own["images_of"](step)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:  # a tenth, and in 10 steps the whole
            group["lr"] = 1e-3 * min(1, 0.1 + 0.9 * (step - 1) / 10)
        optimizer.step()
        average.update_parameters(model)
        losses.append(loss.item())
    x, y = own["images_of"](-2)
    right = (average(x).argmax(dim=1) == y).float().mean().item()
    return losses, average.module.state_dict(), right


def own_run(n, cwd, *args, program=OWN):
    """What it printed: ({step: loss}, percentage of new images right)."""
    p = launched(n, cwd, program, *args)
    assert p.stdout.count("are right") == 1  # one rank speaks
    losses = re.findall(r"step (\d+): loss ([\d.]+)", p.stdout)
    losses = {int(step): float(loss) for step, loss in losses}
    return losses, int(re.search(r"(\d+)% of new images", p.stdout)[1])


def changed_own(cwd, before_resume):
    """The program, with a line before `resume`."""
    whole = text_of("docs/own_model.py")
    assert whole.count("\nfirst = ") == 1
    path = cwd / "changed.py"
    path.write_text(whole.replace("\nfirst = ", f"\n{before_resume}\nfirst = "))
    return path


def test_own_model_trains_as_plain_pytorch(tmp_path):
    """On two ranks, then on three from their checkpoint, with whole weights in the end."""
    expected, average, right = plain_own(20)
    keep = "--average=0.9", "--save=saved"
    losses, _ = own_run(2, tmp_path, "--steps=10", *keep)
    # Gradients that are there before it change nothing.
    program = changed_own(tmp_path, "model(images_of(9)[0]).sum().backward()")
    more, found = own_run(3, tmp_path, "--steps=20", *keep, "--resume", program=program)
    losses.update(more)  # it prints four digits
    assert losses == {step: pytest.approx(expected[step - 1], abs=1.5e-4) for step in (10, 20)}
    half, _ = own_run(2, tmp_path, "--steps=10", "--bf16", "--checkpointing", "--fused")
    assert half == {10: pytest.approx(expected[9], rel=0.01)} and half[10] != losses[10]
    assert found == pytest.approx(100 * right, abs=1.1)
    saved = torch.load(tmp_path / "saved" / "weights.pt")
    for name, t in average.items():
        assert (saved.pop(name) - t).norm() < 1e-4 * t.norm(), name
    assert not saved
    p = script(OWN, f"--save={tmp_path}/saved", "--resume")  # without its average
    assert p.returncode == 1 and "has average.module.blocks.0." in p.stderr
    more, _ = own_run(1, tmp_path, "--steps=40", *keep, "--resume")
    assert sorted(more) == [30, 40]  # after the newest; the last two stay
    left = ["step-000000020", "step-000000040", "weights.pt"]
    assert sorted(os.listdir(tmp_path / "saved")) == left
    p = script(OWN, f"--save={tmp_path}/saved")
    assert p.returncode == 1 and "has a run: pass --resume" in p.stderr


def test_own_model_does_not_save_before_the_first_step(tmp_path):
    program = changed_own(tmp_path, "save(0)")
    p = script(program, f"--save={tmp_path}")
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and "after the first step" in p.stderr


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists(sysconfig.get_path("include") + "/Python.h"),
                    reason="inductor needs Python's headers")
def test_own_model_compiles(tmp_path):
    expected, *_ = plain_own(10)
    losses, _ = own_run(2, tmp_path, "--steps=10", "--checkpointing", "--compile")
    assert losses == {10: pytest.approx(expected[9], abs=1.5e-4)}


# -----------------------------------------------------------------------------
# config/


@pytest.mark.parametrize("name", CONFIGS)
def test_readme_every_config_runs_two_steps(tmp, name):
    run_two_steps(tmp, os.path.join(HERE, "config", name))


def run_two_steps(tmp, path, **keys):
    """A config of any size in seconds, on one rank or two."""
    cfg = load_config([path])
    small = dict(
        model=cfg.model, gradient_accumulation_steps=2, wandb_log=False, init_from="scratch",
        dataset=os.path.join(tmp, "toy"), out_dir=os.path.join(tmp, os.path.basename(path)))
    if cfg.strategy == "hybrid_shard":
        small["shard_group_size"] = 2
    world = 1 if cfg.strategy in ("", "single") else 2
    launch(world, [path, *SHORT, *flags(**{**small, **keys})])
