"""--chat and the date of templates: what was rendered on one day is rendered again on another."""

import json
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from sabia.core import stop
from sabia.core.bench import answers
from sabia.core.bench.items import Item
from sabia.core.bench.task import Task
from sabia.core.errors import BadData, Interrupted, UsageError
from sabia.core.generate import chat_variables as module
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import ChatRequest
from sabia.core.generate.chat_variables import server_variables, template_variables
from sabia.core.judge.rewards import Grader
from sabia.core.model.storage import hub
from sabia.core.options.chat_template import chat_variables
from sabia.core.options.eval import EvalOptions
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.options.sft import SftOptions
from sabia.core.recipes import sft
from sabia.core.recipes.calibration.rows import read_rows
from sabia.core.recipes.evaluated_models import LocalModel
from sabia.core.recipes.grpo.prompt_schedule import read_prompts
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, new_config
from sabia.core.text.rewrite.model_engine import EndpointAnswers, LocalAnswers, Writer
from sabia.core.text.rewrite.rewrite_recipe import load_recipe
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

DATED = """\
{{- 'Today is ' + (date_string if date_string is defined else strftime_now('%d %b %Y %H')) }}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('' if enable_thinking | default(true) else '<no>') }}
{%- endif %}
"""
PLAIN = DATED.replace("(date_string if date_string is defined else strftime_now('%d %b %Y %H'))",
                      "''")  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    base = train_bpe(["Today is 21 Nov 2026 user assistant 0 1 2 3 4 5 6 7 8 9"] * 9, 320)
    config = new_config(hidden=32, layers=1, vocab=base.vocab_size, heads=2, context=2048)
    spec = from_config(config)
    for name, template in (("dated", DATED), ("plain", PLAIN)):
        Tokenizer(base.definition, base.config, template).save(folder / f"{name}-tokenizer")
        hub.save_model(folder / name, spec, hub.init_params(spec, 0),
                       tokenizer_from=folder / f"{name}-tokenizer")  # fmt: skip
    rows = [{"messages": [{"role": "user", "content": f"{i} + {i}"},
                          {"role": "assistant", "content": f"{2 * i}"}]}
            for i in range(200)]  # fmt: skip
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tokenizer_of(models: Path, name: str = "dated") -> Tokenizer:
    from sabia.core.text.tokenize.tokenizer import load_tokenizer

    return load_tokenizer(models / name)


def on_day(monkeypatch, day: int) -> None:
    class Day(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, day, 23, 59, tzinfo=tz)

    monkeypatch.setattr(module, "datetime", Day)
    from sabia.core.generate import template_engine

    monkeypatch.setattr(template_engine, "datetime", Day)


def test_values_have_the_type_of_their_json():
    given = "enable_thinking=false, date_string=26 Jul 2024,k=3,names=a,b,x=[1, 2],date=2026-01-31"
    assert chat_variables(given) == {
        "enable_thinking": False, "date_string": "26 Jul 2024", "k": 3, "names": "a,b",
        "x": [1, 2], "date": "2026-01-31",
    }  # fmt: skip
    assert chat_variables("") == {}
    for wrong in ("thinking", "=3", "a=1,a=2", "messages=3", "date=31.1.2026", "a b=2"):
        with pytest.raises(UsageError, match="--chat: "):
            chat_variables(wrong)


def test_the_date_is_that_of_the_first_start(models, monkeypatch):
    dated, plain = tokenizer_of(models), tokenizer_of(models, "plain")
    on_day(monkeypatch, 21)
    first = template_variables("", dated)
    on_day(monkeypatch, 22)
    assert first == {"date": "2026-11-21"}
    assert template_variables("", dated, first) == first
    assert template_variables("", dated) == {"date": "2026-11-22"}
    assert template_variables("date=2020-02-29,k=1", dated, first) == {"date": "2020-02-29", "k": 1}
    assert template_variables("k=1", plain, {}) == {"k": 1}
    with pytest.raises(UsageError, match="reads no date"):
        template_variables("date=2020-02-29", plain)


