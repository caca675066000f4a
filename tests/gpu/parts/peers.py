"""Our training of the 1B shape beside `transformers`, in turns, from equal weights on equal rows.

Both have fp32 weights and AdamW state, compute in BF16 (ours by copies of the weights, theirs by
torch.autocast), update with torch's fused AdamW, clip the gradient's norm at 1, and accumulate the
gradients of micro-batches of one row. Theirs is LlamaForCausalLM with SDPA, with its own loss, and
gradient checkpointing where ours recomputes. Both are compiled as a whole, or neither is. Blocks of
steps alternate A/B/A/B, so that a clock that changes meets both. Both models stay in memory: the
peak of each is counted without what the other holds between steps.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from cases import Case, Comparison, Device, Failed, Figures
from trainers import (
    REMATS,
    Policy,
    Run,
    build,
    clear,
    compiler,
    fitting,
    median,
    peak,
    reset_peak,
    timed,
)
from workloads import llama, shape_spec, token_batch

LENGTH, TINY_LENGTH = 8192, 32
ROWS = 4
LEARNING_RATE = 1e-4
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0}
OTHER_STATE = 16  # bytes a parameter that the other trainer holds meanwhile
WARM_UP, BLOCK, TINY_BLOCK = 2, 4, 1  # steps
FIRST_LOSS, LATER_LOSSES = 2e-3, 2e-2  # relative differences allowed


def cases(device: Device) -> Iterator[Case]:
    """Compiled first, which is how both are used."""
    for compiled in (True, False):
        length = TINY_LENGTH if device.tiny else LENGTH
        run = Run("1B", length, compiled=compiled, step_tokens=length)  # of a micro-batch
        how = "compiled" if compiled else "eager"
        yield Case(f"1B / 8k rows / bf16 / {how}", lambda run=run: compared(run, device))


def compared(run: Run, device: Device) -> Figures:
    """Both trainers in turns, without recomputation if both fit. Raises Failed, Skipped."""
    spec = shape_spec(run.shape, device)
    memory = device.memory if device.cuda else float("inf")

    def use(policy: Policy) -> Figures:
        parameters = sum(tensor.size for tensor in spec.tensors())
        if policy.bytes + OTHER_STATE * parameters > memory and policy.remat != REMATS[-1]:
            raise RuntimeError("out of memory with both models, by the planner")
        return turns(run, policy, device)

    with compiler(device):
        try:
            figures, policy, refused = fitting(spec, run, device, use)
        finally:
            clear(device)
    losses = figures["losses"], figures["peer_losses"]
    figures |= {"remat": policy.remat, "refused": refused, "layers": len(spec.layers)}
    both = Comparison()
    both.add("first loss", losses[0][0], losses[1][0], FIRST_LOSS)
    both.add("later losses", np.array(losses[0]), np.array(losses[1]), LATER_LOSSES)
    return both.check(figures)


def turns(run: Run, policy: Policy, device: Device) -> Figures:
    """Warm both up, then measure in the order A/B/A/B."""
    spec = shape_spec(run.shape, device)
    batch = token_batch(spec.vocab_size, ROWS, run.length)
    before = _held(device)
    stepper = build(spec, run, policy, device, weight_decay=ADAM["weight_decay"],
        clip_norm=ADAM["clip_norm"], settings={k: ADAM[k] for k in ("beta1", "beta2", "eps")},
    )  # fmt: skip
    ours_held = _held(device) - before
    theirs = peer(run, policy, device, batch)
    number = 0

    def ours() -> float:
        nonlocal number
        loss = stepper.step(batch, LEARNING_RATE, number=number).loss
        number += 1
        return float(loss)

    trainers: dict[str, Callable[[], float]] = {"": ours, "peer_": theirs}
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    times: dict[str, list[float]] = {name: [] for name in trainers}
    peaks: Figures = {}
    for warm_up in (True, False, False):
        steps = (1 if device.tiny else WARM_UP) if warm_up else TINY_BLOCK if device.tiny else BLOCK
        for name, step in trainers.items():
            reset_peak(device)
            done = [timed(step, device) for _ in range(steps)]
            losses[name] += [loss for _, loss in done]
            times[name] += [] if warm_up else [seconds for seconds, _ in done]
            peaks |= {name + key: value for key, value in peak(device).items()}
    theirs_held = _held(device) - before - ours_held
    return _figures(run, times, losses) | _own(peaks, {"": theirs_held, "peer_": ours_held})


def _held(device: Device) -> int:
    import torch

    return torch.cuda.memory_allocated() if device.cuda else 0


def _own(peaks: Figures, others: dict[str, int]) -> Figures:
    """The peaks of tensors, each without what the other trainer holds."""
    names = [name for name in others if f"{name}peak_bytes" in peaks]
    return {f"{name}peak_bytes": peaks[f"{name}peak_bytes"] - others[name] for name in names}


def _figures(run: Run, times: dict[str, list[float]], losses: dict[str, list[float]]) -> Figures:
    seconds = {name: median(values) for name, values in times.items()}
    tokens = ROWS * run.length
    figures: Figures = {
        "tokens_per_s": tokens / seconds[""], "peer_tokens_per_s": tokens / seconds["peer_"],
        "ratio_to_peer": seconds["peer_"] / seconds[""], "step_s": seconds[""],
        "peer_step_s": seconds["peer_"], "blocks_s": {
            name or "ours": [round(s, 4) for s in values] for name, values in times.items()
        },
    }  # fmt: skip
    rounded = {name: [round(loss, 5) for loss in values] for name, values in losses.items()}
    figures |= {f"{name}losses": values for name, values in rounded.items()}
    if not all(np.isfinite(values).all() and values[-1] < values[0] for values in losses.values()):
        raise Failed(f"losses {rounded} (expected finite ones that fall)", figures)
    return figures


def peer(run: Run, policy: Policy, device: Device, batch: dict[str, Any]) -> Callable[[], float]:
    """A step of `transformers`' model with our initial weights; returns the mean loss."""
    import torch

    model = llama(run.shape, device)
    if policy.remat != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"], fused=True,
    )  # fmt: skip
    ids = torch.from_numpy(batch["input_ids"]).to(device.kind)

    def micro(row: Any) -> Any:
        with torch.autocast(device.kind, torch.bfloat16):
            return model(input_ids=row, labels=row, use_cache=False).loss

    forward = torch.compile(micro) if run.compiled else micro

    def step() -> float:
        total = torch.zeros((), device=device.kind)
        for row in ids.split(policy.micro_batch):
            loss = forward(row) / len(ids)  # rows have equal numbers of targets
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, ADAM["clip_norm"], foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step
