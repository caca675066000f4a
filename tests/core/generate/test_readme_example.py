"""The library examples of the README run as they are written, on a small random model."""

from pathlib import Path

import numpy as np
import pytest

from sabia.core.model.init import init_params
from sabia.core.model.storage import hub
from sabia.core.spec import from_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

README = Path(__file__).parents[3] / "README.md"


def example(part: str) -> str:
    """The Python example of the README that contains `part`."""
    blocks = README.read_text("utf-8").split("```python\n")[1:]
    (block,) = (block for block in blocks if part in block)
    return block.partition("```")[0]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which run/final is a model."""
    tokenizer = train_bpe(["The capital of Brazil is Brasilia."] * 3, 300)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": tokenizer.vocab_size, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "rope_theta": 10_000.0, "tie_word_embeddings": True,
        "hidden_act": "silu",
    }  # fmt: skip
    spec = from_config(config)
    params = {name: np.asarray(value) for name, value in init_params(spec, 0).items()}
    hub.save_model(tmp_path / "run/final", spec, params)
    tokenizer.save(tmp_path / "run/final")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_nnx_example_halves_one_matrix(run: Path) -> None:
    pytest.importorskip("flax", reason="flax is not installed")
    exec(example("nnx"), {})
    before, after = (hub.load_model(run / name)[1] for name in ("run/final", "changed"))
    for name, array in before.items():
        changed = array * 0.5 if name == "layers.0.attn.q" else array
        assert np.array_equal(after[name], changed), name
    assert (run / "changed/tokenizer.json").is_file()


def test_the_library_example_prints_four_samples(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(example("load_engine"), names := {})
    printed = capsys.readouterr().out
    completions = names["engine"].generate(names["requests"])
    for completion in completions:
        assert len(completion.tokens) <= 20
        assert f"{completion.text} {sum(completion.raw_logprobs)}\n" in printed
    assert len(completions) == 4
