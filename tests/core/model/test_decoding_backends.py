"""The generation engine in both backends, for every family."""

from typing import Any

import numpy as np
import pytest
import torch

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Completion, Request
from sabia.core.model import forward
from sabia.core.ops.backend import load_ops
from sabia.core.spec import from_config

from .conftest import CONFIGS, perturbed

FAST = ["mistral", "qwen3.5"]
SLOW = ["llama", "llama3", "llama-bias", "qwen3", "qwen3-window", "olmo2", "gemma2", "gemma3",
        "gpt-oss", "phi3-short", "minicpm3", "deepseek-v3", "qwen3-next", "qwen3.5-moe",
        ]  # fmt: skip
VOCABULARY = 293


class Words:
    """A tokenizer of a model whose texts nobody reads."""

    stop_ids = ()

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def requests(count: int, new: int = 12) -> list[Request]:
    """Greedy and sampled continuations of prompts, every third of which begin equally."""
    draw, made = np.random.default_rng(7), list[Request]()
    common = draw.integers(0, VOCABULARY, 35).tolist()
    for number in range(count):
        prompt = draw.integers(0, VOCABULARY, int(draw.integers(1, 24))).tolist()
        prompt = common + prompt if number % 3 == 2 else prompt
        made.append(Request(prompt, new, float(number % 2), seed=number, n=1 + number % 2,
                            id=f"r{number}"))  # fmt: skip
    return made


def by_name(completions: list[Completion]) -> dict[tuple[str, int], Completion]:
    return {(one.request_id, one.sample): one for one in completions}


def plain_logprobs(engine: Engine, prompt: Any, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of the tokens by one pass of torch without a cache."""
    ops, ids = load_ops("torch"), torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        hidden = forward.hidden(engine.spec, engine.params, ids, ops)
        logits = forward.logits(engine.spec, engine.params, hidden, ops)
    rows = torch.log_softmax(logits[0, len(prompt) - 1 : -1].double(), -1)
    return rows.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def engine_of(name: str, backend: str, **options: Any) -> Engine:
    spec = from_config(CONFIGS[name])
    return Engine(spec, perturbed(spec), Words(), ops=load_ops(backend), **options)


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_both_backends_draw_the_tokens_of_plain_passes(name: str) -> None:
    theirs = engine_of(name, "torch")
    ours = engine_of(name, "jax", slots=5, shares_prefixes=True)
    asked, tolerance = requests(9), 2e-5 if "qwen3." in name or "next" in name else 1e-5
    expected, made = by_name(theirs.generate(asked)), by_name(ours.generate(asked))
    for request in asked:
        for number in request.samples:
            one, other = made[request.name, number], expected[request.name, number]
            for sample in (one, other):
                plain = plain_logprobs(theirs, request.prompt, sample.tokens)
                assert np.abs(plain - sample.raw_logprobs).max() <= tolerance
            if not request.temperature:
                assert one.tokens == other.tokens


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
@pytest.mark.parametrize("name", FAST)
def test_tokens_are_the_same_alone_and_in_batches(name: str, backend: str) -> None:
    asked = [Request(r.prompt, 12, float(n % 4 > 0), seed=n, id=r.id) for n, r in
             enumerate(requests(64))]  # fmt: skip
    whole = by_name(engine_of(name, backend, slots=64).generate(asked))
    for slots in (3, 17):
        made = by_name(engine_of(name, backend, slots=slots).generate(asked))
        assert {key: one.tokens for key, one in made.items()} == {
            key: one.tokens for key, one in whole.items()
        }
    alone = engine_of(name, backend)
    for request in asked[::9]:
        (one,) = alone.generate([request])
        assert one.tokens == whole[request.name, 0].tokens
