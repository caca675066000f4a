"""GGUF files beside the gguf package: blocks to the bit, names, order of rows, tokenizer."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import stage

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from sabia.core.errors import BadData, UsageError  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.numerics.ggml_blocks import decode_blocks, encode_blocks  # noqa: E402
from sabia.core.numerics.scales import choose_scales, decode, encode  # noqa: E402
from sabia.core.numerics.schemes import GGUF, Scheme  # noqa: E402
from sabia.core.quant import gguf_file  # noqa: E402
from sabia.core.quant.gguf_vocabulary import (  # noqa: E402
    BYTES,
    PREPEND,
    REPLACE,
    Blanks,
    add_vocabulary,
    check_vocabulary,
)
from sabia.core.spec import from_config, new_config  # noqa: E402
from sabia.core.text.tokenize.tokenizer import load_tokenizer  # noqa: E402
from sabia.core.text.tokenize.tokenizer_training import train_bpe  # noqa: E402

TEXT = "dois mais três são cinco"
BLOCKS = [scheme for scheme in GGUF.values() if scheme.quantizes]
EACH = pytest.mark.parametrize("scheme", BLOCKS, ids=lambda scheme: scheme.name)


def kind_of(scheme: Scheme) -> Any:
    return gguf.GGMLQuantizationType[scheme.name.upper()]


@EACH
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (130, 512)])
@pytest.mark.parametrize("size", [1e-9, 0.03, 3e4])
def test_blocks_are_decoded_as_by_the_library(
    scheme: Scheme, shape: tuple[int, int], size: float
) -> None:
    draw = np.random.default_rng(shape[0])
    weight = (size * draw.standard_normal(shape)).astype(np.float32)
    weight[-1, :16] = 0
    kind = kind_of(scheme)
    for method in ("mse", "absmax"):
        scales = choose_scales(weight, scheme, method)
        codes = encode(weight, scales, scheme)
        ours = encode_blocks(codes, scales, scheme)
        expected = decode(codes, scales, scheme)
        np.testing.assert_array_equal(gguf.dequantize(ours, kind), expected)
        np.testing.assert_array_equal(decode_blocks(ours, scheme.name), expected)
    theirs = gguf.quantize(weight, kind)
    assert theirs.shape == ours.shape
    other = gguf.dequantize(theirs, kind)
    np.testing.assert_array_equal(decode_blocks(theirs, scheme.name), other)
    if size > 1e-8:  # scales in F16 hold them
        best = choose_scales(weight, scheme, "mse")
        own = decode(encode(weight, best, scheme), best, scheme)
        assert np.square(own - weight).sum() <= 1.02 * np.square(other - weight).sum()


def test_bytes_that_are_no_blocks() -> None:
    with pytest.raises(BadData, match=r"33 bytes of a row .expected blocks of 34"):
        decode_blocks(np.zeros((2, 33), np.uint8), "q8_0")


def saved(root: Path, family: str, more: Any = None, factor: float = 1, **shape: Any) -> Path:
    tokenizer = train_bpe([TEXT] * 4, 300)
    tokenizer.save(root / "t")
    shape = {"hidden": 64, "layers": 2, "heads": 4, "vocab": 320} | shape
    more = {**OLDER.get(family, {}), **(more or {})}
    spec = from_config(new_config("llama" if family in OLDER else family, **shape) | more)
    params = hub.init_params(spec, 1)
    params = {n: x + 0.1 * np.random.default_rng(len(n)).standard_normal(x.shape).astype("f4")
              for n, x in params.items()}  # fmt: skip
    params["embed"] *= factor
    hub.save_model(root / "m", spec, params, tokenizer_from=root / "t")
    return root / "m"


def make(root: Path, monkeypatch: Any, recipe: str, **settings: Any) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    stage("quantize", out=root / "q", to="jsonl", json=True, model=root / "m", recipe=recipe,
          format="gguf", **settings)  # fmt: skip


EXPERTS = {"experts": 4, "chosen": 2, "expert_ffn": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 5e5}
# families that are not made from scratch, from Llama's
OLDER: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": True},
    "gemma": {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"},
}
GEMMA3 = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6}
CASES = {
    "llama": ("mixed", {"kv_heads": 2, "tied": False}, {}),
    "tied": ("w4a16", {}, {"rope_parameters": LLAMA3, "attention_bias": True}),
    "qwen3": ("mxfp4a16", {"kv_heads": 2, "tied": True}, {}),
    "qwen3_moe": ("mixed", EXPERTS, {"norm_topk_prob": True}),
    "mixtral": ("bf16", EXPERTS, {}),
    "qwen2": ("w4a16", {"kv_heads": 2, "tied": True}, {}),
    "gemma": ("mxfp4a16", {"kv_heads": 2}, {}),
    "gemma2": ("w8", {"kv_heads": 2, "layers": 3, "context": 64}, {}),
    "gemma3": ("w4a16", {"kv_heads": 2, "layers": 7, "context": 64}, GEMMA3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_the_measured_values(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    recipe, shape, more = CASES[case]
    model = saved(tmp_path, "llama" if case == "tied" else case, more, **shape)
    make(tmp_path, monkeypatch, recipe)
    original, params = hub.load_model(model)
    reader = gguf.GGUFReader(tmp_path / "q" / "model.gguf")
    held = {tensor.name: tensor for tensor in reader.tensors}
    if case == "tied":
        factors = held.pop("rope_freqs.weight").data
        assert len(factors) == 8 and factors[0] == 1 and factors[-1] == 8
    names = gguf.get_tensor_name_map(architecture(reader), len(original.layers))
    quantized = 0
    for tensor in original.tensors():
        file = tensor.files[0].replace("experts.0.", "experts.")
        plain, end = file.rpartition(".")[::2]
        name = f"{names.get_name(plain)}.{end}"
        found = held.pop(name)
        assert tuple(found.shape[::-1]) == tensor.shape
        values = gguf.dequantize(found.data, found.tensor_type).reshape(tensor.shape)
        weight = params[tensor.name].astype(np.float32)
        part = tensor.name.rpartition(".attn.")[2]
        if case in ("llama", "tied", "mixtral") and part in ("q", "k", "q_bias", "k_bias"):
            weight = interleaved(weight, 4 if part[0] == "q" else shape.get("kv_heads", 4))
        kind = found.tensor_type.name
        if case[:5] == "gemma" and tensor.component == "norm":
            weight = weight + 1
        if kind == "F32":
            np.testing.assert_array_equal(values, weight, err_msg=name)
        else:
            bound = {"F16": 5e-4, "Q8_0": 0.01, "Q4_0": 0.12, "MXFP4": 0.15}[kind]
            error = np.linalg.norm(values - weight) / np.linalg.norm(weight)
            assert error < bound, (name, error)
            quantized += kind != "F16"
    assert not held and bool(quantized) == (recipe != "bf16")
    report = json.loads((tmp_path / "q" / "quantization.json").read_text())
    assert report["format"] == "gguf" and len(report["layers"]) >= quantized


def architecture(reader: Any) -> Any:
    name = reader.fields["general.architecture"].contents()
    return next(number for number, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a head is its row i, row 2i + 1 its row i + half, one by one."""
    size, made = len(rows) // heads, np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            made[head * size + 2 * i] = rows[head * size + i]
            made[head * size + 2 * i + 1] = rows[head * size + i + size // 2]
    return made


def test_facts_and_tokenizer_of_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    model = saved(tmp_path, "qwen3_moe", {"norm_topk_prob": True}, **EXPERTS)
    make(tmp_path, monkeypatch, "w8")
    fields = gguf.GGUFReader(tmp_path / "q" / "model.gguf").fields
    facts = {name: field.contents() for name, field in fields.items()}
    spec = hub.load_model(model)[0]
    own = {n.removeprefix("qwen3moe."): x for n, x in facts.items() if n.startswith("qwen3moe.")}
    assert own["block_count"] == 2 and own["embedding_length"] == 64
    assert own["attention.head_count"] == 4 and own["expert_count"] == 4
    assert own["expert_used_count"] == 2 and own["expert_feed_forward_length"] == 32
    assert own["attention.key_length"] == spec.layers[0].mixer.head_dim  # type: ignore[union-attr]
    assert own["rope.freq_base"] == spec.ropes[0].theta
    assert own["attention.layer_norm_rms_epsilon"] == pytest.approx(spec.norm_eps)
    definition = json.loads((model / "tokenizer.json").read_text())
    words = {number: text for text, number in definition["model"]["vocab"].items()}
    words |= {token["id"]: token["content"] for token in definition["added_tokens"]}
    tokens = facts["tokenizer.ggml.tokens"]
    assert len(tokens) == spec.vocab_size == 320 > len(words)
    assert [words.get(n, f"[PAD{n}]") for n in range(320)] == tokens
    kinds = facts["tokenizer.ggml.token_type"]
    special = {token["id"] for token in definition["added_tokens"]}
    assert {n for n, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL} == special
    assert {n for n, kind in enumerate(kinds) if kind == gguf.TokenType.UNUSED} == {
        *range(320)
    } - words.keys()
    pairs = (x if isinstance(x, str) else " ".join(x) for x in definition["model"]["merges"])
    assert facts["tokenizer.ggml.merges"] == list(pairs)
    assert "<|im_start|>" in facts["tokenizer.chat_template"]
    assert tokens[facts["tokenizer.ggml.eos_token_id"]] == "<|endoftext|>"
    assert facts["tokenizer.ggml.pre"] in ("llama-bpe", "qwen2")


@pytest.mark.parametrize(
    ("family", "recipe", "shape", "message"),
    [
        ("olmo2", "w8", {}, "olmo2 models are not written .expected one of llama"),
        ("gemma3", "w8", {"more": {"query_pre_attn_scalar": 7}}, "a layer of this gemma3_text"),
        ("gemma2", "w8", {"tied": False}, "gemma2 files have no head"),
        ("gemma", "w8", {"tied": False}, "gemma files have no head"),
        (
            "qwen2",
            "w8",
            {"more": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}},
            "a layer of this qwen2 model is",
        ),
        ("llama", "nvfp4a16", {}, "no form of nvfp4a16 for layers.0.attn.q .expected bf16"),
        ("mistral", "w8", {"more": {"sliding_window": 32}}, "a layer of this mistral model is"),
        ("qwen3_moe", "w8", EXPERTS | {"more": {"norm_topk_prob": False}}, "routers that normal"),
        ("llama", "w4", {"ffn": 80}, "groups of 32, which do not divide 80 columns"),
        ("llama", "w4", {"settings": {"group_size": 32}}, "--group-size: recipe w4 has no format"),
        ("llama", "w4", {"settings": {"bits": 5.0}}, "--format: gguf has other groups than --bits"),
        ("llama", "qat-int4", {}, "--format: gguf has other groups than recipe qat-int4"),
        ("llama", "bf16", {"factor": 1e7}, "embed has values up to .* more than F16 holds"),
    ],
)
def test_what_has_no_such_form_is_refused_by_name(
    family: str, recipe: str, shape: dict, message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    shape = dict(shape)
    settings = shape.pop("settings", {})
    saved(tmp_path, family, shape.pop("more", {}), **shape)
    with pytest.raises((UsageError, BadData), match=message):
        make(tmp_path, monkeypatch, recipe, **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "t"]


def test_a_recipe_without_formats_needs_another_form(tmp_path: Path, monkeypatch: Any) -> None:
    saved(tmp_path, "llama")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match=r"bf16: quantizes nothing .expected another recipe, or"):
        stage("quantize", out=tmp_path / "q", model=tmp_path / "m", recipe="bf16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "BPE, splitting by None"),
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
    ],
)
def test_other_tokenizers_are_refused(change: dict, message: str) -> None:
    tokenizer = train_bpe([TEXT] * 4, 300)
    assert check_vocabulary(tokenizer)
    tokenizer.definition = json.dumps(json.loads(tokenizer.definition) | change)
    with pytest.raises(UsageError, match=message):
        check_vocabulary(tokenizer)


