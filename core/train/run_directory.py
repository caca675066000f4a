"""The output directory of a training run: `checkpoints/`, `metrics.jsonl`, `final/`, `run.json`.

run.json holds the run's identity (everything that determines the weights: inputs, model, options)
and whether it has finished. The same command resumes an unfinished run and does not change a
finished one; a command with another identity is an error, so that no work is overwritten. The
directory is locked by the process of a run; a kill releases the lock.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.results import recorded_result, result_version
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.lineage.run_record import RUN
from sabia.core.train.checkpoint.local import remove_leftovers

Identity = Mapping[str, Any]


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run directory, and its state."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """Hugging Face directory of the finished model."""
        return self.path / "final"

    @property
    def record(self) -> Path:
        """run.json."""
        return self.path / "run.json"

    def finished(self, identity: Identity) -> bool:
        """True if this run has finished with results of the current version; raises UsageError if
        the directory holds another run."""
        if not self.record.exists():
            return False
        try:
            record = read_json(self.record)
            stored_identity, done = record["identity"], bool(record["finished"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadData(f"{self.record}: not the record of a run ({error})") from error
        refuse_another(str(self.path), stored_identity, identity, "-o")
        if done and _outdated(record):
            notes.note(f"{self.path}: results of an earlier version, which are computed again")
            return False
        return done and (self.final / "config.json").exists()

    def recorded_identity(self) -> Identity:
        """The identity of the run in the directory; {} if there is none."""
        return dict(self._recorded().get("identity", {}))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for this process; Failed if another run holds the lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "w") as lock:
            try:
                # the kernel releases the lock when the process ends
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Failed(f"{self.path}: another process is training in it") from error
            yield

    def begin(
        self,
        identity: Identity,
        force: bool,
        checkpoint_url: str = "",
        run: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the record of a run that starts or resumes.

        `force` deletes an earlier run first, also at the URL; so does a run that has finished with
        results of an earlier version. One that has not is resumed. run: see shards.run_record.
        """
        record = self._recorded()
        if record and not record.get("finished") and not force and _outdated(record):
            notes.warn(
                f"{self.path}: the run began with results of another version (see core/results.py);"
                " --force starts it over"
            )
        if force or (record.get("finished") and _outdated(record)):
            from sabia.core.train.checkpoint.remote import discard_all

            discard_all(checkpoint_url)
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            for old in (*self.path.glob("metrics*.jsonl"), *self.path.glob("skipped.jsonl")):
                old.unlink()
            self.record.unlink(missing_ok=True)
            shutil.rmtree(self.final, ignore_errors=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.checkpoints)
        self._write(identity, finished=False, **({RUN: run} if run else {}))

    def finish(self, identity: Identity, **figures: object) -> None:
        """Record that the run has finished, with its last metrics."""
        self._write(identity, finished=True, **figures)

    def started_at(self) -> float:
        """Seconds since the epoch at the run's first start; now, if it has not started."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return float(self._recorded()["started_at"])
        return time.time()

    def _recorded(self) -> dict[str, Any]:
        """run.json; {} if there is none that can be read."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(read_json(self.record))
        return {}

    def _write(self, identity: Identity, finished: bool, **more: object) -> None:
        text = json.dumps(identity, sort_keys=True)
        before = self._recorded()
        number = recorded_result(before) if before else result_version(str(identity.get("command")))
        record = {
            "version": version("sabia"),
            "result": number,  # at the first start
            "started_at": self.started_at(),
            "fingerprint": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            "finished": finished,
            "identity": dict(identity),
            **more,
        }
        write_json(self.record, record)


def _outdated(record: Mapping[str, Any]) -> bool:
    """Whether the record of a run is of results of another version than the current one."""
    command = str(record.get("identity", {}).get("command"))
    return recorded_result(record) != result_version(command)


def refuse_another(location: str, stored: Identity, identity: Identity, option: str) -> None:
    """Raise UsageError if a run stored at the location of `option` has another identity."""
    new = json.loads(json.dumps(identity))
    names = [name for name in {**stored, **new} if stored.get(name) != new.get(name)]
    changed = [f"{name} {_short(stored.get(name))}, now {_short(new.get(name))}" for name in names]
    if changed:
        raise UsageError(
            f"{location}: holds another run ({'; '.join(changed[:3])}); give another {option}, or "
            "--force to discard it and start over"
        )


def _short(value: object) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 40 else text[:39] + "…"
