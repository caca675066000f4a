"""`sabia eval` through kills: what is finished is neither lost nor computed or paid again."""

import importlib.util
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from waiting import HANG_S, until

pytest.importorskip("torch")
spec = importlib.util.spec_from_file_location(
    "openai_stub", Path(__file__).parents[1] / "openai_stub.py"
)
openai_stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openai_stub)
COMMAND = [sys.executable, "-m", "sabia.cli.main", "eval"]
ITEMS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and tasks of the kinds of which each batch, document or answer is kept."""
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    root = tmp_path_factory.mktemp("kills")
    tokenizer = train_bpe(["quantos são dois mais três? são cinco. 0123456789"] * 4, 300)
    tokenizer.save(root / "t")
    for name, hidden, layers in (("slow", 256, 8), ("quick", 32, 2)):
        shape = {"hidden": hidden, "layers": layers, "heads": 4, "vocab": tokenizer.vocab_size}
        made = from_config(new_config(**shape, context=512))
        hub.save_model(root / name, made, hub.init_params(made, 0), tokenizer_from=root / "t")
    draw = random.Random(0)
    rows = [
        {"id": f"s{i}", "q": "mais três " * draw.randint(1, 40), "options": [f"são {i}", "dois"],
         "gold": i % 2, "answer": "7", "text": f"{i} são cinco " * 60}
        for i in range(ITEMS)
    ]  # fmt: skip
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = 'prompt = "{{q}}"\n'
    tasks = {
        "mc": f'kind = "multiple_choice"\nchoices = "options"\nanswer = "gold"\n{asked}',
        "prose": 'kind = "perplexity"\n',
        "said": 'kind = "exact_match"\nverifier = "contains"\nmax_new_tokens = 200\n'
        f'temperature = 1.0\nsamples = 2\nstop = ["7", "ão"]\n{asked}',
    }
    for name, text in tasks.items():
        (root / f"{name}.toml").write_text(f'name = "{name}"\ndata = "rows.jsonl"\n{text}')
    return root


def words(folder: Path, model: object, out: Path, cache: Path, *tasks: str) -> list[str]:
    given = [part for task in tasks for part in ("--task", folder / f"{task}.toml")]
    return [*COMMAND, *map(str, (*given, "--model", model, "-o", out, "--judge-cache", cache))]


def keys(cache: Path) -> list[str]:
    """The key of every complete line that was ever written to a cache."""
    lines = [line for path in cache.rglob("calls-*.log") for line in path.open("rb")]
    return [line[:64].decode() for line in lines if line.endswith(b"\n")]


def killed(line: list[str], cache: Path, total: int, draw: random.Random) -> Counter[int]:
    """Exit codes of starts that get a signal, at random once some more results are kept or at any
    time before, twenty of them kill -9 and ten SIGTERM; then the last start ends by itself."""
    codes, signals = Counter[int](), [signal.SIGKILL] * 20 + [signal.SIGTERM] * 10
    draw.shuffle(signals)
    for number, one in enumerate(signals):
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        before = len(keys(cache))
        step = max(1, (total - before) // (len(signals) - number))
        goal = min(before + draw.randint(0, step), total)
        try:
            until(lambda goal=goal: len(keys(cache)) >= goal, process)
        except AssertionError:
            process.kill()
            raise AssertionError(process.communicate()[1].decode()) from None
        time.sleep(draw.random() / 4)
        process.send_signal(one)
        message = process.communicate(timeout=HANG_S)[1].decode()
        codes[process.returncode] += 1
        # -15: it came before the handler was there
        assert process.returncode in (0, -9, -15, 75), message
    done = subprocess.run(line, capture_output=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr.decode()
    return codes


@pytest.mark.slow
def test_a_local_model_goes_on_where_it_was_killed(folder: Path, tmp_path: Path) -> None:
    tasks = ("mc", "prose", "said")
    line = words(folder, folder / "slow", tmp_path / "whole.parquet", tmp_path / "a", *tasks)
    assert subprocess.run(line, capture_output=True, timeout=HANG_S).returncode == 0
    total = len(keys(tmp_path / "a"))
    # a question or document each, and two answers
    assert total == len(set(keys(tmp_path / "a"))) == ITEMS * 4
    line = words(folder, folder / "slow", tmp_path / "s.parquet", tmp_path / "b", *tasks)
    codes = killed(line, tmp_path / "b", total, random.Random(5))
    assert codes[-9] > 10
    written = keys(tmp_path / "b")
    assert len(written) == len(set(written)) == total, "a finished result was computed again"
    assert pq.read_table(tmp_path / "s.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))


@pytest.mark.slow
def test_no_finished_call_of_a_server_is_paid_twice(folder: Path, tmp_path: Path) -> None:
    def answer(text: str) -> str:
        return f"{len(text)} is 7" if len(text) % 3 else "no"

    rows, total = [], 0
    for name in ("whole", "s"):
        with openai_stub.Stub(answer, latency_s=0.02) as stub:
            model, out, cache = f"m={stub.url}#m", tmp_path / f"{name}.parquet", tmp_path / name
            line = [*words(folder, model, out, cache, "said"), "--concurrency", "2"]
            lost = 0
            if name == "whole":
                assert subprocess.run(line, capture_output=True, timeout=HANG_S).returncode == 0
            else:
                lost = 2 * killed(line, cache, total, random.Random(7))[-9]
            written = keys(cache)
            assert len(written) == len(set(written)), "a finished call was sent again"
            # only of the two calls in flight at a kill -9 the reply can be lost
            assert sum(stub.delivered.values()) <= len(written) + lost
            total = total or len(written)  # equal prompts are one call
            assert len(written) == total
        rows.append(pq.read_table(out))
    assert rows[0].equals(rows[1])


@pytest.mark.parametrize("task", ["mc", "said"])
def test_a_stop_signal_ends_within_a_step(
    task: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives during a forward pass; no other one begins."""
    from in_process import stage

    from sabia.core import stop
    from sabia.core.errors import Interrupted
    from sabia.core.model import forward

    passes, hidden = Counter[str](), forward.hidden_and_stats

    def counted(*given: object, **named: object) -> object:
        passes["all"] += 1
        if passes["all"] == 2:
            stop._received.append(signal.SIGTERM)
        return hidden(*given, **named)

    monkeypatch.setattr(stop, "_received", [])
    monkeypatch.setattr(forward, "hidden_and_stats", counted)
    settings = {"task": (str(folder / f"{task}.toml"),), "model": (str(folder / "quick"),)}
    with pytest.raises(Interrupted):
        stage("eval", out=tmp_path / "s.parquet", judge_cache=tmp_path / "c", **settings)
    # the second pass is that of the first options, which follows what all options share
    assert passes["all"] == 2


