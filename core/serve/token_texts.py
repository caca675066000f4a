"""Tokens as the API names them: by their text, or by their bytes where these are no characters."""

from functools import cache

from sabia.core.text.tokenize.bpe_tables import byte_of_character
from sabia.core.text.tokenize.token_bytes import BYTE_LEVEL, FALLBACK, decoder_steps
from sabia.core.text.tokenize.tokenizer import Tokenizer

UNKNOWN = "\ufffd"


class TokenTexts:
    """The names of a vocabulary's tokens. A token of incomplete UTF-8 is `bytes:` and its bytes,
    such as `bytes:\\xc3`, as in the API of OpenAI."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        steps = decoder_steps(tokenizer)
        self._byte_of = byte_of_character() if BYTE_LEVEL in steps else {}
        self.name, self.bytes = cache(self._name), cache(self._bytes)
        self._fallback = FALLBACK in steps

    def is_byte(self, token: int) -> bool:
        """Whether a token is one byte of SentencePiece's byte fallback."""
        return self._fallback and self._spelled(token).startswith("<0x")

    def _spelled(self, token: int) -> str:
        return self._tokenizer.backend.id_to_token(token) or ""

    def _bytes(self, token: int) -> bytes | None:
        """The bytes of a token; None where the tokenizer does not say."""
        text = self._tokenizer.decode([token])
        if UNKNOWN not in text:
            return text.encode()
        spelled = self._spelled(token)
        if spelled and all(character in self._byte_of for character in spelled):
            return bytes(self._byte_of[character] for character in spelled)
        if self.is_byte(token):
            return bytes([int(spelled[3:5], 16)])
        return None

    def _name(self, token: int) -> str:
        code = self.bytes(token)
        if code is None:
            return self._tokenizer.decode([token])
        try:
            return code.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in code)
