"""Bytes of a page to text: byte order mark, HTTP header, declaration in the page, UTF-8, detection.

The order is that of the HTML standard (13.2.3.1, encoding sniffing), with three deviations for real
pages: if a declared UTF-8 is not valid UTF-8, the encoding is detected; a page without a
declaration is read as UTF-8 if it decodes; and so is one that declares another encoding, where it
is not ASCII alone, since text of other encodings is hardly ever valid UTF-8. Labels have the
meaning of the WHATWG encoding standard (latin-1 is windows-1252).
"""

import codecs
import re
from typing import Any

_CHARSET = re.compile(rb"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_DECLARED_WITHIN = 2048  # bytes
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"),
          (codecs.BOM_UTF16_BE, "utf-16-be"))  # fmt: skip


def decode(body: bytes, content_type: str) -> str:
    """The page's text; bytes that are invalid in its encoding become U+FFFD."""
    for mark, encoding in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(encoding, "replace")
    header = _CHARSET.search(content_type.encode("ascii", "replace"))
    if header:
        encoding = _label(header)
    else:
        inside = _CHARSET.search(body[:_DECLARED_WITHIN])
        encoding = _label(inside) if inside else ""
        if encoding.startswith("utf-16"):
            encoding = "utf-8"  # or the declaration could not have been read
    if encoding in ("", "utf-8", "utf8"):
        return _utf8(body, bool(encoding))
    return _mislabelled(body) or _as(body, encoding)


def _label(match: re.Match[bytes]) -> str:
    return match[1].decode("ascii", "replace").lower()


def _utf8(body: bytes, declared: bool) -> str:
    """UTF-8, unless many bytes are invalid; a character cut off at the end is ignored."""
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        text = body.decode("utf-8", "replace")
        few = text.count("\ufffd") <= (len(body) // 500 if declared else 0)
        if few or error.start >= len(body) - 3:
            return text
    return _as(body, "")


def _mislabelled(body: bytes) -> str:
    """The text if it is UTF-8, up to a character cut off at the end, and not ASCII alone."""
    try:
        text = codecs.utf_8_decode(body, "strict", False)[0]
    except UnicodeDecodeError:
        return ""
    return "" if text.isascii() else text


def _as(body: bytes, encoding: str) -> str:
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    known = map_encoding_to_html5(encoding, fallback_utf8=False) if encoding else None
    html5_encoding: Any = known or detect_encoding(body)
    return str(bytes_to_str(body, html5_encoding))
