"""Greedy tokens and log-probabilities of the engine on the device against the CPU, in fp32.

Tokens are compared up to the first position where the two best logits are closer than NEAR_TIE on
the CPU: from there on, both devices may rightly go on differently.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import small_models
from cases import Case, Comparison, Device, Failed, Figures
from cpu_process import References

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Completion, Request
from sabia.core.model import forward
from sabia.core.spec import ModelSpec

MODELS = ("llama", "mistral", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3",
          "qwen3_next", "qwen3_5")  # fmt: skip
NEAR_TIE = 1e-3
LOGPROB = 5e-4  # nats; of logits around 10 fp32 knows 1e-4
SLOTS = 5


class Tokens:
    """A tokenizer of token numbers, as the engine needs one."""

    stop_ids = (1,)

    def decode(self, tokens: Any) -> str:
        """The numbers, one after the other."""
        return " ".join(map(str, tokens))


def requests(spec: ModelSpec, tiny: bool) -> list[Request]:
    """More samples than slots: greedy ones of prompts of many lengths, and a drawn one."""
    draw = np.random.default_rng(7)
    longest, new = (20, 8) if tiny else (150, 40)
    made = []
    for number, count in enumerate((1, 2, 1, 3, 1, 1, 2, 1)):
        prompt = draw.integers(2, spec.vocab_size, int(draw.integers(1, longest))).tolist()
        limit = int(draw.integers(2, new))
        made.append(Request(prompt, limit, temperature=float(number == 3), n=count, id=f"{number}"))
    return made


def generated(name: str, tiny: bool) -> tuple[Engine, list[Request], list[Completion]]:
    """All samples of the requests, on torch's default device."""
    spec, params = small_models.model(name, tiny)
    engine = Engine(spec, {k: 2 * v for k, v in params.items()}, Tokens(), slots=SLOTS)
    wanted = requests(spec, tiny)
    return engine, wanted, engine.generate(wanted)


def row_logprobs(engine: Engine, prompt: Any, tokens: list[int]) -> np.ndarray:
    """[new tokens, V] log-probabilities after a prompt, by one pass without a cache."""
    import torch

    ids = torch.tensor([[*prompt, *tokens]], device=engine.params["embed"].device)
    with torch.inference_mode():
        hidden = forward.hidden(engine.spec, engine.params, ids, engine.ops)
        logits = forward.logits(engine.spec, engine.params, hidden, engine.ops)
    return logits.log_softmax(-1)[0, len(prompt) - 1 : -1].cpu().numpy()


def reference(name: str, tiny: int) -> dict[str, np.ndarray]:
    """Tokens and log-probabilities of each sample on the CPU, and how close its best two were."""
    engine, wanted, completions = generated(name, bool(tiny))
    prompts = {request.name: request.prompt for request in wanted}
    arrays = {}
    for each in completions:
        best = np.sort(row_logprobs(engine, prompts[each.request_id], each.tokens), -1)
        head = f"{each.request_id}/{each.sample}"
        arrays[f"{head}/tokens"] = np.array(each.tokens)
        arrays[f"{head}/logprobs"] = np.array(each.raw_logprobs)
        arrays[f"{head}/gaps"] = best[:, -1] - best[:, -2]
    return arrays


def cases(device: Device) -> Iterator[Case]:
    """A model each."""
    references = References(__file__, device.scratch, MODELS, int(device.tiny))
    try:
        for name in MODELS:
            yield Case(name, lambda name=name: compare(name, device.tiny, references.get(name)))
    finally:
        references.close()


def compare(name: str, tiny: bool, expected: Mapping[str, np.ndarray]) -> Figures:
    """Tokens up to near-ties, and their log-probabilities, with and without a cache."""
    engine, wanted, completions = generated(name, tiny)
    requested = {request.name: request for request in wanted}
    differences, compared, total, wrong = Comparison(), 0, 0, []
    for each in completions:
        request, head = requested[each.request_id], f"{each.request_id}/{each.sample}"
        rows = row_logprobs(engine, request.prompt, each.tokens)
        chosen = rows[np.arange(len(each.tokens)), each.tokens]
        off = float(np.abs(chosen - each.raw_logprobs).max())
        differences.add(f"sample {head} by one pass", 1 + off, 1, LOGPROB)
        if request.temperature:
            continue
        tokens, gaps = expected[f"{head}/tokens"], expected[f"{head}/gaps"]
        ties = np.flatnonzero(gaps < NEAR_TIE)
        count = int(ties[0]) if len(ties) else len(tokens)
        compared, total = compared + count, total + len(tokens)
        if each.tokens[:count] != tokens[:count].tolist():
            wrong.append(head)
            continue
        off = np.abs(expected[f"{head}/logprobs"][:count] - each.raw_logprobs[:count])
        differences.add(f"sample {head} on the CPU", 1 + off.max(initial=0), 1, LOGPROB)
    figures = {"tokens": total, "compared": compared} | differences.figures()
    if wrong:
        raise Failed(f"other tokens in samples {', '.join(wrong)}", figures)
    if compared < total / 2:
        raise Failed("most samples have near-ties early: the models are not suited", figures)
    return differences.check(figures)
