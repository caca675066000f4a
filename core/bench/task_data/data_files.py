"""Files of benchmark data: their rows, and those of a split of a data set by their names."""

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import zstandard

from sabia.core.digests import parquet_at
from sabia.core.errors import BadData
from sabia.core.files import unreadable
from sabia.core.shards.json_lines import decompressed

ENDINGS = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst")
_PATTERN = re.compile(r"[*?\[]")
_SPLIT = re.compile(r"(.*)/@(\w+)")


def read_rows(path: Path, named: str) -> list[dict[str, Any]]:
    """Rows of a Parquet, CSV, XML, JSON (an array, or one object) or JSON lines file (also .gz,
    .zst).

    `named` says what names the file: an option, or a key of a task.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(named, path, error) from error
    if path.suffix == ".parquet":
        with parquet_at(path) as file:
            return file.read().to_pylist()
    with path.open("rb") as file:
        try:
            content = decompressed(file).read()
            if path.suffix == ".xml":
                return _xml_rows(path, content)
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadData(f"{path}: not UTF-8 ({error})") from error
        except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
            raise BadData(f"{path}: corrupt or cut short ({error})") from error
    if path.suffix == ".csv":
        return _csv_rows(path, text)
    try:
        if text.lstrip()[:1] == "[":
            return list(json.loads(text))
        if path.suffix == ".json" and text.lstrip()[:1] == "{":
            with suppress(ValueError):  # else rows under this name
                return [json.loads(text)]
        # not splitlines(): it would also split at U+2028 inside strings
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise BadData(f"{path}: not JSON ({error})") from error


def _csv_rows(path: Path, text: str) -> list[dict[str, Any]]:
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))  # of the whole process
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        for row in table:
            if None in row.values():
                reason = f"line {table.line_num} has fewer columns"
                raise BadData(f"{path}: corrupt or cut short: {reason}")
            rows.append(row)
    except csv.Error as error:
        raise BadData(f"{path}: corrupt or cut short: line {table.line_num}: {error}") from error
    return rows


def _xml_rows(path: Path, content: bytes) -> list[dict[str, Any]]:
    """The elements below the root: their attributes, and by their names the texts of the elements
    in them, or lists of such rows where these have elements themselves; the name of the file
    without its ending is `file`."""
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise BadData(f"{path}: not XML ({error})") from error
    return [{"file": path.stem} | _element(element) for element in root]


def _element(element: ElementTree.Element) -> dict[str, Any]:
    row: dict[str, Any] = {**element.attrib}
    for part in element:
        row[part.tag] = [_element(one) for one in part] if len(part) else part.text or ""
    return row if len(element) else row | {"text": element.text or ""}


def files_of(path: Path) -> list[Path]:
    """The files of a path, whose last parts may be a pattern, or `@SPLIT` in a folder; [] if there
    are none."""
    if split := _SPLIT.fullmatch(str(path)):
        return split_files(Path(split[1]), split[2], None)
    if not _PATTERN.search(str(path)):
        return [path] if path.exists() else []
    first = next(i for i, part in enumerate(path.parts) if _PATTERN.search(part))
    return sorted(Path(*path.parts[:first]).glob(str(Path(*path.parts[first:]))))


def split_files(folder: Path, split: str, name: str | None) -> list[Path]:
    """The files of a split, by their names: SPLIT.parquet, SPLIT-00000-of-00002.parquet, …, in the
    folder, in `data` in it or, without a name, in the folder of its only configuration.

    name: that of the configuration; its own folder is looked at first. With several forms of a
    file, the first of ENDINGS is taken.
    """
    if not folder.is_dir():
        return []
    pattern = re.compile(rf"(?:.*[-_.])?{re.escape(split)}(?:-\d+-of-\d+)?")
    below = [] if name else [p for p in folder.iterdir() if p.is_dir()]
    folders = [folder / name, folder / "data" / name] if name else []
    for near in (*folders, folder, folder / "data", *(below if len(below) == 1 else ())):
        for ending in (*ENDINGS, ".arrow"):
            files = sorted(near.glob(f"*{ending}"))
            if matching := [f for f in files if pattern.fullmatch(f.name.removesuffix(ending))]:
                return matching
        if (near / split).is_dir() and (parts := sorted((near / split).glob("*.parquet"))):
            return parts
    return []
