"""Find the newest valid checkpoint, local or at a URL; damaged ones are skipped with a warning.

Every process of a run calls this with its rank and a function `agree` (the logical AND over all
processes): each checks, or downloads, its share of the files. If the directory is empty, the
checkpoint is downloaded from the URL into the directory, as if it had been written there.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sabia.core import notes
from sabia.core.errors import BadData, Failed
from sabia.core.parallel.world import World
from sabia.core.shards.atomic import fsync_directory
from sabia.core.train.checkpoint import local
from sabia.core.train.checkpoint.local import COMMITTED, MANIFEST, Checkpoint
from sabia.core.train.checkpoint.pieces import sync

if TYPE_CHECKING:
    from sabia.core.train.checkpoint.remote import Remote

Agree = Callable[[bool], bool]


def latest(
    directory: Path, remote_url: str = "", world: World | None = None, agree: Agree = bool
) -> Checkpoint | None:
    """The newest checkpoint that passes all checks, in `directory`; None if there is none.

    Raises BadData if there are checkpoints but none is valid, Failed if the URL does not respond.
    """
    search = _Search(directory, world or World(), agree)
    remote = None
    if remote_url:
        from sabia.core.train.checkpoint.remote import Remote

        remote = Remote(remote_url)
    local_steps, remote_steps = local.steps(directory), remote.steps() if remote else []
    for step in sorted({*local_steps, *remote_steps}, reverse=True):
        # a local checkpoint is preferred; a damaged one may be intact at the URL
        checkpoint = search.local(step) if step in local_steps else None
        if checkpoint is None and remote and step in remote_steps:
            checkpoint = search.downloaded(remote, step)
        if checkpoint is not None:
            return checkpoint
    if local_steps or remote_steps:
        raise BadData(
            f"{directory}: none of {len({*local_steps, *remote_steps})} checkpoints is valid; "
            "restore a valid one, or use --force to start over"
        )
    return None


class _Search:
    def __init__(self, directory: Path, world: World, agree: Agree) -> None:
        self.directory, self.world, self.agree = directory, world, agree

    def local(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step if every process finds its share of the files valid."""
        checkpoint, good = None, True
        try:
            path = local.path_of(self.directory, step)
            checkpoint = local.verify(path, self.world.rank, self.world.size)
        except BadData as error:
            notes.warn(f"{error}; looking for the checkpoint before it")
            good = False
        return checkpoint if self.agree(good) else None

    def downloaded(self, remote: "Remote", step: int) -> Checkpoint | None:
        """The checkpoint of a step, downloaded from the URL."""
        into = local.saving_path(self.directory, step)
        if self.world.leads:
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir(parents=True)
        # a barrier: the directory exists for all processes
        self.agree(True)
        if not self.agree(self._download(remote, step, into)):
            return None
        if self.world.leads:
            fsync_directory(into)
            local.rename_into_place(into, local.path_of(self.directory, step))
        self.agree(True)
        return self.local(step)

    def _download(self, remote: "Remote", step: int, into: Path) -> bool:
        try:
            manifest, text, mark = remote.manifest(step)
            # every process downloads its share of the files
            names = sorted(manifest["files"])[self.world.rank :: self.world.size]
            remote.download(step, names, into)
        except (BadData, Failed) as error:
            notes.warn(f"{error}; looking for the checkpoint before it")
            return False
        except OSError as error:
            raise Failed(f"checkpoint: {into} cannot be written ({error})") from error
        if self.world.leads:
            (into / MANIFEST).write_bytes(text)
            (into / COMMITTED).write_bytes(mark)
        sync(into / name for name in names)
        notes.note(f"{remote.url}: downloaded the checkpoint of step {step:,}")
        return True
