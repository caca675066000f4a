"""Pages of what prompts begin with, and caches that stay within their memory."""

import os
from pathlib import Path

import numpy as np
import pytest
from hybrid_models import CONFIGS, hybrid

from sabia.core.errors import UsageError
from sabia.core.generate.engine import Engine
from sabia.core.generate.pages import PAGE, PageTable
from sabia.core.generate.requests import Completion, Request
from sabia.core.generate.runner.memory import _host_free
from sabia.core.generate.session import Session
from sabia.core.model import forward
from sabia.core.parallel.build_ops import load_ops
from sabia.core.spec import from_config, new_config

VOCABULARY = 211


class Words:
    """A tokenizer of a model whose texts nobody reads."""

    stop_ids = ()

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def engine(**options: object) -> Engine:
    config = new_config("qwen3", hidden=48, layers=3, heads=4, kv_heads=2, ffn=80, context=512,
                        vocab=VOCABULARY)  # fmt: skip
    config |= {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    spec, draw = from_config(config), np.random.default_rng(0)
    params = {
        t.name: (draw.standard_normal(t.shape) * 1.2 * t.shape[-1] ** -0.5).astype(np.float32)
        if len(t.shape) > 1 else np.ones(t.shape, np.float32)
        for t in spec.tensors()
    }  # fmt: skip
    return Engine(spec, params, Words(), **options)  # type: ignore[arg-type]


def run(session: Session, *requests: Request) -> dict[str, Completion]:
    """The samples of requests that arrive now."""
    for request in requests:
        session.add(request)
    made = {}
    with session.runner.computing():
        while session.busy:
            made |= {one.completion.request_id: one.completion for one in session.step()}
    return made


def prompts(count: int, common: int, tail: int) -> list[list[int]]:
    draw = np.random.default_rng(3)
    shared = draw.integers(0, VOCABULARY, common).tolist()
    return [shared + draw.integers(0, VOCABULARY, tail).tolist() for _ in range(count)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each later pass of the model."""
    tokens, hidden = list[int](), forward.hidden_and_stats

    def pass_(spec, params, ids, ops, **options):  # type: ignore[no-untyped-def]
        tokens.append(ids.shape[1] * len(ids))
        return hidden(spec, params, ids, ops, **options)

    monkeypatch.setattr(forward, "hidden_and_stats", pass_)
    return tokens


@pytest.mark.parametrize("name", ["window", *CONFIGS])
def test_later_prompts_go_on_after_earlier_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine() if name == "window" else Engine(*hybrid(name), Words())
    session = made.session(4, 256, 8, page_memory=1 << 24)
    asked = [Request(prompt, 8, 0.0, id=str(n)) for n, prompt in enumerate(prompts(4, 150, 30))]
    alone = {one.request_id: one for one in made.generate(asked)}
    tokens = counted(monkeypatch)
    for number, request in enumerate(asked):
        tokens.clear()
        (one,) = run(session, request).values()
        assert one.tokens == alone[one.request_id].tokens
        assert np.allclose(one.raw_logprobs, alone[one.request_id].raw_logprobs, atol=5e-5)
        # a state is kept where the second prompt parts from the first
        assert tokens[0] == 180 if number == 0 and name == "window" else sum(tokens) <= 180 + 7
        if number > (0 if name == "window" else 1):
            assert sum(tokens) == 180 - 144 + 7
    session.replace(made.params, 1)
    tokens.clear()
    run(session, asked[0])
    assert sum(tokens) == 180 + 7  # pages of other weights are not used


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_the_next_turn_goes_on_after_the_reply(
    backend: str,
) -> None:
    config = new_config(hidden=48, layers=1, heads=4, kv_heads=2, ffn=80, context=512,
                        vocab=VOCABULARY)  # fmt: skip
    spec = from_config(config)
    draw = np.random.default_rng(0)
    params = {t.name: draw.standard_normal(t.shape).astype(np.float32) / 5 for t in spec.tensors()}
    made = Engine(spec, params, Words(), ops=load_ops(backend))
    session = made.session(3, 250, 90, page_memory=1 << 24, keeps_replies=True)
    first, other = (Request(p, 60, 0.0, id=str(n)) for n, p in enumerate(prompts(2, 5, 30)))
    begun = session.pages.begin(first.prompt)
    assert not begun.pages
    replies = run(session, first, other)
    turn = [*first.prompt, *replies["0"].tokens, 1, 2, 3]
    assert len(session.pages.begin(turn)) == 80  # of 95 tokens, of which 94 are in the cache
    (after,) = run(session, Request(turn, 20, 0.0, id="next")).values()
    (alone,) = made.generate([Request(turn, 20, 0.0, id="next")])
    assert after.tokens == alone.tokens
    assert np.allclose(after.raw_logprobs, alone.raw_logprobs, atol=1e-5)
    later = session.pages.begin([*turn, *after.tokens])
    session.replace(made.params, 1)
    assert len(later) == 112 and not session.pages.begin(turn).pages


def test_full_pages_give_way_to_new_ones() -> None:
    made = engine()
    session = made.session(2, 256, 4, page_memory=12 * made.row_bytes(PAGE), most_pages=12)
    asked = [Request(p, 4, 0.0, id=str(n)) for n, p in enumerate(prompts(9, 40, 60))]
    alone = {one.request_id: one.tokens for one in made.generate(asked)}
    for request in (*asked, *asked):
        assert run(session, request)[request.name].tokens == alone[request.name]
    assert len(session.pages._pages) <= session.pages.size == 12


def test_a_table_keeps_its_tree_whole() -> None:
    draw, table = np.random.default_rng(1), PageTable(20, states=3)
    for _ in range(300):
        ids = draw.integers(0, 2, int(draw.integers(1, 9)) * PAGE) // 2  # few different beginnings
        ids[::PAGE] = draw.integers(0, 3, len(ids[::PAGE]))
        prompt, adapter = ids.tolist(), str(draw.integers(2))
        begun = table.begin(prompt, adapter)
        assert len(begun) < len(prompt)
        table.keep([prompt], [begun], [adapter])
        numbers = set(table._pages)
        assert numbers | set(table._free) == set(range(20)) and not numbers & set(table._free)
        parents = [page.key[0] for page in table._pages.values()]
        assert {parent for parent in parents if isinstance(parent, int)} <= numbers
        assert all(page.continuations == parents.count(n) for n, page in table._pages.items())
        states = [page.state for page in table._pages.values() if page.state >= 0]
        assert sorted([*states, *table._free_states]) == [0, 1, 2]


def test_layers_with_a_window_keep_only_that() -> None:
    made = engine()
    long, longer = made.row_bytes(256), made.row_bytes(512)
    assert longer - long < 256 * made.row_bytes(1) // 2  # one layer of three has no window
    asked = [Request(p, 60, 0.0, id=str(n)) for n, p in enumerate(prompts(3, 2, 20))]
    ids = {one.request_id: one for one in made.generate(asked)}
    for request in asked:  # 80 tokens over windows of 24
        one = ids[request.name]
        whole = Request([*request.prompt, *one.tokens], 1, echo=True)
        session = made.session(1, 96, 1)
        session.add(whole)
        with session.runner.computing():
            (ended,) = session.step()
        assert ended.echo is not None
        given = ended.echo.logprobs[len(request.prompt) - 1 :]
        assert np.abs(np.array(given) - one.raw_logprobs).max() <= 1e-5


def test_requests_wait_for_memory_and_what_never_fits_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = engine()
    made.cache_bytes = 3 * made.row_bytes(64)
    many = Request(prompts(1, 5, 5)[0], 40, seed=1, n=11)  # of which three are in memory at a time
    plain = engine().generate([many])
    assert [one.tokens for one in made.generate([many])] == [one.tokens for one in plain]
    monkeypatch.setattr("sabia.core.generate.engine.cache_memory", lambda array: 1000)
    made.cache_bytes = 1000
    with pytest.raises(UsageError, match=r"a sample of 50 tokens needs .* at most 1 KB"):
        made.generate([many])


def test_free_memory_is_that_of_the_control_group(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:  50 kB\n")
    assert _host_free(tmp_path, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("40960\n")
    (tmp_path / "memory.current").write_text("960\n")
    assert _host_free(tmp_path, tmp_path) == 40_000
    (tmp_path / "memory.max").write_text("max\n")
    assert _host_free(tmp_path, tmp_path) == 50 * 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_on_a_cpu_takes_memory_when_it_is_written(dtype: str) -> None:
    ops = load_ops("torch")
    before = _resident()
    cache = ops.zeros((1 << 20, 16, 16), dtype)  # 512 MiB or more
    assert _resident() - before < 64 << 20
    cache[::4096] = 1.5
    assert float(cache[::2048].float().sum()) == 256 * 256 * 1.5
    assert ops.zeros((0, 3), dtype).shape == (0, 3)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
