"""`sabia show`: look at the rows of any output."""

from sabia.cli.command import command
from sabia.core.options.reporting import ShowOptions
from sabia.core.shards.job import Job


@command(
    ShowOptions,
    examples="""
    sabia show corpus/
    sabia show scored/ --where "language == 'pt' and fineweb < 0.5" --sample 20
    sabia show removed/ --with kept/
    sabia show --diff kept/ rewritten/
    sabia show removed/ --judge --sample 100
    sabia show tokens/ --rows 5 -o tokens.html
    sabia show run/ --where "reward == 1" --to jsonl | jq -r .text
    """,
)
def show(job: Job, options: ShowOptions) -> None:
    """Show rows as a person reads them, page by page in a terminal.

    Documents with their scores; removed rows by reason, as differences to the document that was
    kept; rewritten rows as differences to the text before; token rows as text, with the boundaries
    of documents and the tokens without loss marked; conversations turn by turn, or as the chat
    template renders them; samples of grpo by prompt, with rewards; scores of eval by item. Other
    rows are shown column by column. Only what is shown is read.
    """
    from sabia.core.recipes.show.show_call import run

    run(job, options)
