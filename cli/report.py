"""`sabia report`: the graph of outputs, origins of tokens, uses of documents, model cards."""

from sabia.cli.command import command
from sabia.core.options.reporting import ReportOptions
from sabia.core.shards.job import Job


@command(
    ReportOptions,
    examples="""
    sabia report corpus/ runs/
    sabia report --token run/:1200:3:57 tokens/ kept/ scored/ pages/
    sabia report --row 0f3a5e1c9b7d24860f3a5e1c9b7d2486 tokens/ kept/ pages/
    sabia report --document https://example.org/page pages/ kept/ removed/ tokens/ run/
    sabia report --document takedown.txt pages/ kept/ removed.parquet tokens/ run/ --json
    sabia report --card runs/base corpus/ -o README.md
    """,
)
def report(job: Job, options: ReportOptions) -> None:
    """Show what outputs were made from, where tokens are from, and what became of documents.

    Without a question: all outputs below the directories, what each was made from and by which
    call, which are missing or stale, and the commands that make these again. From a token or a row
    to its documents: the row, the document, the characters of its text, and what each stage
    recorded about the document (scores, cluster, cuts, rewrite), with its URL and the time it was
    fetched. From a document to its uses: in which outputs it was kept, where it was removed and
    why, in which token rows it is, and which steps and checkpoints of which runs have read it. Only
    the given outputs are looked into. From a run to its model card, and to the public summary of
    its training content.
    """
    if options.card:
        from sabia.core.recipes.report import card

        card.run(job, options)
    elif options.asks:
        from sabia.core.recipes.report.answer import run

        run(job, options)
    else:
        from sabia.core.shards.lineage import graph_report

        graph_report.run(job)
