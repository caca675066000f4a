"""Find the newest good checkpoint, here or at a URL; what is damaged is passed over with a warning.

Every process of a run calls this with its place and a way to agree (the logical and of all
processes' answers): each checks, or downloads, its share of the files. On a machine with an empty
directory the checkpoint comes down from the URL and then lies in the directory as if written there.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from sabia.core import notes
from sabia.core.errors import BadData, Failed
from sabia.core.parallel.world import World
from sabia.core.shards.atomic import fsync_directory
from sabia.core.train.checkpoint import local
from sabia.core.train.checkpoint.local import COMMITTED, MANIFEST, Checkpoint
from sabia.core.train.checkpoint.remote import Remote
from sabia.core.train.checkpoint.writer import sync

Agree = Callable[[bool], bool]


def latest(
    directory: Path, remote_url: str = "", world: World | None = None, agree: Agree = bool
) -> Checkpoint | None:
    """The newest checkpoint that passes all checks, in `directory`; None when there is none.

    Raises BadData where there are some and none is good, Failed where the URL does not answer.
    """
    search = _Search(directory, world or World(), agree)
    remote = Remote(remote_url) if remote_url else None
    here, there = local.steps(directory), remote.steps() if remote else []
    for step in sorted({*here, *there}, reverse=True):
        found = search.local(step) if step in here else None
        if found is None and remote and step in there:
            found = search.fetched(remote, step)
        if found is not None:
            return found
    if here or there:
        raise BadData(
            f"{directory}: none of {len({*here, *there})} checkpoints is good; put back one that "
            "is, or --force to start over"
        )
    return None


class _Search:
    def __init__(self, directory: Path, world: World, agree: Agree) -> None:
        self.directory, self.world, self.agree = directory, world, agree

    def local(self, step: int) -> Checkpoint | None:
        """The checkpoint of a step if all processes find their share good."""
        found, good = None, True
        try:
            path = local.path_of(self.directory, step)
            found = local.verify(path, self.world.rank, self.world.size)
        except BadData as error:
            notes.warn(f"{error}; looking for the checkpoint before it")
            good = False
        return found if self.agree(good) else None

    def fetched(self, remote: Remote, step: int) -> Checkpoint | None:
        """The checkpoint of a step brought from the URL."""
        into = local.saving_path(self.directory, step)
        if self.world.leads:
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir(parents=True)
        self.agree(True)
        if not self.agree(self._download(remote, step, into)):
            return None
        if self.world.leads:
            fsync_directory(into)
            local.set_in_place(into, local.path_of(self.directory, step))
        self.agree(True)
        return self.local(step)

    def _download(self, remote: Remote, step: int, into: Path) -> bool:
        try:
            manifest, text, mark = remote.manifest(step)
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
        notes.note(f"{remote.url}: fetched the checkpoint of step {step:,}")
        return True
