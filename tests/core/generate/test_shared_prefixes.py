"""Rows that begin with the same tokens: which are grouped, and samples with and without groups."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.generate.runner import shared_prefixes
from sabia.core.generate.runner.shared_prefixes import SharedPrefixes
from sabia.core.model.storage import hub
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.kernels.attention import torch_cached
from sabia.kernels.row_products import torch_arrays


def alike(one: list[int], other: list[int]) -> int:
    """How many tokens at the beginning are equal."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip


def groups(shared: SharedPrefixes, rows: int) -> list[tuple[list[int], int]]:
    numbers = np.arange(rows)
    return [(numbers[one.rows].tolist(), one.slots) for one in shared.of(rows)]


def test_groups_of_random_prompts_share_what_they_say_and_save_as_much_as_pairs() -> None:
    draw = random.Random(0)
    for _ in range(200):
        trunk = [draw.randrange(9) for _ in range(300)]
        prompts = [
            trunk[: draw.choice([0, 40, 40, 300])] + [draw.randrange(9) for _ in range(50)]
            for _ in range(draw.randrange(1, 9))
        ]
        prompts = [one for one in prompts for _ in range(draw.choice([1, 1, 4]))]
        shared, adapters = SharedPrefixes(), np.array([draw.randrange(2) for _ in prompts])
        shared.admit(prompts, 0, 1, adapters)
        found = groups(shared, len(prompts))
        rows = [row for group, _ in found for row in group]
        assert len(rows) == len(set(rows))
        saved = sum(slots * (len(group) - 1) for group, slots in found)
        for group, slots in found:
            assert len({adapters[row] for row in group}) == 1
            assert min(alike(prompts[group[0]], prompts[row]) for row in group) >= slots >= 32
        for a, b in combinations(range(len(prompts)), 2):
            if adapters[a] == adapters[b]:
                common = alike(prompts[a], prompts[b])
                assert saved >= common or common < shared_prefixes.LEAST_SAVED


def test_rows_follow_their_prompts_and_new_weights_are_apart() -> None:
    prompt, other = list(range(300)), list(range(7, 307))
    shared = SharedPrefixes()
    shared.admit([prompt, other, prompt, prompt], 0, 1, np.zeros(4, np.int64))
    assert groups(shared, 4) == [([0, 2, 3], 300)]
    assert groups(shared, 3) == [([0, 2], 300)]
    shared.move(np.array([3]), np.array([1]))  # row 1 has ended
    assert groups(shared, 3) == [([0, 1, 2], 300)]
    shared.admit([prompt, prompt[:290]], 3, 2, np.zeros(2, np.int64))
    assert groups(shared, 5) == [([0, 1, 2], 300), ([3, 4], 290)]
    shared.admit([other], 1, 2, np.zeros(1, np.int64))  # the other rows have ended
    assert groups(shared, 2) == []


@pytest.mark.parametrize("window", [None, 40])
def test_samples_are_those_of_rows_alone(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts with a common beginning, of which the first ends first, so that rows move; new
    weights arrive before the last one begins."""
    monkeypatch.setattr(torch_arrays, "LEAST_BYTES", 0)
    tokenizer = train_bpe(["um e outro e mais um"] * 4, 300)
    config = new_config(hidden=32, layers=2, vocab=300, heads=4, kv_heads=2, context=256)
    if window:
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"],
                   "sliding_window": window}  # fmt: skip
    spec = from_config(config)
    weights = [{n: np.array(x) for n, x in hub.init_params(spec, s).items()} for s in (0, 1)]
    draw = np.random.default_rng(0)
    trunk = draw.integers(0, 300, 150).tolist()
    requests = [
        Request(
            trunk[:cut] + draw.integers(0, 300, 20).tolist(), 9 + 8 * min(n, 2), n=count, id=str(n)
        )
        for n, (cut, count) in enumerate([(150, 7), (150, 1), (90, 3), (90, 3)])
    ]
    used = list[int]()
    times = torch_cached.SharedSlots.times

    def counted(self: torch_cached.SharedSlots, *given: torch.Tensor) -> torch.Tensor:
        used.append(self.slots)
        return times(self, *given)

    monkeypatch.setattr(torch_cached.SharedSlots, "times", counted)
    results = []
    for grouped in (True, False):
        if not grouped:
            monkeypatch.setattr(SharedPrefixes, "of", lambda *_: [])
        engine = Engine(spec, weights[0], tokenizer)
        session, ended = engine.session(11, 256, 30), {}
        for request in requests:
            session.add(request)
        with session.runner.computing():
            for step in range(60):
                if step == 4:
                    session.replace(engine.placed(weights[1]), 1)
                for one in session.step() if session.busy else ():
                    ended[one.ticket, one.completion.sample] = one
        results.append(ended)
    assert set(used) == (set() if window else {150, 90})  # a ring has another order
    assert results[0].keys() == results[1].keys() and len(results[0]) == 14
    for name, one in results[0].items():
        other = results[1][name]
        assert one.completion.tokens == other.completion.tokens
        assert one.versions == other.versions
        np.testing.assert_allclose(one.completion.logprobs, other.completion.logprobs, atol=1e-5)