def trained(models: Path, out: Path, **changes) -> dict[str, np.ndarray]:
    options = {"steps": 6, "batch_tokens": 512, "length": 64, "lr": 1e-2, "peak_flops": 1e12}
    call = SftOptions(model=str(models / "dated"), **(options | changes))
    sft.run(Job("sft", inputs=(str(models / "chat.jsonl"),), out=str(out), to="jsonl"), call)
    return hub.load_model(out / "final")[1]


def test_a_run_goes_on_after_midnight_with_the_same_rows(models, tmp_path, monkeypatch):
    on_day(monkeypatch, 21)
    whole = trained(models, tmp_path / "whole")
    left = iter(range(100))
    monkeypatch.setattr("sabia.core.train.loop.stop.requested", lambda: next(left) >= 3)
    monkeypatch.setattr(stop, "check", lambda: None)
    with pytest.raises(Interrupted):
        trained(models, tmp_path / "run")
    monkeypatch.setattr("sabia.core.train.loop.stop.requested", lambda: False)
    shutil.rmtree(tmp_path / "run" / "rows")  # as on a second host
    on_day(monkeypatch, 22)
    resumed = trained(models, tmp_path / "run")
    other = trained(models, tmp_path / "other")
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)
    assert not all(np.array_equal(whole[name], other[name]) for name in whole)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["identity"]["chat"] == {"date": "2026-11-21"}
    with pytest.raises(UsageError, match="holds another run"):
        trained(models, tmp_path / "run", chat="date=2026-11-22")


def prompts(path: Path, tokenizer: Tokenizer, rows: list[dict], **variables) -> list:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(
        from_path(str(path), "prompt"), tokenizer, Grader({"exact": 1.0}), 10_000, print, variables
    )


def test_prompt_records_have_tools(models, tmp_path):
    tokenizer = tokenizer_of(models)
    ask = {"messages": [{"role": "user", "content": "1 + 1"}], "answer": "2"}
    rows = [{"id": "a", **ask}, {"id": "b", **ask, "tools": [TOOL]},
            {"id": "c", **ask, "tools": json.dumps([TOOL])}]  # fmt: skip
    variables = {"date": "2026-11-21", "enable_thinking": False}
    texts = [tokenizer.decode(p.ids) for p in prompts(tmp_path / "p.jsonl", tokenizer, rows,
                                                      **variables)]  # fmt: skip
    turn = "<|im_start|>user\n1 + 1<|im_end|><|im_start|>assistant\n<no>"
    assert texts[0] == f"Today is 21 Nov 2026 00{turn}"
    assert texts[1] == texts[2] == f"Today is 21 Nov 2026 00{json.dumps([TOOL])}{turn}"
    ended = ask | {"messages": [{"role": "assistant", "content": "2"}]}
    rejected = [{"id": "c", **ended}, *({"id": name, **ask, "tools": "{"} for name in "de")]
    with pytest.raises(BadData, match="3 rejected; 2 of them: tools is not JSON"):
        prompts(tmp_path / "q.jsonl", tokenizer, rejected)


def test_eval_renders_with_the_variables(models, monkeypatch):
    def model(name: str, **given) -> LocalModel:
        call = EvalOptions(task=("t.toml",), model=("m",), **given)
        return LocalModel("m", str(models / name), call)

    on_day(monkeypatch, 21)
    item = Item("1", messages=({"role": "user", "content": "1 + 1"},))
    dated = model("dated", chat="enable_thinking=false")
    text = dated.tokenizer.decode(answers.prompt_ids(item, dated.tokenizer, dated.variables))
    assert text.startswith("Today is 21 Nov 2026 00") and text.endswith("<no>")
    first, plain = model("dated").fingerprint(), model("plain").fingerprint()
    on_day(monkeypatch, 22)
    assert model("dated").fingerprint() != first
    assert model("dated", chat="date=2026-11-21").fingerprint() == first
    assert model("plain").fingerprint() == plain
    without = EvalOptions(task=("t.toml",), model=("m",)).recorded()
    assert "chat" not in without
    assert EvalOptions(task=("t.toml",), model=("m",), chat="k=1").recorded()["chat"] == "k=1"


