"""`sabia quantize` as a user calls it: rows, report, refusals, done work kept."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forked import Command
from in_process import stage

from sabia.core.errors import BadData, SabiaError, UsageError

pytest.importorskip("torch")
COMMAND = Command("quantize")


def run(*arguments: object, stdin: bytes | None = None) -> subprocess.CompletedProcess:
    given = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, **given)


def make(out: Path, model: Path, *inputs: Path, **settings: object) -> None:
    """The same in this process, where no row is wanted."""
    inputs = tuple(map(str, inputs))
    stage("quantize", inputs=inputs, out=out, to="jsonl", json=True, model=model, **settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    root = tmp_path_factory.mktemp("m")
    tokenizer = train_bpe(["dois mais três são cinco"] * 4, 300)
    tokenizer.save(root / "t")
    config = new_config(hidden=64, layers=2, heads=4, vocab=tokenizer.vocab_size, tied=False)
    spec = from_config(config)
    hub.save_model(root / "m", spec, hub.init_params(spec, 0), tokenizer_from=root / "t")
    return root / "m"


@pytest.fixture(scope="module")
def chats(model: Path) -> Path:
    path = model.parent / "chats.jsonl"
    records = [
        {"messages": [{"role": "user", "content": f"{i}+3?"},
                      {"role": "assistant", "content": "são cinco " * (1 + 9 * (i % 2))}],
         "source": ("sums", "words")[i % 2]}
        for i in range(10)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_rows_on_stdout_model_at_out_and_done_work_kept(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "q"
    first = run(chats, "--model", model, "-o", out, "--to", "jsonl")
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in first.stdout.splitlines()]
    components = [row["component"] for row in rows]
    assert components.count("head") == 1 and components[-1] == "model"
    groups = [row for row in rows if row["component"] in ("source", "length")]
    assert len(rows) == 2 * 7 + 2 + len(groups) and rows[-1]["kl_nats"] > 0
    for kind in ("source", "length"):
        own = [row["tokens"] for row in groups if row["component"] == kind]
        assert sum(own) == rows[-1]["tokens"]
    assert b"mlp: 6 w4a16 g64 by GPTQ" in first.stderr
    assert {row["method"] for row in rows if row["component"] == "mlp"} == {"gptq"}
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (out / "tokenizer.json").is_file()
    again = run(chats, "--model", model, "-o", out, "--to", "jsonl")
    assert b"already made" in again.stderr and again.stdout == first.stdout


def test_report_as_json_and_redone_when_the_recipe_changes(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for recipe in ("w4", "w8"):
        make(tmp_path / "q", model, chats, recipe=recipe)
        report = json.loads(capsys.readouterr().out)
        assert report["recipe"]["name"] == recipe and report["calibration"]["kind"] == "chat"
        assert report["size_after_bytes"] < 0.6 * report["size_before_bytes"]
    assert {row["bits"] for row in report["layers"]} == {8}


def test_without_records_it_says_so_and_rounds_to_nearest(model: Path, tmp_path: Path) -> None:
    done = run("--model", model, "-o", tmp_path / "q", "--recipe", "w4", "--to", "jsonl")
    assert done.returncode == 0 and b"no calibration records" in done.stderr
    assert b'"gptq"' not in done.stdout
    done = run("--model", model, "-o", tmp_path / "q8", "--recipe", "w8", "--to", "jsonl")
    assert done.returncode == 0 and b"no calibration records" not in done.stderr


def test_records_may_come_through_a_pipe(model: Path, chats: Path, tmp_path: Path) -> None:
    done = run("--model", model, "-o", tmp_path / "q", "--json", stdin=chats.read_bytes())
    assert json.loads(done.stdout)["calibration"]["rows"] == 8  # and 2 held out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "w3"}, "--recipe: 'w3' .expected w8, w4, mixed, "),
        ({"recipe": "none.toml"}, "--recipe: none.toml: No such file"),
        ({"group_size": 48}, "does not divide 64 columns; groups of 32, 64 fit"),
        ({"rounding": "gptq"}, "needs calibration inputs"),
        ({"scale": "best"}, "--scale: 'best' .expected mse or absmax"),
        ({"recipe": "w8", "group_size": 32}, "--group-size: recipe w8 has no format that uses it"),
        ({"recipe": "fp8", "scale": "mse"}, "--scale: recipe fp8 has no format"),
        ({"samples": 256}, "--samples: only with calibration records"),
        ({"experts": "all"}, "--experts: only with calibration records"),
        ({"recipe": "nf4", "scale": "mse"}, "--scale: recipe nf4 has no format that uses it"),
        ({"recipe": "nf4", "rounding": "gptq"}, "rounding is gptq with format nf4, whose scales"),
        ({"match": "llmcompressor", "rounding": "gptq"}, "--match: llmcompressor: its rounding to"),
        ({"seed": 0}, "--seed: only with calibration records"),
        ({"out": "-"}, "--out: '-' .expected a directory"),
    ],
)
def test_refusals_leave_nothing(
    model: Path, tmp_path: Path, settings: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match=message):
        make(settings.pop("out", tmp_path / "q"), model, **settings)
    assert not (tmp_path / "q").exists()


def test_decoded_weights_are_those_of_the_quantized_directory(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from sabia.core.model.storage import hub

    for form in ("compressed-tensors", "dense"):
        make(tmp_path / form, model, chats, recipe="mixed", format=form)
        report = json.loads(capsys.readouterr().out)
        assert report["format"] == form and bool(report["loaders"]) == (form != "dense")
    coded, dense = (hub.load_model(tmp_path / form) for form in ("compressed-tensors", "dense"))
    assert "quantization_config" not in dense[0].config and dense[0].config["dtype"] == "float32"
    assert coded[1].keys() == dense[1].keys()
    for name, array in dense[1].items():
        np.testing.assert_array_equal(array.astype("f4"), coded[1][name].astype("f4"), err_msg=name)
        assert array.dtype.name == "float32"
    original = hub.read_checkpoint(model)
    assert hub.read_checkpoint(tmp_path / "dense").keys() == original.keys()
    make(tmp_path / "dense", model, chats, recipe="mixed", format="dense")
    assert "already made" in capsys.readouterr().err
    make(tmp_path / "dense", model, chats, recipe="mixed")
    assert "already made" not in capsys.readouterr().err


def test_decoded_weights_of_fused_files_are_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config

    shape = {"hidden": 64, "layers": 4, "heads": 4, "vocab": 300, "experts": 4, "chosen": 2}
    spec = from_config(new_config("qwen3_next", **shape, expert_ffn=32, shared=1))
    hub.save_model(tmp_path / "m", spec, hub.init_params(spec, 0))
    monkeypatch.setattr(sys, "stdin", None)
    make(tmp_path / "q", tmp_path / "m", recipe="mixed", format="dense")
    original, made = (hub.read_checkpoint(tmp_path / name) for name in "mq")
    assert {n: x.shape for n, x in made.items()} == {n: x.shape for n, x in original.items()}


def test_another_sample_or_tokenizer_is_another_calibration(
    model: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    copy = tmp_path / "m"
    shutil.copytree(model, copy)

    def already_made(**settings: object) -> bool:
        make(tmp_path / "q", copy, chats, **settings)
        return "already made" in capsys.readouterr().err

    assert [already_made(), already_made()] == [False, True]
    assert [already_made(samples=4), already_made(samples=4)] == [False, True]
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|im_end|>"}))
    assert not already_made(samples=4)


def test_all_tokens_to_experts_of_a_model_without_them(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"--experts: .* has no experts"):
        make(tmp_path / "q", model, chats, experts="all")
    assert not (tmp_path / "q").exists()


def test_what_is_missing_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "q").mkdir()
    with pytest.raises(UsageError, match="--model: /nowhere: not a model directory"):
        make(tmp_path / "q", Path("/nowhere"))
    done = run("--model", model)
    assert done.returncode == 2 and b"--out: is missing (expected DIR)" in done.stderr
    done = run("--model", model, "-o", tmp_path / "o", "--backend", "torch")
    assert done.returncode == 2 and b"--backend: no such option" in done.stderr


def test_records_of_no_kind_are_bad_data(model: Path, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(BadData, match="not calibration records"):
        make(tmp_path / "q", model, tmp_path / "x.jsonl")


def test_texts_need_the_models_tokenizer(model: Path, chats: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UsageError, match=r"no tokenizer.json for chat records"):
        make(tmp_path / "q", bare, chats)


def test_a_quantized_model_is_not_quantized_again(model: Path, tmp_path: Path, chats: Path) -> None:
    make(tmp_path / "q", model, chats, recipe="w8")
    with pytest.raises(UsageError, match="already quantized"):
        make(tmp_path / "qq", tmp_path / "q", chats)
    with pytest.raises(UsageError, match="is the model itself"):
        make(model, model, chats)


def test_a_budget_of_bits_finds_a_recipe_that_makes_the_same_bytes(
    model: Path, chats: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    formats = "w4a16,w4a16:32,w8a16"
    make(first, model, chats, recipe="w4", bits=5.0, formats=formats)
    found = first / "recipe.toml"
    assert "[[rules]]" in found.read_text()
    make(second, model, chats, recipe=str(found))
    for name in ("model.safetensors", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    report = json.loads((first / "quantization.json").read_text())
    own = report["layers"]
    assert len({row["scheme"] for row in own}) > 1
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 192) + 64 * report_vocabulary(first)
    assert 8 * sum(row["size_bytes"] for row in own) <= 5.0 * weights


def report_vocabulary(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"bits": 4.0}, 3, "expected at least 4.26"),
        ({"bits": 5.0, "formats": "w4a16"}, 2, "two or more"),
        ({"formats": "w4a16,bf16"}, 2, "--formats: only with --bits"),
    ],
)
def test_budgets_that_cannot_be_met_are_refused(
    model: Path, chats: Path, tmp_path: Path, settings: dict, code: int, message: str
) -> None:
    with pytest.raises(SabiaError, match=message) as error:
        make(tmp_path / "q", model, chats, **settings)
    assert error.value.exit_code == code and not (tmp_path / "q").exists()
    with pytest.raises(UsageError, match="--bits: measures"):
        make(tmp_path / "q", model, rounding="rtn", bits=5.0)
