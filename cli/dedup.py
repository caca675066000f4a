"""`sabia dedup`: remove exact and near-duplicate documents."""

from typing import Annotated

from sabia.cli.grammar import command, option
from sabia.core.shards.job import Job


@command(
    kind="barrier",
    examples="""
    sabia dedup pages/ -o unique/ -j 2
    sabia classify pages/ | sabia dedup --removed removed.parquet -o unique.parquet
    sabia dedup pages/ --method exact -o unique.parquet
    sabia dedup scored/ --keep best:quality --threshold 0.8 -o unique/
    """,
)
def dedup(
    job: Job,
    method: Annotated[
        str, option("minhash (exact and near) or exact.", metavar="NAME")
    ] = "minhash",
    threshold: Annotated[
        float, option("Jaccard similarity of word n-grams from which two are one.", metavar="S")
    ] = 0.7,
    ngram: Annotated[int, option("Words in an n-gram.", metavar="N")] = 5,
    permutations: Annotated[
        int, option("Hashes of a signature; bands follow from the threshold.", metavar="N")
    ] = 128,
    keep: Annotated[
        str, option("Whom to keep: longest, first, or best:SCORE.", metavar="RULE")
    ] = "longest",
    verify: Annotated[bool, option("Compare candidates exactly.", "--verify/--no-verify")] = True,
    removed: Annotated[
        str, option("What was removed, with reason and kept_id.", metavar="FILE.parquet")
    ] = "",
    engine: Annotated[str, option("auto, numba or numpy.", metavar="NAME")] = "auto",
) -> None:
    """Remove exact and near-duplicate documents, keeping one of each cluster.

    Adds the columns cluster (the id of the document kept) and cluster_size. The answer does not
    depend on -j. All shards are needed at once: run it as one job, not in a Slurm array.
    """
    from sabia.core.text.dedup import run
    from sabia.core.text.dedup_config import DedupConfig

    run(job, DedupConfig(method, threshold, ngram, permutations, keep, verify, engine), removed)
