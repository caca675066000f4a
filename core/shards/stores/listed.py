"""A directory of shards at a URL, as its manifest lists it.

The manifest is written last and holds what each shard was made from, and its version in the store.
So a later run knows by one listing and the manifest which shards are there, and reads none of them.
"""

import json
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from sabia.core.shards import atomic
from sabia.core.shards.atomic import sealed, unsealed
from sabia.core.shards.lineage.run_record import OF_SHARD, RUN
from sabia.core.shards.stores.objects import (
    NoObject,
    is_url,
    objects_below,
    put,
    read_object,
    version,
)

MADE, OF_PART = "provenances", ("inputs", "origins", "fingerprint")
OF_CALL = ("call", "counts")  # of a shard: the number of its call, the counts of its rows
Entries = dict[str, dict[str, Any]]
_known: dict[str, Entries] = {}


def read_json(path: str) -> dict[str, Any]:
    """A JSON object with a digest, also of a local file; NoObject, OSError or ValueError if there
    is none."""
    if not is_url(path):
        return atomic.read_json(path)
    return unsealed(json.loads(read_object(path)))


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Write a JSON object with its digest, also into a local file."""
    if not is_url(path):
        atomic.write_json(path, content)
        return
    put(path, (json.dumps(sealed(content), indent=1) + "\n").encode())


def refresh(out: str) -> None:
    """Forget what is known of a directory, at the start of a run."""
    _known.pop(out.rstrip("/"), None)


def forget(url: str) -> None:
    """Forget a shard that is written."""
    folder, name = posixpath.split(url)
    _known.get(folder, {}).pop(name, None)


def entry_of(url: str, manifest: str) -> dict[str, Any] | None:
    """What the manifest of its directory tells of a shard that is still the listed one: `rows`,
    `version`, `made` (its provenance) and RUN; None where it tells nothing."""
    folder, name = posixpath.split(url)
    if folder not in _known:
        _known[folder] = _entries(folder, manifest)
    return _known[folder].get(name)


def entries(out: str, manifest: str) -> Entries:
    """All shards of a directory that are as the manifest lists them, by name."""
    entry_of(f"{out.rstrip('/')}/", manifest)
    return _known[out.rstrip("/")]


def _entries(folder: str, manifest: str) -> Entries:
    try:
        listed = read_json(f"{folder}/{manifest}")
    except (NoObject, ValueError):  # damaged: it is written again
        return {}
    there = versions(folder)
    made, calls = listed.get(MADE, []), listed.get("calls", [])
    below: Entries = {}
    for shard in listed.get("shards", []):
        if MADE in shard and there.get(shard["name"]) == shard.get("version"):
            number, own = shard.pop(MADE)
            known = {key: value for key, value in shard.items() if key not in (*OF_SHARD, *OF_CALL)}
            known["made"] = made[number] | own
            if "call" in shard:
                about = {key: shard.get(key) for key in (*OF_SHARD, "fingerprint")}
                known[RUN] = calls[shard["call"]] | about | {"rows": shard["counts"]}
            below[shard["name"]] = known
    return below


def versions(folder: str) -> dict[str, str]:
    """Name → version of the objects in a folder; size and time where a store has no versions."""
    below = objects_below(folder).items()
    return {name: version_of(about) for name, about in below if "/" not in name}


def version_of(about: dict[str, Any]) -> str:
    """What the store says of an object's content, else its size and when it was written."""
    times = [str(about[name]) for name in ("mtime", "created", "modified") if name in about]
    return version("", about) or " ".join([str(about.get("size")), *times])


def shards_of(out: str, names: Sequence[str], made: Mapping[str, Any]) -> dict[str, object]:
    """The entries of a manifest for shards that are written, all with the same provenance."""
    there = objects_below(out)
    (common,), (part,) = shared([made])
    shards: list[dict[str, Any]] = []
    for name in names:
        size, store = int(there[name]["size"]), version_of(there[name])
        shards.append({"name": name, "size_bytes": size, "version": store, MADE: part})
    return {"shards": shards, MADE: [common]}


def shared(made: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """What several provenances have in common, once, and for each its number and its own part."""
    common: dict[str, dict[str, Any]] = {}
    parts = []
    for one in made:
        rest = {key: value for key, value in one.items() if key not in OF_PART}
        text = json.dumps(rest, sort_keys=True, default=str)
        common.setdefault(text, rest)
        own = {key: one[key] for key in OF_PART if key in one}
        parts.append([list(common).index(text), own])
    return list(common.values()), parts
