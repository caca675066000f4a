"""`sabia dedup`: remove exact and near-duplicate documents.

METHODS tells what each `--method` runs: a module whose `run_method(job, options)` does it, and the
options that it takes; another option given beside it is refused, never ignored.
"""

import inspect
from importlib import import_module
from typing import Annotated, NamedTuple

from sabia.cli.grammar import command, option
from sabia.core.errors import UsageError
from sabia.core.shards.job import Job


class Method(NamedTuple):
    """A module of core, and the names of the command's options that it takes."""

    module: str
    takes: tuple[str, ...]


_DOCUMENTS = ("keep", "removed", "engine")
METHODS = {
    "minhash": Method(
        "sabia.core.text.dedup",
        (*_DOCUMENTS, "threshold", "ngram", "permutations", "verify"),
    ),
    "exact": Method("sabia.core.text.dedup", _DOCUMENTS),
}
DECONTAMINATE = Method(
    "sabia.core.recipes.decontaminate",
    ("decontaminate", "verdict", "overlap", "run", "removed", "engine"),
)


@command(
    kind="barrier",
    examples="""
    sabia dedup pages/ -o unique/ -j 2
    sabia classify pages/ | sabia dedup --removed removed.parquet -o unique.parquet
    sabia dedup pages/ --method exact -o unique.parquet
    sabia dedup scored/ --keep best:quality --threshold 0.8 -o unique/
    sabia dedup unique/ --decontaminate enem.toml --decontaminate gsm8k.toml -o clean/
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
    decontaminate: Annotated[
        list[str] | None,
        option("Take items of this benchmark out instead; give it often.", metavar="BENCH"),
    ] = None,
    verdict: Annotated[
        str, option("Of documents with items: auto, drop, mask or keep.", metavar="NAME")
    ] = "auto",
    overlap: Annotated[
        float, option("Share of a question, by weight, that makes it found.", metavar="SHARE")
    ] = 0.6,
    run: Annotated[
        int, option("Words in a row that are masked by themselves (0: never).", metavar="N")
    ] = 13,
) -> None:
    """Remove exact and near-duplicate documents, keeping one of each cluster.

    Adds the columns cluster (the id of the document kept) and cluster_size. The answer does not
    depend on -j. All shards are needed at once: run it as one job, not in a Slurm array.
    """
    if method not in METHODS:
        raise UsageError(f"--method: {method!r} (expected {', '.join(METHODS)})")
    if decontaminate:
        chosen, said = DECONTAMINATE, "--decontaminate"
    else:
        chosen, said = METHODS[method], f"--method {method}"
    _refuse_others(job, chosen, said)
    import_module(chosen.module).run_method(job, job.options)


def _refuse_others(job: Job, chosen: Method, said: str) -> None:
    """Raise UsageError for an option that is set and that what was chosen does not take."""
    choices = {f"--method {name}": method for name, method in METHODS.items()}
    choices["--decontaminate"] = DECONTAMINATE
    for name, parameter in inspect.signature(inspect.unwrap(dedup)).parameters.items():
        taken = name == "job" or name in chosen.takes or (name == "method" and "--m" in said)
        if not taken and job.options[name] not in (parameter.default, []):
            flag = name.replace("_", "-")
            users = ", ".join(other for other in choices if name in choices[other].takes)
            raise UsageError(f"--{flag}: {said} does not take it (only {users or 'alone'})")
