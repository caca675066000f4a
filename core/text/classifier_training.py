"""Train a fastText classifier from labelled documents, and say how good it is."""

import json
import sys
from dataclasses import asdict, dataclass

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.text import fasttext_model


@dataclass(frozen=True)
class TrainConfig:
    """label: the column with the labels."""

    label: str


def run(job: Job, config: TrainConfig) -> None:
    """Train on the job's inputs; -o names the model."""
    if job.to_stdout or job.to_file:
        raise UsageError("train needs -o MODEL.bin")
    sources = open_inputs(job, "document")
    if job.dry_run:
        print(f"train {job.out} from {len(sources)} shards")
        return
    figures = fasttext_model.train(sources, config.label, str(job.out), job.seed, job.jobs)
    if not figures:
        notes.warn("too few documents to hold any out; nothing measured")
    for one in figures:
        notes.note(
            f"held out: {one.label}: precision {one.precision:.3f},"
            f" recall {one.recall:.3f} of {one.documents:,} documents"
        )
    if job.json:
        print(json.dumps({"labels": [asdict(one) for one in figures]}), file=sys.stdout)