class Asked:
    """A client that records its requests."""

    model = "m"

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []

    def submit(self, request):
        self.requests.append(request)

    def wait(self, calls):
        raise BadData("recorded")


def test_servers_get_the_variables():
    client, item = Asked(), Item("1", text="1 + 1")
    options = EvalOptions(task=("t.toml",), model=("m",), chat="enable_thinking=false")
    with pytest.raises(BadData, match="recorded"):
        answers.ask(client, Task("t", "exact_match", "x"), [item], options)
    recipe = load_recipe("reason-first")
    writer = Writer(EndpointAnswers(client, "enable_thinking=false"), recipe, 0.0, 0)
    for request in (client.requests[0], writer.request("text")):
        assert request.body("m")["chat_template_kwargs"] == {"enable_thinking": False}
    plain = Writer(EndpointAnswers(client), recipe, 0.0, 0).request("text")
    assert "chat_template_kwargs" not in plain.body("m")
    with pytest.raises(UsageError, match="only with a model directory"):
        server_variables("date=2026-11-21")


def test_rewrite_asks_for_the_date_that_the_template_writes(models, tmp_path):
    from sabia.core.generate.model_directory import load_engine

    engine = load_engine(models / "dated")
    asked, generate = [], engine.generate
    engine.generate = lambda requests: asked.extend(requests) or generate(requests)
    settings = ("m", "f", CallCache(tmp_path))
    with pytest.raises(UsageError, match=r"--chat: m has a chat template that writes the date"):
        LocalAnswers(engine, *settings)
    for chat in ("date=2026-11-21", "date=2026-11-22", "date=2026-11-21"):
        local = LocalAnswers(engine, *settings, chat)
        Writer(local, load_recipe("reason-first"), 0.0, 0).submit(["1"])()
    texts = [engine.tokenizer.decode(request.prompt)[:20] for request in asked]
    assert texts == ["Today is 21 Nov 2026", "Today is 22 Nov 2026"]  # the third was cached
    with pytest.raises(UsageError, match="--chat: only with --engine endpoint or local"):
        RewriteOptions(chat="k=1")


def test_records_keep_reasoning_and_the_ids_of_calls(tmp_path):
    plain = {"role": "user", "content": "1 + 1"}
    answer = {"role": "assistant", "content": "2", "reasoning_content": "one and one"}
    tool = {"role": "tool", "content": "2", "tool_call_id": "c1"}
    rows = [{"messages": [plain]}, {"messages": [plain, answer]}, {"messages": [plain, tool]}]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    batches = [batch for source in from_path(str(path), "chat") for batch in source.batches()]
    read = [row for batch in batches for row in batch.to_pylist()]
    kept = [[{k: v for k, v in m.items() if v is not None} for m in row["messages"]]
            for row in read]  # fmt: skip
    assert kept == [row["messages"] for row in rows]
    assert read[0]["id"] == "4ed258253f05310b92ac86f4de8a60fb"  # as before these fields were kept


def test_calibration_leaves_out_what_the_template_damages(models, tmp_path, capsys):
    call = {"type": "function", "function": {"name": "sum_up", "arguments": "{}"}}
    plain = {"messages": [{"role": "user", "content": "1 + 1"}]}
    broken = {"messages": [*plain["messages"],
                           {"role": "assistant", "content": "", "tool_calls": [call]}]}  # fmt: skip
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (plain, broken, plain)))
    job = Job("quantize", inputs=(str(path),), out=str(tmp_path / "out"))
    read = read_rows(job, tokenizer_of(models, "plain"), 10, 0, 64)
    assert (read.kind, len(read.rows)) == ("chat", 2)
    assert "2 of 3 chat records are used; 1 are left out" in capsys.readouterr().err
    path.write_text(json.dumps(broken) + "\n")
    with pytest.raises(BadData, match=r"no usable row .* drops the call of 'sum_up'"):
        read_rows(job, tokenizer_of(models, "plain"), 10, 0, 64)
