"""`sabia dedup`: remove duplicate documents, and duplicated parts of documents."""

from importlib import import_module

from sabia.cli.command import command
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.job import Job

# method → the module whose `run(job, options)` does it
METHODS = {
    "": "sabia.core.recipes.eval_task_index",
    "minhash": "sabia.core.text.dedup.signature_method",
    "exact": "sabia.core.text.dedup.signature_method",
    "substring": "sabia.core.text.dedup.substring_method",
    "line": "sabia.core.text.dedup.line_method",
    "url": "sabia.core.text.dedup.url_method",
    "semantic": "sabia.core.recipes.semantic_dedup",
}


@command(
    DedupOptions,
    examples="""
    sabia dedup pages/ -o unique/ -j 2
    sabia classify pages/ | sabia dedup --removed removed.parquet -o unique.parquet
    sabia dedup pages/ --method exact -o unique.parquet
    sabia dedup scored/ --keep best:quality --threshold 0.8 -o unique/
    sabia dedup unique/ --method substring --tokenizer model/ --removed spans.parquet -o cut/
    sabia dedup pages/ --method line --unit paragraph --min-copies 3 -o cut/
    sabia dedup crawls/ --method url --keep newest -o unique/
    sabia dedup unique/ --method semantic --model encoder/ --threshold 0.93 -o unlike/
    sabia dedup pages/ --executor ray=auto --scratch scratch/ -o unique/
    sabia dedup unique/ --decontaminate enem.toml --decontaminate gsm8k.toml -o clean/
    """,
)
def dedup(job: Job, options: DedupOptions) -> None:
    """Remove duplicate documents, or duplicated parts of documents.

    Of each cluster of duplicates one document is kept, and the columns cluster (the id of that
    document) and cluster_size are added. With --method substring or line, spans or lines that
    already occurred are removed from the text. The output does not depend on -j. All shards are
    processed together: run one job, or three jobs with --phase and a shared --scratch directory.
    """
    import_module(METHODS[options.method]).run(job, options)
