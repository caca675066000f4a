"""Texts in pieces, names of tokens, and tool calls in replies."""

import contextlib
import json
import random
from typing import Any

import numpy as np
import pytest
from served import TEXT, little_engine

from sabia.core.errors import UsageError
from sabia.core.generate.engine import Engine
from sabia.core.generate.requests import Completion, Ended
from sabia.core.serve.protocol import Limits, parse_chat
from sabia.core.serve.replies import Reply
from sabia.core.serve.response_format import ResponseFormats
from sabia.core.serve.text_stream import TextStream
from sabia.core.serve.token_texts import TokenTexts
from sabia.core.serve.worker import Done, Progress
from sabia.core.text.tokenize.token_bytes import token_bytes
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe

TOOL = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}}}}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return little_engine()


@pytest.fixture(scope="module", params=["byte-level", "characters"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "byte-level":
        return train_bpe(TEXT * 10, 320)
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for piece in ["▁", "o", "l", "á", "▁o", "▁ol", "m", "u"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "o"), ("▁o", "l")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return Tokenizer(backend.to_str(), {}, None)


@pytest.mark.parametrize("stop", [(), ("do",), ("teste", "é só um")])
def test_pieces_are_the_text_and_never_part_of_a_stop_string(
    tokenizer: Tokenizer, stop: tuple[str, ...]
) -> None:
    draw = random.Random(4)
    for _ in range(200):
        words = draw.choices(["olá", "mundo", "é só u", "teste", "😀", "ação", "日本", "m"], k=6)
        text = draw.choice([" ", "", "\n"]).join(words)
        ids = tokenizer.encode(text) + draw.choices(range(1, tokenizer.vocab_size), k=3)
        whole = tokenizer.decode(ids)
        cut = min((at for s in stop if (at := whole.find(s)) >= 0), default=len(whole))
        stream, given = TextStream(tokenizer.decode, stop, TokenTexts(tokenizer).is_byte), ""
        while ids and not any(s in given for s in stop):
            count = draw.randint(1, 3)
            # a session ends the sample with the token that completes a stop string
            if stop and any(s in tokenizer.decode(ids[:count]) for s in stop):
                break
            given += stream.push(ids[:count])
            ids = ids[count:]
            assert whole.startswith(given)
            if len(given) > cut:
                break  # the stop string spans two pushes, which ends the sample in a session
        if len(given) <= cut:
            assert given + stream.finish(whole[:cut]) == whole[:cut]


def test_names_of_tokens_have_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    for text in ["olá mundo, é só um teste", "日本 😀", "ação"]:
        ids = tokenizer.encode(text)
        codes = [texts.bytes(token) for token in ids]
        joined = b"".join(code for code in codes if code is not None)
        assert joined.decode().replace(" ", "") == text.replace(" ", "")
        for token, code in zip(ids, codes, strict=True):
            assert code is not None
            try:
                assert texts.name(token) == code.decode()
            except UnicodeDecodeError:
                assert texts.name(token) == "bytes:" + "".join(f"\\x{b:02x}" for b in code)


def test_tokens_are_the_bytes_of_the_text_they_are_part_of(tokenizer: Tokenizer) -> None:
    codes, opens = token_bytes(tokenizer, tokenizer.vocab_size + 3)
    assert codes[-3:] == [b""] * 3 and opens[-3:] == [True] * 3
    draw = random.Random(2)
    whole = [number for number in range(tokenizer.vocab_size) if codes[number]]
    for _ in range(600):
        ids = draw.choices(whole, k=3)
        with contextlib.suppress(UnicodeDecodeError):
            text = b"".join(codes[token] for token in ids).decode()
            assert (tokenizer.decode(ids) == text) == opens[ids[0]]


def test_decoders_that_add_spaces_are_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UsageError, match="its decoder \\(WordPiece; expected ByteLevel"):
        token_bytes(Tokenizer(backend.to_str(), {}, None), 3)


def reply_to(engine: Engine, text: str, **parameters: Any) -> tuple[Reply, Done]:
    """The reply to a chat whose model says `text`."""
    body = {"model": "m", "messages": [{"role": "user", "content": "2 + 3 ="}], **parameters}
    limits = Limits(128_000, 8, 8, engine.spec.vocab_size)
    formats = ResponseFormats(engine.tokenizer, engine.spec.vocab_size)
    asked = parse_chat(json.dumps(body).encode(), "m", engine.tokenizer, limits, formats)
    ids = engine.tokenizer.encode(text)
    logs = np.zeros(len(ids)).tolist()
    made = Completion("r", 0, ids, text, logs, logs, "stop")
    reply = Reply(asked, "m", engine.tokenizer, TokenTexts(engine.tokenizer))
    return reply, Done(0, Ended(1, made, (), None, [0] * len(ids)))


def test_tool_calls_are_read_back(engine: Engine) -> None:
    from sabia.core.generate.chat import turn_text

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 5}}}
    messages = [{"role": "user", "content": "2 + 3 ="},
                {"role": "assistant", "content": "", "tool_calls": [call]}]  # fmt: skip
    text = turn_text(messages, engine.tokenizer, [TOOL])
    reply, done = reply_to(engine, text, tools=[TOOL])
    assert not reply.in_pieces
    (choice,) = reply.whole([done])["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and made["id"].startswith("call_")
    assert made["function"] == {"name": "add", "arguments": '{"a": 5}'}
    reply, done = reply_to(engine, text, tools=[TOOL], stream=True)
    piece = reply.piece(done)
    assert piece is not None
    (choice,) = piece["choices"]
    assert choice["delta"]["tool_calls"][0]["index"] == 0
    assert choice["delta"]["role"] == "assistant" and choice["finish_reason"] == "tool_calls"
    # without tools, or with tool_choice none, the text is content
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        reply, done = reply_to(engine, "5", **more)
        assert reply.in_pieces
        assert reply.whole([done])["choices"][0]["message"] == {"role": "assistant", "content": "5"}


def test_a_live_stream_gives_the_tokens_that_no_event_has_given(engine: Engine) -> None:
    reply, done = reply_to(engine, "the quick fox", stream=True, return_token_ids=True)
    ids = done.ended.completion.tokens
    first = reply.piece(Progress(0, 0, ids[:2], [0.0, 0.0], (), [0, 0]))
    last = reply.piece(done)
    pieces = [one["choices"][0] for one in (first, last) if one is not None]
    assert [token for one in pieces for token in one["token_ids"]] == ids
    assert "".join(one["delta"]["content"] for one in pieces) == "the quick fox"
    assert reply.usage()["completion_tokens"] == len(ids)
