"""Text of a sample while its tokens are drawn: only what can no longer change is given."""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # the bytes so far are no whole character


class TextStream:
    """Decodes the tokens of a sample in pieces.

    A piece ends at a whole character, and before anything that may be the beginning of a stop
    string. It does not end with a token for which `unsettled` is true: a run of bytes becomes
    characters, or one U+FFFD a byte, when it is complete. Each token is decoded with those of the
    piece before it, because decoders treat the first token of a text differently (white space).
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str],
        unsettled: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self._decode, self._unsettled = decode, unsettled
        self._held = max((len(text) for text in stop), default=1) - 1  # characters
        self._ids: list[int] = []
        self._from = self._read = 0
        self._text = ""  # that is whole
        self._given = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that more tokens make certain."""
        self._ids += tokens
        if self._unsettled(self._ids[-1]):
            return ""
        before = self._decode(self._ids[self._from : self._read])
        after = self._decode(self._ids[self._from :])
        if after.startswith(before) and not after.endswith(UNFINISHED):
            self._text += after[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        return self._give(max(len(self._text) - self._held, self._given))

    def finish(self, text: str) -> str:
        """What is left of the whole text."""
        self._text = text
        return self._give(len(text))

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = end
        return piece
