"""A trainer's output: `checkpoints/`, `metrics.jsonl`, `final/` and `run.json`, which says of what.

run.json holds the run's identity (everything that decides the weights: inputs, model, options) and
whether it has finished. The same call again resumes an unfinished run and leaves a finished one as
it is; a call of another identity is refused, because there is work in the directory. One process
at a time: the directory is locked while a run lives, and a kill releases the lock.
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

from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.shards.atomic import write_atomic
from sabia.core.train import checkpoint

Identity = Mapping[str, Any]


@dataclass(frozen=True)
class RunDirectory:
    """The places in a run directory, and its state."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """The finished model, in Hugging Face form."""
        return self.path / "final"

    @property
    def record(self) -> Path:
        """run.json."""
        return self.path / "run.json"

    def finished(self, identity: Identity) -> bool:
        """True when this very run has finished; raises UsageError if it holds another."""
        if not self.record.exists():
            return False
        try:
            said = json.loads(self.record.read_text("utf-8"))
            found, done = said["identity"], bool(said["finished"])
        except (ValueError, KeyError, TypeError) as error:
            raise BadData(f"{self.record}: not a run's record ({error})") from error
        refuse_another(str(self.path), found, identity, "-o")
        return done and (self.final / "config.json").exists()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory for this process; Failed when another run has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Failed(f"{self.path}: another process is training in it") from error
            yield

    def begin(self, identity: Identity, force: bool, checkpoint_url: str = "") -> None:
        """Write the record of a run that starts or resumes.

        `force` discards what is there, at the URL, too.
        """
        if force:
            checkpoint.discard_all(checkpoint_url)
            shutil.rmtree(self.checkpoints, ignore_errors=True)
            for old in (*self.path.glob("metrics*.jsonl"), *self.path.glob("skipped.jsonl")):
                old.unlink()
            self.record.unlink(missing_ok=True)
            shutil.rmtree(self.final, ignore_errors=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoint.sweep(self.checkpoints)
        self._write(identity, finished=False)

    def finish(self, identity: Identity, **figures: Any) -> None:
        """Record that the run is done, with its last figures."""
        self._write(identity, finished=True, **figures)

    def started_at(self) -> float:
        """Seconds since the epoch when the run was first begun; now, when it has not been."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return float(json.loads(self.record.read_text("utf-8"))["started_at"])
        return time.time()

    def _write(self, identity: Identity, finished: bool, **more: Any) -> None:
        text = json.dumps(identity, sort_keys=True)
        said = {
            "version": version("sabia"),
            "started_at": self.started_at(),
            "fingerprint": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            "finished": finished,
            "identity": dict(identity),
            **more,
        }
        write_atomic(self.record, json.dumps(said, indent=1) + "\n")


def refuse_another(place: str, found: Identity, identity: Identity, option: str) -> None:
    """Raise UsageError unless what lies in a place, given by an option, is of this identity."""
    changed = _differences(found, json.loads(json.dumps(identity)))
    if changed:
        raise UsageError(
            f"{place}: holds another run ({'; '.join(changed[:3])}); give another {option}, or "
            "--force to discard it and start over"
        )


def _differences(old: Identity, new: Identity) -> list[str]:
    """'lr 0.001, now 0.002' for each entry that differs."""
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} {_short(old.get(name))}, now {_short(new.get(name))}" for name in names]


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 40 else text[:39] + "…"
