"""`sabia crawl`: fetch web pages, or read WARC and other files, as documents."""

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
    sabia crawl archive.warc.gz --markdown -o pages/
    """,  # noqa: E501 - a help page wraps it
)
def crawl(job: Job, options: CrawlOptions) -> None:
    """Fetch web pages and extract their text as documents, or read local pages.

    INPUT is either seed URLs (on the command line, or one per line on stdin or in a text file), or
    files of pages: WARC, HTML, text, JSON Lines and Parquet files and directories of these. A crawl
    obeys robots.txt, limits the request rate per host and refuses private addresses. With --focus
    or --classifier it follows the most promising links first. The same command run again continues
    an interrupted crawl.
    """
    from sabia.core.web.run import run

    run(job, options)
