"""`sabia crawl`: pages from the web, from WARC files or from folders, as documents."""

from sabia.cli.command import command
from sabia.core.options.crawl import CrawlOptions
from sabia.core.shards.job import Job


@command(
    CrawlOptions,
    examples="""
    sabia crawl seeds.txt --contact me@example.org --budget 10k -o pages/
    sabia crawl seeds.txt --contact me@example.org --focus examples.txt -o pages/
    sabia crawl seeds.txt --contact me@example.org --classifier quality.bin --warc warc/ -o pages/
    sabia crawl seeds.txt --contact me@example.org --sitemaps robots --no-extract --warc warc/
    sabia crawl seeds.txt --replay warc/ --focus examples.txt --budget 2k --report focus.html -o try/
    sabia crawl archive.warc.gz my_folder/ | sabia classify -o kept/
    """,  # noqa: E501 - a help page wraps it
)
def crawl(job: Job, options: CrawlOptions) -> None:
    """Fetch pages from seed URLs, led by a classifier; or read WARC files and folders.

    INPUT is seed URLs (one a line on stdin or in a text file, or given directly), or WARC, HTML,
    text, JSONL and Parquet files and folders of these, which are read instead of the network.
    robots.txt is obeyed, each host is asked slowly, private addresses are refused. A crawl that
    was stopped or killed goes on when it is run again.
    """
    from sabia.core.web import run as stage

    stage.run(job, options)
