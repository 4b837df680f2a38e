"""
Record what a function has the GPU do, and replay it: one launch by the host instead of thousands.
It helps where the GPU waits for the host. train.py takes it with --cuda_graph=True. It imports only
torch and fsdp.py, so you can copy both into your own project. The loop then reads:

    torch.cuda.set_stream(torch.cuda.Stream())  # first of all
    ...                                         # mesh, model, shard, optimizer

    def forward(x, y):
        return my_loss(model(x).float(), y) / n  # n micro-batches

    def forward_backward(x, y):
        loss = forward(x, y)
        loss.backward()
        return loss.detach()

    forward_backward = Recorded(model, forward_backward, per_step=n, forward=forward)
    for batches in steps:
        for i, (x, y) in enumerate(batches):
            set_grad_sync(model, is_last_micro_batch=i + 1 == n)
            loss = forward_backward(x, y)
        clip_grad_norm(model, 1.0)
        optimizer.step()
        zero_grad(model, optimizer, in_place=True)
    del forward_backward  # before dist.destroy_process_group()

The first calls run the function as it is: they compile it, connect its groups and make gradients.
Then it is recorded. A replay runs the same kernels on the same memory, and nothing else. So the
function
- takes tensors of the same shapes in each call (and other arguments that are equal), and returns a
  0-d tensor, which a later call overwrites;
- decides nothing on the host: no .item(), no `if tensor:`, no layer dropped by Python's random, and
  no number that differs from call to call, unless it is passed as a tensor;
- finds its parameters and gradients where they were: zero gradients in place;
- runs on one stream, which is not the default one, from the start of the run.
The GPU's random numbers follow the torch.manual_seed before the call.

It has run on an H200 (2026-11-28, torch 2.13), not between two GPUs. (PyTorch's
make_graphed_callables refuses modules with hooks, as FSDP2's units have; torch.compile's
mode="reduce-overhead" records only what is in its graphs.)
"""

import torch

from fsdp import inference


class Recorded:
    """function(*arguments) -> tensor, recorded as CUDA graphs and replayed. If it cannot be
    recorded, PyTorch's error comes with the line that waited for the GPU. RuntimeError if it
    decides something on the host, or if a call no longer fits what was recorded: see `state`.

    model: what the function trains.
    per_step: calls in a step. The first and the last have a recording of their own, and those
        between share one: FSDP2's first forward gathers the root, its last backward frees it.
    forward: a function that takes the same arguments, returns the same result, and calls no
        backward. The step after the recording compares one result with its replay's. Else a
        choice that was made while recording would be replayed for ever, unnoticed.
    warm_up: steps that run the function as it is. DDP takes 11, and FSDP2 one.
    """

    def __init__(self, model, function, per_step=1, forward=None, warm_up=12):
        self.model = model
        self.function = function
        self.per_step = per_step
        self.forward = forward
        self.warm_up = warm_up
        self.calls = 0
        # {which: (graph, its inputs, its result, `state` after it, gradients)}. The gradients are
        # only kept alive: else a new one could have the id of one that is gone.
        self.recordings = {}
        self.pool = torch.cuda.graph_pool_handle()  # one for all: a step replays them in order

    def __call__(self, *arguments):
        step, i = divmod(self.calls, self.per_step)
        self.calls += 1
        if step < self.warm_up:
            return self.function(*arguments)
        which = i == 0, i == self.per_step - 1
        if which not in self.recordings:
            self.recordings[which] = self.record(arguments)
        graph, inputs, result, state, _ = self.recordings[which]
        if self.state(arguments) != state:
            raise RuntimeError(
                "this call no longer fits the recording: the arguments' shapes and types, training "
                "modes, requires_grad, and where gradients lie (zero them in place) must stay")
        for own, given in zip(inputs, arguments):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        is_compared = self.forward and i == 0 and step == self.warm_up + 1
        if is_compared:
            # The replay draws the same random numbers again.
            with (torch.random.fork_rng([torch.cuda.current_device()]),
                  inference(self.model, training=True)):
                expected = self.forward(*arguments)
        graph.replay()
        # 1%: compiled without a backward, a function may round otherwise in bf16.
        if is_compared and not torch.allclose(result, expected, rtol=0.01, equal_nan=True):
            raise RuntimeError(
                f"a replay's result is {result:.4f}, and the function's {expected:.4f}: it decides "
                "something on the host, so do not record it")
        return result

    def state(self, arguments):
        """What a replay must find as it was."""
        return (
            [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in arguments],
            [module.training for module in self.modules],
            [(p.requires_grad, id(p.grad)) for p in self.params],
        )

    def record(self, arguments):
        if not self.recordings:  # only once: later FSDP2's root is gathered, in other parameters
            self.modules = list(self.model.modules())
            self.params = list(self.model.parameters())
        inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # thread_local: NCCL's watchdog may ask the GPU something meanwhile.
        with torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"):
            result = self.function(*inputs)
        return graph, inputs, result, self.state(arguments), [p.grad for p in self.params]

