"""`sabia dedup`: remove duplicate documents, and parts of documents that are copies.

METHODS tells what each `--method` runs: a module whose `run_method(job, options)` does it, and the
options that it takes; another option given beside it is refused, never ignored.
"""

import inspect
from importlib import import_module
from typing import Annotated, NamedTuple

from sabia.cli.classifier_options import BACKEND
from sabia.cli.grammar import command, option, size
from sabia.core.errors import UsageError
from sabia.core.shards.job import Job


class Method(NamedTuple):
    """A module of core, and the names of the command's options that it takes."""

    module: str
    takes: tuple[str, ...]


_DOCUMENTS = ("keep", "removed", "engine")
_PLACES = ("scratch", "phase", "against", "index", "replaced", "decisions")
_PARTS = ("action", "share", "mem", "removed", "engine")
METHODS = {
    "minhash": Method(
        "sabia.core.text.dedup",
        (
            *_DOCUMENTS,
            *_PLACES,
            "threshold",
            "ngram",
            "permutations",
            "signatures",
            "redis",
            "verify",
            "mem",
        ),
    ),
    "exact": Method("sabia.core.text.dedup", (*_DOCUMENTS, *_PLACES)),
    "substring": Method("sabia.core.text.substring", (*_PARTS, "span", "tokenizer")),
    "line": Method("sabia.core.text.line_copies", (*_PARTS, "unit", "min_copies", "min_words")),
    "url": Method("sabia.core.text.url_copies", ("keep", "removed")),
    "semantic": Method(
        "sabia.core.recipes.semantic_dedup",
        ("keep", "removed", "threshold", "embeddings", "model", "clusters", "backend"),
    ),
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
    sabia dedup unique/ --method substring --tokenizer model/ --removed spans.parquet -o cut/
    sabia dedup pages/ --method line --unit paragraph --min-copies 3 -o cut/
    sabia dedup crawls/ --method url --keep newest -o unique/
    sabia dedup unique/ --method semantic --model encoder/ --threshold 0.93 -o unlike/
    sabia dedup unique/ --decontaminate enem.toml --decontaminate gsm8k.toml -o clean/
    """,
)
def dedup(
    job: Job,
    method: Annotated[
        str,
        option(
            "minhash (exact and near), exact, substring, line, url or semantic.", metavar="NAME"
        ),
    ] = "minhash",
    threshold: Annotated[
        float | None,
        option("From which two are one: 0.7 of word n-grams; semantic: cosine 0.95.", metavar="S"),
    ] = None,
    ngram: Annotated[int, option("Words in an n-gram.", metavar="N")] = 5,
    permutations: Annotated[
        int, option("Hashes of a signature; bands follow from the threshold.", metavar="N")
    ] = 128,
    signatures: Annotated[
        str, option("sabia, or datasketch: the values of its MinHash.", metavar="NAME")
    ] = "sabia",
    keep: Annotated[
        str, option("Whom to keep: longest, first, best:SCORE; url: newest.", metavar="RULE")
    ] = "longest",
    verify: Annotated[bool, option("Compare candidates exactly.", "--verify/--no-verify")] = True,
    decisions: Annotated[
        bool, option("Write ids and what was decided of them, no text.", "--decisions")
    ] = False,
    removed: Annotated[
        str, option("What was removed, with reason and kept_id.", metavar="FILE.parquet")
    ] = "",
    engine: Annotated[str, option("auto, numba or numpy.", metavar="NAME")] = "auto",
    against: Annotated[
        str, option("Drop what this index of earlier runs holds.", metavar="DIR")
    ] = "",
    index: Annotated[str, option("Add the documents kept to this index.", metavar="DIR")] = "",
    redis: Annotated[
        str,
        option(
            "Do both with datasketch's index in Redis; round trips: 20x slower.",
            metavar="redis://HOST:PORT/DB?name=NAME",
        ),
    ] = "",
    replaced: Annotated[
        str,
        option(
            "Let better new documents replace indexed ones, listed here.", metavar="FILE.parquet"
        ),
    ] = "",
    scratch: Annotated[
        str, option("Keep sketches here: to go on after a kill, and for phases.", metavar="DIR")
    ] = "",
    phase: Annotated[
        str,
        option("In arrays: sketch (slices), compare (one job), write (slices).", metavar="NAME"),
    ] = "",
    span: Annotated[
        int | None, option("Least copy: 50 tokens, or 200 bytes without a tokenizer.", metavar="N")
    ] = None,
    tokenizer: Annotated[str, option("Count spans in its tokens.", metavar="PATH")] = "",
    unit: Annotated[
        str, option("line, paragraph, or sentences (runs of three).", metavar="NAME")
    ] = "line",
    min_copies: Annotated[int, option("Copies that make a line go.", metavar="N")] = 2,
    min_words: Annotated[int, option("Lines of fewer words stay.", metavar="N")] = 1,
    action: Annotated[
        str, option("Of copied parts: cut, drop (documents), or mark.", metavar="NAME")
    ] = "cut",
    share: Annotated[
        float | None, option("Drop documents copied by more: 1; drop: 0.5.", metavar="SHARE")
    ] = None,
    mem: Annotated[float | None, size("Memory for sorting and comparing: 1GiB.")] = None,
    embeddings: Annotated[str, option("Column of vectors, for semantic.", metavar="COLUMN")] = "",
    model: Annotated[str, option("Or the model that makes vectors.", metavar="DIR")] = "",
    clusters: Annotated[
        int, option("Of k-means; compared within (0: by documents).", metavar="K", min=0)
    ] = 0,
    backend: BACKEND = "torch",
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
    """Remove duplicate documents, keeping one of each cluster, or copied parts of documents.

    Adds the columns cluster (the id of the document kept) and cluster_size, or cuts spans and
    lines that occur before. The answer does not depend on -j. All shards are needed at once: run
    it as one job, or as an array, a job and an array with --phase and a shared --scratch.
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