def sentencepiece(prefix: bool, vocabulary_size: int = 300) -> dict[str, Any]:
    """The definition of a BPE tokenizer as conversions of SentencePiece models have it: tokens in
    the order of their scores, and every way to divide one as a merge."""
    from tokenizers import Tokenizer, models, trainers

    backend = Tokenizer(models.BPE())
    text = "▁o▁rato▁roeu▁a▁roupa▁do▁rei▁de▁Roma▁e▁a▁rainha▁rasgou▁o▁resto▁▁▁"
    backend.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocabulary_size))
    pieces = json.loads(backend.to_str())["model"]["vocab"]
    texts = ["<unk>", "<s>", "</s>", *BYTES]
    vocab = {text: number for number, text in enumerate([*texts, *pieces])}
    merges = [[text[:cut], text[cut:]] for text in pieces for cut in range(1, len(text))
              if text[:cut] in pieces and text[cut:] in pieces]  # fmt: skip
    flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    added = [{"id": number, "content": texts[number], "special": True, **flags}
             for number in range(3)]  # fmt: skip
    steps = [PREPEND, REPLACE] if prefix else [REPLACE]
    decoders = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}]  # fmt: skip
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True,
             "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "byte_fallback": True, "ignore_merges": False, "vocab": vocab,
             "merges": merges}  # fmt: skip
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None,
            "post_processor": None, "decoder": {"type": "Sequence", "decoders": decoders},
            "model": model}  # fmt: skip


