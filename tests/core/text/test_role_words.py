"""Role words of the chat template are single tokens, and nothing else changes its meaning."""

import pytest

from sabia.core.options.tokenize import TokenizerTraining
from sabia.core.text.tokenize.tokenizer_training import BYTES, ROLE_WORDS, specials, train_bpe

TEXTS = [f"the house number {i} of the street has seven windows, ação e pão" for i in range(300)]


@pytest.mark.parametrize("vocab_size", [320, 400, 5000])
def test_roles_are_single_tokens(vocab_size: int) -> None:
    tokenizer = train_bpe(TEXTS, vocab_size)
    assert tokenizer.vocab_size <= vocab_size
    for word in ROLE_WORDS:
        assert len(tokenizer.encode(word)) == 1
    for text in [*TEXTS[:5], "assistants use tools, users too: systematically", "日本 \n\t x"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_vocabulary_is_filled_up_to_what_was_asked() -> None:
    assert 308 <= train_bpe(TEXTS, 310).vocab_size <= 310


def test_a_vocabulary_of_bytes_only_is_left_alone() -> None:
    least = len(specials(TokenizerTraining())) + BYTES
    assert train_bpe(TEXTS, least).vocab_size == least
