"""A small random model, its tokenizer and prompts that ask for a digit, for tests of grpo."""

import json
from pathlib import Path
from typing import Any

from sabia.core.model.storage import hub
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe


def write_policy(place: Path, longest: int = 1, **shape: Any) -> None:
    """`model/`, and `prompts.jsonl` with six prompts of up to `longest` repetitions."""
    tokenizer = train_bpe(["user assistant which digit? 0 1 2 3 4 5 6 7 8 9"] * 9, 300)
    tokenizer.save(place / "t")
    sizes: dict[str, Any] = {"hidden": 32, "layers": 1, "heads": 2, "context": 64}
    config = new_config(vocab=tokenizer.vocab_size, **(sizes | shape))
    spec = from_config(config)
    hub.save_model(place / "model", spec, hub.init_params(spec, 0), tokenizer_from=place / "t")
    texts = ["which digit?" * (1 + n % longest) for n in range(6)]
    rows = [{"id": f"p{n}", "messages": [{"role": "user", "content": text}], "answer": "[0-9a-m]"}
            for n, text in enumerate(texts)]  # fmt: skip
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
