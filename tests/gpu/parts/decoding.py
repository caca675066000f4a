"""Speed of generation: prefill and decoding of the 1B shape at 1 to 512 rows.

In BF16, for samples of one prompt too, beside `transformers`, and with weights in FP8 and 4 bits. A
step of decoding has to read the weights of all products and the keys and values of all rows; the
time of these bytes at the measured rate of a copy is the bound that `bandwidth_share` refers to.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from cases import Case, Device, Failed, Figures, best_seconds
from traces import read_trace, summarize
from trainers import median, peak, profiled, reset_peak, synchronize
from workloads import RandomParameters, llama, shape_spec

ROWS = (1, 8, 64, 512)
FEW_ROWS = (1, 64)  # of the cases beside them
TINY_ROWS = (1, 8)
SAMPLES = 16
PROMPT, NEW = 512, 64
TINY_PROMPT, TINY_NEW = 16, 7
WINDOW, TINY_WINDOW = 8, 3  # steps of decoding that are traced
FORMATS = {"fp8": "fp8", "4-bit": "w4a16"}  # of weights
CACHES = {"default": None, "static": "static"}  # of transformers, which compiles the second
TURNS = 2
# nats between log-probabilities in BF16; the tiny model's depend little on its layers
MEAN_GAP, TINY_MEAN_GAP = 0.03, 5e-4
CACHE_BYTES = 40 << 30
SLOWEST_SHARE = 0.1  # steps at the begin, which choose algorithms, are not counted


def cases(device: Device) -> Iterator[Case]:
    """BF16 at all numbers of rows, then what is beside it at few."""
    few = TINY_ROWS if device.tiny else FEW_ROWS
    for rows in TINY_ROWS if device.tiny else ROWS:
        yield Case(f"1B / bf16 / {rows} rows", lambda rows=rows: generation(device, rows))
    yield Case(f"1B / bf16 / {SAMPLES} samples of a prompt",
               lambda: generation(device, 1, SAMPLES))  # fmt: skip
    for rows in few:
        yield Case(f"1B / bf16 / {rows} rows / traced", lambda rows=rows: traced(device, rows))
    for name, scheme in FORMATS.items():
        for rows in few:
            yield Case(f"1B / {name} weights / {rows} rows",
                       lambda r=rows, s=scheme: generation(device, r, scheme=s))  # fmt: skip
    for cache in CACHES:
        for rows in few:
            yield Case(f"1B / bf16 / {rows} rows / transformers, {cache} cache",
                       lambda rows=rows, cache=cache: beside(device, rows, cache))  # fmt: skip


@functools.cache
def engine(device: Device, scheme: str) -> Any:
    """An engine that records the seconds of its steps; scheme: of the weights, '' for BF16."""
    import torch

    from sabia.core.generate.engine import Engine
    from sabia.core.generate.session import Session

    class TimedEngine(Engine):
        """seconds: of each prefill and of each step of decoding, with its rows and positions."""

        seconds: dict[str, list[tuple[float, int, int]]]

        def session(self, *sizes: int) -> Session:
            plain = super().session(*sizes)
            return TimedSession(self, plain.runner, sizes[0], sizes[2], plain.pages)

    class TimedSession(Session):
        """Records its steps in the engine."""

        def _prefill(self, group: Any, begun: Any) -> None:
            tokens = sum(len(waiting.request.prompt) for waiting in group)
            self._timed("prefill", tokens, 0, super()._prefill, group, begun)

        def _decode(self) -> None:
            longest = int(self.slots.inputs()[1].max()) + 1
            self._timed("decode", self.slots.active, longest, super()._decode)

        def _timed(self, kind: str, size: int, context: int, call: Any, *args: Any) -> None:
            synchronize(device)
            start = time.perf_counter()
            call(*args)
            synchronize(device)
            self.model.seconds[kind].append((time.perf_counter() - start, size, context))

    spec = shape_spec("1B", device)
    source = RandomParameters(spec, device)
    stored = _stored(source, scheme) if scheme else {}
    params = stored | {name: source.tensor(name).to(torch.bfloat16)
                       for name in source if name not in stored}  # fmt: skip
    tokenizer = SimpleNamespace(stop_ids=(), decode=lambda ids: "")
    made = TimedEngine(spec, params, tokenizer, "bfloat16", cache_bytes=CACHE_BYTES)
    made.seconds = {"prefill": [], "decode": []}
    wrong = [
        name
        for name, matrix in stored.items()
        if name.startswith("layers.0.")
        and not np.array_equal(made.params[name].to(torch.float32).cpu(), matrix.decoded())
    ]
    if wrong:
        raise Failed(f"decoded otherwise than by NumPy: {', '.join(wrong)}")
    return made


def _stored(source: RandomParameters, scheme: str) -> dict[str, Any]:
    """The matrices of all layers as files hold them, rounded to nearest.

    All layers have those of the first: rounding a whole model in NumPy takes minutes.
    """
    from sabia.core.numerics.compressed import encode_weight
    from sabia.core.numerics.scales import choose_scales, encode
    from sabia.core.numerics.schemes import SCHEMES
    from sabia.core.numerics.stored import StoredMatrix

    first, linear = {}, {t.name for t in source.spec.tensors() if t.linear}
    for name in (name for name in linear if name.startswith("layers.0.")):
        weight = source[name]
        rows, columns = weight.shape
        form = replace(SCHEMES[scheme], inputs=None)
        if form.tile[1]:
            form = form.with_group(128 if columns % 128 == 0 else 32)
        scales = choose_scales(weight, form, "absmax")
        parts = encode_weight(encode(weight, scales, form), scales, form)
        first[name.removeprefix("layers.0.")] = StoredMatrix(parts, form, (rows, columns))
    layers = len(source.spec.layers)
    return {f"layers.{n}.{name}": one for n in range(layers) for name, one in first.items()}


@functools.cache
def copy_bytes_per_s(device: Device) -> float:
    """Bytes read and written a second by a copy."""
    import torch

    source = torch.zeros((1 << 20) if device.tiny else (2 << 30), dtype=torch.uint8,
                         device=device.kind)  # fmt: skip
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device)


def generation(device: Device, prompts: int, n: int = 1, scheme: str = "") -> Figures:
    """Generate twice, the second time measured. Raises Failed where tokens differ or are few."""
    rate = copy_bytes_per_s(device)
    made = engine(device, scheme)
    requests, rows = _requests(made.spec.vocab_size, device, prompts, n), prompts * n
    first, _ = _generated(made, requests)
    reset_peak(device)
    second, total = _generated(made, requests)
    figures: Figures = {"tokens_per_s": 0.0} | peak(device)
    figures |= _prefill(made.seconds["prefill"])
    figures |= _decode(made, rate)
    new = requests[0].max_new_tokens
    figures["whole_tokens_per_s"] = rows * new / total
    lengths = {len(completion.tokens) for completion in second}
    if lengths != {new} or len(second) != rows:
        raise Failed(f"{len(second)} samples have {sorted(lengths)} tokens "
                     f"(expected {rows} of {new})", figures)  # fmt: skip
    pairs = zip(first, second, strict=True)
    same = sum(a.tokens == b.tokens for a, b in pairs)
    if same < rows:
        raise Failed(f"{rows - same} of {rows} samples differ in a repetition", figures)
    return figures


def _generated(made: Any, requests: Sequence[Any]) -> tuple[list[Any], float]:
    """(the samples, seconds of the whole call); the engine then has the seconds of its steps."""
    made.seconds = {"prefill": [], "decode": []}
    start = time.perf_counter()
    samples = made.generate(requests)
    return samples, time.perf_counter() - start


class _Closed(Exception):
    """The end of a window."""


@dataclass
class _Window:
    """Called before each step of an engine: profiles `steps` from number `first`, then raises."""

    device: Device
    first: int
    steps: int
    number: int = 0
    open: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __call__(self) -> None:
        if self.number == self.first:
            self.open.enter_context(profiled(self.device, self.trace))
        if self.number == self.first + self.steps:
            self.open.close()
            raise _Closed
        self.number += 1

    @property
    def trace(self) -> Any:
        """The path of the trace."""
        return self.device.scratch / "decoding.json"


def traced(device: Device, rows: int) -> Figures:
    """The share of a step of decoding in which the device runs nothing, in a window of steps.

    step_s is that of steps that are not traced, of which outside_share is outside of kernels.
    """
    made = engine(device, "")
    requests = _requests(made.spec.vocab_size, device, rows)
    for _ in range(2):
        _generated(made, requests)
    step_s = median([step[0] for step in made.seconds["decode"]])
    steps = TINY_WINDOW if device.tiny else WINDOW
    window = _Window(device, len(made.seconds["prefill"]) + 2, steps)
    made.on_step = window
    try:
        with window.open:
            made.generate(requests)
    except _Closed:
        pass
    finally:
        made.on_step = None
    found = summarize(read_trace(window.trace))
    traced_s = found.pop("traced_step_s") / steps
    found["launches"] /= steps
    kernels_s = traced_s * (1 - found["idle_share"])
    return {"step_s": step_s, "traced_step_s": traced_s, "kernels_s": kernels_s,
            "outside_share": 1 - kernels_s / step_s, "steps": steps} | found  # fmt: skip


@functools.cache
def peer(device: Device) -> Any:
    """The model of `transformers` in BF16, whose samples have no end."""
    import torch

    model = llama("1B", device).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def beside(device: Device, rows: int, cache: str) -> Figures:
    """`generate` of `transformers` in turns with ours: samples, equal weights and prompts.

    Raises Failed where its model gives our tokens other log-probabilities.
    """
    import torch

    made = engine(device, "")
    requests = _requests(made.spec.vocab_size, device, rows)
    new = requests[0].max_new_tokens
    ids = torch.tensor([request.prompt for request in requests], device=device.kind)
    model = peer(device)
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    options |= {"max_new_tokens": new, "pad_token_id": 0, "cache_implementation": CACHES[cache]}

    def theirs() -> Any:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    calls: dict[str, Callable[[], Any]] = {"": lambda: made.generate(requests), "peer_": theirs}
    times: dict[str, list[float]] = {name: [] for name in calls}
    results: dict[str, Any] = {}
    for turn in range(1 + TURNS):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            results[name] = call()
            synchronize(device)
            times[name] += [time.perf_counter() - start] if turn else []
    best = {name: min(seconds) for name, seconds in times.items()}
    figures: Figures = {f"{name}tokens_per_s": rows * new / s for name, s in best.items()}
    figures |= {"ratio_to_peer": best["peer_"] / best[""], "calls_s": times}
    if results["peer_"].shape != (rows, ids.shape[1] + new):
        raise Failed(f"samples of shape {list(results['peer_'].shape)}", figures)
    sample = results[""][0]
    with torch.inference_mode():
        tokens = torch.tensor([[*requests[0].prompt, *sample.tokens]], device=device.kind)
        logits = model(input_ids=tokens[:, :-1]).logits[0, -new:].float()
    drawn = logits.log_softmax(-1).gather(1, tokens[0, -new:, None])[:, 0].cpu().numpy()
    figures["logprob_gap"] = float(np.abs(drawn - np.array(sample.raw_logprobs)).mean())
    most = TINY_MEAN_GAP if device.tiny else MEAN_GAP
    if not figures["logprob_gap"] <= most:
        raise Failed(f"log-probabilities differ by {figures['logprob_gap']:.3g} on average "
                     f"(expected at most {most})", figures)  # fmt: skip
    return figures


def _requests(vocab: int, device: Device, prompts: int, n: int = 1) -> list[Any]:
    from sabia.core.generate.requests import Request

    prompt, new = (TINY_PROMPT, TINY_NEW) if device.tiny else (PROMPT, NEW)
    ids = np.random.default_rng(0).integers(0, vocab, (prompts, prompt)).tolist()
    return [Request(row, new, n=n, id=f"row {number}") for number, row in enumerate(ids)]


def _prefill(steps: list[tuple[float, int, int]]) -> Figures:
    seconds, tokens = sum(s[0] for s in steps), sum(s[1] for s in steps)
    return {"prefill_tokens_per_s": tokens / seconds, "prefill_s": seconds,
            "prefills": len(steps)}  # fmt: skip


def _decode(made: Any, rate: float) -> Figures:
    """Tokens a second of the median step, and its share of the bound by the bytes it reads."""
    steps = made.seconds["decode"]
    steps = steps[int(len(steps) * SLOWEST_SHARE) :]
    step_s = median([step[0] for step in steps])
    rows = steps[0][1]
    context = sum(step[2] for step in steps) / len(steps)
    weights, cache = _bytes_read(made, rows, context)
    bound = (weights + cache) / rate
    return {"tokens_per_s": rows / step_s, "step_s": step_s, "bandwidth_share": bound / step_s,
            "weight_bytes": weights, "cache_bytes": cache, "copy_gb_per_s": rate / 1e9}  # fmt: skip


def _bytes_read(made: Any, rows: int, context: float) -> tuple[float, float]:
    """Bytes of the weights of all products, and of the keys and values of all rows."""
    from sabia.core.ops.stored_torch import Codes
    from sabia.core.spec import matmul_parameter_count

    codes = [value for value in made.params.values() if isinstance(value, Codes)]
    size = made.params["embed"].element_size()
    shapes = [layer.mixer.cache_shapes().values() for layer in made.spec.layers]
    width = sum(heads * dims for layer in shapes for heads, dims in layer)
    plain = matmul_parameter_count(made.spec) - sum(math.prod(one.shape) for one in codes)
    weights = plain * size + sum(one.nbytes for one in codes)
    return weights, rows * context * width * size
