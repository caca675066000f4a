"""Decoding with a cache gives the numbers of the whole sequence at once."""

from typing import Any

import numpy as np
import pytest

from sabia.core.errors import UsageError
from sabia.core.model import forward
from sabia.core.ops.kv_cache import KVCache
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config

from .conftest import CONFIGS, compiled, perturbed, states

PROMPTS = (9, 4, 12)
STEPS = 5
IDS = np.random.default_rng(3).integers(0, 293, (len(PROMPTS), max(PROMPTS) + STEPS))


def ragged_steps(spec: Any, params: Any, ops: Any, cache: Any, call: Any) -> list[np.ndarray]:
    """Hidden state of each row's last token after the prompt and after each step."""
    last = np.array(PROMPTS) - 1
    rows = np.arange(len(PROMPTS))
    prompt = IDS[:, : max(PROMPTS)]  # what lies right of a row's prompt is padding here
    positions = np.broadcast_to(np.arange(prompt.shape[1]), prompt.shape)
    x, cache = call(params, prompt, positions, cache)
    seen = [ops.to_numpy({"x": x})["x"][rows, last]]
    for step in range(STEPS):
        at = (last + 1 + step)[:, None]
        x, cache = call(params, IDS[rows[:, None], at], at, cache)
        seen.append(ops.to_numpy({"x": x})["x"][:, 0])
    return seen


@pytest.mark.parametrize("name", ["llama", "qwen3-window", "deepseek-v3", "minicpm3", "gpt-oss"])
def test_ragged_decoding_equals_whole_sequences(name: str, ops: Any) -> None:
    spec = from_config(CONFIGS[name])
    params = ops.to_device(perturbed(spec), "float32")

    def call(params: Any, ids: Any, positions: Any, cache: Any) -> Any:
        x = forward.hidden(spec, params, ids, ops, positions=positions, cache=cache)
        return x, cache

    call = compiled(ops, call)
    cache = KVCache.create(spec, len(PROMPTS), IDS.shape[1] + 3, ops)
    seen = ragged_steps(spec, params, ops, cache, call)
    whole = states(spec, params, IDS, ops)
    for row, length in enumerate(PROMPTS):
        ours = np.stack([step[row] for step in seen])
        assert np.abs(ours - whole[row, length - 1 : length + STEPS]).max() <= 1e-5


def test_a_shared_prompt_fans_out(tiny: Any, ops: Any) -> None:
    spec, arrays = tiny
    params = ops.to_device(arrays, "float32")
    cache = KVCache.create(spec, 1, 16, ops)

    def call(params: Any, ids: Any, positions: Any, cache: Any) -> Any:
        x = forward.hidden(spec, params, ids, ops, positions=positions, cache=cache)
        return x, cache

    call = compiled(ops, call)
    _, cache = call(params, IDS[:1, :9], np.arange(9)[None], cache)
    many = cache.select([0, 0, 0])
    x, _ = call(params, IDS[:, 12:13], np.full((3, 1), 9), many.upto(10))
    whole = states(spec, params, np.c_[IDS[[0, 0, 0], :9], IDS[:, 12]], ops)[:, -1]
    assert np.abs(ops.to_numpy({"x": x})["x"][:, 0] - whole).max() <= 1e-5


def test_upto_bounds_what_is_read_and_positions_must_fit(tiny: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    torch_ops = load_ops("torch")
    spec, arrays = tiny
    params = {name: x.cpu() for name, x in torch_ops.to_device(arrays, "float32").items()}
    cache = KVCache.create(spec, 1, 8, torch_ops, like=params["embed"])
    assert cache.slots == 8
    assert cache.reads_for(torch_ops.arange(3, params["embed"]), torch_ops) == 3
    assert cache.upto(5).reads_for(torch_ops.arange(3, params["embed"]), torch_ops) == 5
    for bound, length in ((None, 9), (3, 4), (9, 1)):
        with pytest.raises(UsageError, match="cache: position"):
            forward.hidden(spec, params, IDS[:1, :length], torch_ops, cache=cache.upto(bound))
