"""Removing the content encodings of a response body, within limits.

gzip, deflate (with and without zlib's header), br and zstd, alone or combined. A few kilobytes can
decompress to gigabytes, so at most `limit` bytes are decompressed, and a body that grows more than
MAX_RATIO times beyond GROWTH_BYTES is refused as a decompression bomb.
"""

import zlib

import brotli
import zstandard

MAX_RATIO = 200  # typical ratios are 20, rarely 50
GROWTH_BYTES = 1 << 20  # always allowed
MAX_ENCODINGS = 2
ACCEPTED = "gzip, deflate, br, zstd"
_WINDOW_BYTES = 8 << 20  # what RFC 9659 allows
_PIECE_BYTES = 256


class Undecodable(ValueError):
    """The body does not match its Content-Encoding, or is a decompression bomb."""


def decoded(body: bytes, encodings: str, limit: int) -> bytes:
    """The decompressed body, at most `limit` + 1 bytes. Raises Undecodable."""
    names = [name.strip().lower() for name in encodings.split(",")]
    names = [name for name in names if name not in ("", "identity", "none", "utf-8")]
    if len(names) > MAX_ENCODINGS:
        raise Undecodable(f"{len(names)} content encodings")
    for name in reversed(names):
        body = _unpacked(name.removeprefix("x-"), body, limit)
    return body


def _unpacked(name: str, body: bytes, limit: int) -> bytes:
    unpack = {"gzip": gunzip, "deflate": _inflate, "br": _brotli, "zstd": _zstd}.get(name)
    if unpack is None:
        raise Undecodable(f"content encoding {name:.40}")
    allowed = min(limit, max(GROWTH_BYTES, MAX_RATIO * len(body)))
    try:
        unpacked = unpack(body, allowed + 1) if body else b""
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError) as error:
        raise Undecodable(f"damaged {name} ({error})") from error
    if len(unpacked) > allowed and allowed < limit:
        raise Undecodable(f"a decompression bomb ({name}, over {MAX_RATIO} times its size)")
    return unpacked


def gunzip(body: bytes, limit: int) -> bytes:
    """All members of a gzip file, at most `limit` bytes; EOFError if it is cut short."""
    unpacked, rest = b"", body
    while rest and len(unpacked) < limit:
        member = zlib.decompressobj(31)
        try:
            unpacked += member.decompress(rest, limit - len(unpacked))
        except zlib.error:
            if unpacked:
                break  # what follows the last member is padding
            raise
        if not member.eof and not member.unconsumed_tail and len(unpacked) < limit:
            raise EOFError("it ends too early")
        rest = member.unused_data if member.eof else b""
    return unpacked


def _inflate(body: bytes, limit: int) -> bytes:
    for window in (15, -15):
        try:
            stream = zlib.decompressobj(window)
            unpacked = stream.decompress(body, limit)
        except zlib.error:
            continue
        if not stream.eof and len(unpacked) < limit:
            raise EOFError("it ends too early")
        return unpacked
    raise zlib.error("no deflate stream")


def _brotli(body: bytes, limit: int) -> bytes:
    stream = brotli.Decompressor()
    unpacked = bytearray(stream.process(body, output_buffer_limit=limit))
    while not stream.is_finished() and not stream.can_accept_more_data() and len(unpacked) < limit:
        unpacked += stream.process(b"", output_buffer_limit=limit - len(unpacked))
    if not stream.is_finished() and len(unpacked) < limit:
        raise EOFError("it ends too early")
    return bytes(unpacked[:limit])


def _zstd(body: bytes, limit: int) -> bytes:
    """In small pieces, because a block of 4 bytes may decompress to 128 KiB."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    unpacked, frame = bytearray(), unpacker.decompressobj()
    rest = memoryview(body)
    while rest and len(unpacked) < limit:
        unpacked += frame.decompress(rest[:_PIECE_BYTES])
        rest = rest[_PIECE_BYTES:]
        if frame.eof and (rest or frame.unused_data):
            rest = memoryview(frame.unused_data + bytes(rest))
            frame = unpacker.decompressobj()
    if not frame.eof and len(unpacked) < limit:
        raise EOFError("it ends too early")
    return bytes(unpacked[:limit])
