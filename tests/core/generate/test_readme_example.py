"""The library example of the README runs as it is written, on a small random model."""

from pathlib import Path

import numpy as np
import pytest

from sabia.core.model.init import init_params
from sabia.core.model.storage import hub
from sabia.core.spec import from_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

README = Path(__file__).parents[3] / "README.md"


def test_the_library_example_prints_four_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    blocks = README.read_text("utf-8").split("```python\n")[1:]
    (block,) = (part for part in blocks if "load_engine" in part)
    monkeypatch.chdir(tmp_path)
    exec(block.partition("```")[0], names := {})
    printed = capsys.readouterr().out
    completions = names["engine"].generate(names["requests"])
    for completion in completions:
        assert len(completion.tokens) <= 20
        assert f"{completion.text} {sum(completion.raw_logprobs)}\n" in printed
    assert len(completions) == 4