def joined_by_score(text: str, facts: dict[str, Any]) -> list[int]:
    """The ids of llama.cpp's `llm_tokenizer_spm_session`, one neighbourhood after the other."""
    tokens, scores = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.scores"]
    number = {token: index for index, token in enumerate(tokens)}
    parts = list((" " * facts["tokenizer.ggml.add_space_prefix"] + text).replace(" ", "▁"))
    while True:
        pairs = [(-scores[number[a + b]], cut) for cut, (a, b) in
                 enumerate(itertools.pairwise(parts)) if a + b in number]  # fmt: skip
        if not pairs:
            break
        cut = min(pairs)[1]
        parts[cut : cut + 2] = [parts[cut] + parts[cut + 1]]
    ids = []
    for part in parts:
        bytes_of = [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += [number[part]] if part in number else [number[name] for name in bytes_of]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_of_a_sentencepiece_tokenizer(prefix: bool, tmp_path: Path) -> None:
    definition = sentencepiece(prefix)
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, size = load_tokenizer(tmp_path), len(definition["model"]["vocab"]) + 5
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    add_vocabulary(writer, tokenizer, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = gguf.GGUFReader(tmp_path / "v.gguf").fields
    facts = {name: field.contents() for name, field in fields.items()}
    assert facts["tokenizer.ggml.model"] == "llama" and "tokenizer.ggml.merges" not in facts
    assert len(facts["tokenizer.ggml.scores"]) == len(facts["tokenizer.ggml.tokens"]) == size
    kinds = facts["tokenizer.ggml.token_type"]
    assert kinds.count(gguf.TokenType.BYTE) == 256 and kinds.count(gguf.TokenType.CONTROL) == 3
    draw = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(draw.choice(list("raoe  sgtuRmdié☃"), draw.integers(1, 40)))
        assert tokenizer.encode_ordinary(text) == joined_by_score(text, facts), text
    for text in ("o rato roeu a roupa do rei de Roma", " e   a rainha\n", "☃"):
        assert tokenizer.encode_ordinary(text) == joined_by_score(text, facts), text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["model"]["merges"].pop(40), "are not merged to the token"),
        (lambda x: x["model"]["merges"].append(x["model"]["merges"][0]), "do not follow each"),
        (lambda x: x["model"]["vocab"].pop("<0x0A>"), "there is no token <0x0A>"),
        (lambda x: x["normalizer"]["normalizers"].pop(), "splits texts by .* after"),
        (lambda x: x.update(pre_tokenizer={"type": "Metaspace"}), "splits texts by .*Metaspace"),
    ],
)
def test_what_scores_would_encode_otherwise_is_refused(change: Any, message: str) -> None:
    tokenizer = train_bpe([TEXT] * 4, 300)
    definition = sentencepiece(True)
    tokenizer.definition = json.dumps(definition)
    assert isinstance(check_vocabulary(tokenizer), Blanks)
    change(definition)
    tokenizer.definition = json.dumps(definition)
    with pytest.raises(UsageError, match=message):
        check_vocabulary(tokenizer)