def test_finished_results_need_no_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from in_process import stage

    from sabia.core.recipes import evaluated_models

    load: Callable = evaluated_models.load_stored
    loaded: list[object] = []
    monkeypatch.setattr(
        evaluated_models, "load_stored", lambda *given: loaded.append(given) or load(*given)
    )
    given = {"model": (str(folder / "quick"),), "judge_cache": tmp_path / "c", "limit": 6,
             "task": tuple(str(folder / f"{t}.toml") for t in ("mc", "prose", "said"))}  # fmt: skip
    for name, more in (("a", {}), ("b", {}), ("c", {"force": True})):
        stage("eval", out=tmp_path / f"{name}.parquet", **given, **more)
        assert len(loaded) == {"a": 1, "b": 1, "c": 2}[name]
    tables = [pq.read_table(tmp_path / f"{name}.parquet") for name in "abc"]
    assert tables[0].equals(tables[1]) and tables[0].equals(tables[2])


def test_an_interrupted_run_goes_on_and_gives_the_same_rows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped three times in the middle of a task, in this process."""
    from in_process import stage

    from sabia.core import stop
    from sabia.core.errors import Interrupted
    from sabia.core.model import forward

    given = {"model": (str(folder / "quick"),), "limit": 20,
             "task": tuple(str(folder / f"{t}.toml") for t in ("prose", "said"))}  # fmt: skip
    stage("eval", out=tmp_path / "whole.parquet", judge_cache=tmp_path / "a", **given)
    hidden, passes = forward.hidden_and_stats, Counter[str]()

    def counted(*words: object, **named: object) -> object:
        passes["all"] += 1
        if passes["all"] in (2, 6, 30):
            stop._received.append(signal.SIGTERM)
        return hidden(*words, **named)

    monkeypatch.setattr(forward, "hidden_and_stats", counted)
    for _ in range(3):
        monkeypatch.setattr(stop, "_received", [])
        before = len(keys(tmp_path / "b"))
        with pytest.raises(Interrupted):
            stage("eval", out=tmp_path / "s.parquet", judge_cache=tmp_path / "b", **given)
        assert len(keys(tmp_path / "b")) > before
    monkeypatch.setattr(stop, "_received", [])
    stage("eval", out=tmp_path / "s.parquet", judge_cache=tmp_path / "b", **given)
    assert Counter(keys(tmp_path / "b")) == Counter(keys(tmp_path / "a"))
    assert pq.read_table(tmp_path / "s.parquet").equals(pq.read_table(tmp_path / "whole.parquet"))
