"""Samples of a random model that are bound to random JSON Schemas parse and fit them.

By a tokenizer of bytes and one of characters with bytes as fallback (as SentencePiece's), also
where the sample ends at its limit of tokens.
"""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, trainers

from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Request
from sabia.core.model.init import init_params
from sabia.core.parallel.build_ops import load_ops
from sabia.core.serve.response_format import ResponseFormats
from sabia.core.spec import from_config, new_config
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

TEXT = ['{"name": "a b", "values": [1, 2.5, -3e10, true, null], "é": {"kind": "x y"}}',
        "um texto qualquer, 2024-01-31T10:00:00Z, the quick brown fox"]  # fmt: skip
WORDS = ["id", "user name", "é", "a/b", "~", '"', "\\", "", "\n", "x" * 20, "kind", "价格"]


def of_bytes() -> Tokenizer:
    return train_bpe(TEXT * 8, 400)


def of_characters() -> Tokenizer:
    """As Llama 2's: spaces are ▁, what the vocabulary lacks is written in bytes."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replaced = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    every = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=440, show_progress=False, special_tokens=[
        *every, *(f"<0x{byte:02X}>" for byte in range(256))])  # fmt: skip
    backend.train_from_iterator(TEXT * 8, trainer)
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = [one for one in definition["added_tokens"]
                                  if one["content"] in every]  # fmt: skip
    return Tokenizer(json.dumps(definition), {"eos_token": "</s>"})


def drawn(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema as programs make them: objects of fields, lists, unions, enums, bounded numbers."""
    inner = [*["object"] * 3, "list", "tuple", "union", "nullable"] if depth < 3 else []
    match draw.choice([*inner, "text", "integer", "number", "enum", "const", "truth"]):
        case "object":
            names = draw.sample(WORDS, draw.randint(0, 4))
            return {"type": "object", "properties": {n: drawn(draw, depth + 1) for n in names},
                    "required": draw.sample(names, draw.randint(0, len(names))),
                    "additionalProperties": False}  # fmt: skip
        case "list":
            least = draw.randint(0, 3)
            return {"type": "array", "items": drawn(draw, depth + 1), "minItems": least,
                    "maxItems": least + draw.randint(0, 3)}  # fmt: skip
        case "tuple":
            parts = [drawn(draw, depth + 1) for _ in range(draw.randint(1, 3))]
            return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
        case "union":
            return {"anyOf": [drawn(draw, depth + 1) for _ in range(draw.randint(2, 3))]}
        case "nullable":
            return {"anyOf": [drawn(draw, depth + 1), {"type": "null"}]}
        case "text":
            least = draw.randint(0, 4)
            more: list[dict[str, Any]] = [
                {}, {"minLength": least}, {"maxLength": least}, {"pattern": r"^[a-z]+\d{2}$"},
                {"pattern": "[é ]+"}, {"format": "date-time"}, {"format": "uuid"},
            ]  # fmt: skip
            return {"type": "string", **draw.choice(more)}
        case "integer" | "number" as kind:
            low, high = sorted(draw.randint(-(10 ** draw.randint(0, 6)), 10**6) for _ in range(2))
            bounds = {"minimum": low, "maximum": high, "exclusiveMinimum": low - 1}
            return {"type": kind, **dict(draw.sample([*bounds.items()], draw.randint(0, 3)))}
        case "enum":
            return {"enum": draw.sample([*WORDS, 1, -2.5, None, True, ["x", 1]], 3)}
        case "const":
            return {"const": draw.choice([*WORDS, 0, {"a": []}])}
    return {"type": "boolean"}


@pytest.fixture(scope="module", params=[of_bytes, of_characters])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    tokenizer = request.param()
    config = new_config(hidden=32, layers=1, heads=2, vocab=tokenizer.vocab_size, context=512)
    spec = from_config(config)
    params = {name: 4 * value for name, value in init_params(spec, 0).items()}
    yield Engine(spec, params, tokenizer)


def samples_fit(engine: Engine, count: int, seed: int) -> None:
    draw, tokenizer = random.Random(seed), engine.tokenizer
    formats = ResponseFormats(tokenizer, engine.spec.vocab_size)
    requests, schemas = list[Request](), dict[str, dict[str, Any]]()
    while len(schemas) < count:
        schema = drawn(draw)
        guide = formats.of_structure({"json": schema})
        assert guide is not None
        for limit in (guide.least_tokens, guide.least_tokens + draw.randint(1, 6), 200):
            if not guide.least_tokens <= limit < 400:
                continue
            name = f"{len(schemas)}"
            schemas[name] = schema
            requests.append(Request(
                tokenizer.encode("the"), limit, draw.choice([0.0, 1.0, 3.0]), seed=seed, id=name,
                guide=guide, top_p=draw.choice([1.0, 0.5]),
                min_p=draw.choice([0.0, 0.3]), frequency_penalty=draw.choice([0.0, 2.0]),
            ))  # fmt: skip
    checks, texts = jsonschema.Draft202012Validator, set[str]()
    for made in engine.generate(requests):
        schema = schemas[made.request_id]
        value = json.loads(made.text)  # the text as clients get it
        checks(schema, format_checker=checks.FORMAT_CHECKER).validate(value)
        assert np.isfinite(made.raw_logprobs).all()
        texts.add(made.text)
    assert len(texts) > count // 4


def test_samples_fit_random_schemas(engine: Engine) -> None:
    samples_fit(engine, 60, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_samples_fit_many_random_schemas(engine: Engine, seed: int) -> None:
    samples_fit(engine, 600, seed)


@pytest.mark.slow
def test_samples_of_jax_fit_random_schemas(engine: Engine) -> None:
    params = {name: value.numpy() for name, value in engine.params.items()}
    samples_fit(Engine(engine.spec, params, engine.tokenizer, ops=load_ops("jax")), 150, 9)