def test_a_changed_file_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    from sabia.core.errors import Failed

    saved(tmp_path, "llama")
    written = gguf_file.write_gguf

    def damaged(out: Path, *given: Any) -> int:
        size = written(out, *given)
        path = out / gguf_file.FILE
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        return size

    monkeypatch.setattr(gguf_file, "write_gguf", damaged)
    with pytest.raises(Failed, match="does not load back"):
        make(tmp_path, monkeypatch, "w4")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "w8", "w4a16", "mxfp4a16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma"])
def test_llama_cpp_computes_the_same(
    recipe: str, family: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Its logits beside ours of the decoded weights."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python reads GGUF files")
    import torch

    from sabia.core.model import forward
    from sabia.core.parallel.build_ops import load_ops

    more = {"norm_topk_prob": True} if family == "qwen3_moe" else {}
    model = saved(tmp_path, family, more, **(EXPERTS if more else {}), heads=2, context=128)
    make(tmp_path, monkeypatch, recipe)
    path = tmp_path / "q" / "model.gguf"
    engine = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, verbose=False, n_threads=1,
                             use_extra_bufts=False)  # fmt: skip
    text = TEXT + " e mais"
    tokenizer = hub_tokenizer(model)
    ids = tokenizer.encode_ordinary(text)
    assert engine.tokenize(text.encode(), add_bos=False) == ids
    engine.eval(ids)
    theirs = np.array(engine.scores[: len(ids)])
    spec, ops = hub.load_model(model)[0], load_ops("torch")
    decoded = {tensor.name: array for tensor, array in gguf_file.read_gguf(path, spec)}
    weights = ops.to_device(decoded, "float32")
    with torch.inference_mode():
        states = forward.hidden(spec, weights, np.array([ids]), ops)
        ours = forward.logits(spec, weights, states, ops)[0].numpy()
    off = np.linalg.norm(theirs - ours) / np.linalg.norm(ours)
    # llama.cpp rounds activations to F16, and beside quantized weights to 8 bits
    assert off < (3e-3 if recipe == "bf16" else 0.25)


def hub_tokenizer(model: Path) -> Any:
    from sabia.core.text.tokenize.tokenizer import load_tokenizer

    return load_tokenizer(model)
