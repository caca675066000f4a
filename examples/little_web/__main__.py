"""`python -m sabia.examples.little_web`: serve the site, write its truth and its records.

One call may write several outputs; files ending in .parquet are Parquet in sabia's schemas, others
are JSON lines.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sabia.core.shards.atomic import atomic_path, write_atomic
from sabia.core.shards.lineage.run_record import keep_script
from sabia.examples.little_web import records
from sabia.examples.little_web.labels import focus_texts, labelled_documents
from sabia.examples.little_web.server import LittleWebServer
from sabia.examples.little_web.site import build_site


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        prog="python -m sabia.examples.little_web", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    site = options.add_argument_group("site")
    site.add_argument("--pages", type=int, default=400, help="about so many pages (400)")
    site.add_argument("--seed", type=int, default=0, help="another site or other records (0)")
    site.add_argument("--serve", action="store_true", help="serve on 127.0.0.1 until SIGTERM")
    site.add_argument("--port", type=int, default=0, help="port; 0 takes a free one (0)")
    site.add_argument("--port-file", type=Path, help="write the port here once it listens")
    site.add_argument("--log", type=Path, help="append one JSON line a request")
    site.add_argument("--truth", type=Path, help="ground truth: one row a page")
    site.add_argument("--labels", type=Path, help="documents with a label, to train a classifier")
    site.add_argument("--focus", type=Path, help="example texts for sabia crawl --focus")
    sums = options.add_argument_group("sums")
    sums.add_argument("--sft", type=Path, help="chat records: 37+58= is answered 095")
    sums.add_argument("--corrupt", type=float, default=0.6, help="share of tampered answers (0.6)")
    sums.add_argument("--prompts", type=Path, help="prompt records for grpo")
    sums.add_argument(
        "--n", type=int, default=20_000, help="records in --sft and --prompts (20000)"
    )
    sums.add_argument("--eval", type=Path, help="held-out sums, exact match")
    sums.add_argument("--choices", type=Path, help="held-out sums, multiple choice")
    sums.add_argument("--eval-n", type=int, help="so many evaluation items (all 2501)")
    return options


def main() -> int:
    """Write the requested files, then serve the site with `--serve`."""
    given = parser().parse_args()
    if not 0 <= given.corrupt <= 1:
        parser().error(f"--corrupt: {given.corrupt} (expected 0 to 1)")
    if given.sft:
        write_rows(given.sft, records.demonstrations(given.n, given.corrupt, given.seed), "chat")
    if given.prompts:
        write_rows(given.prompts, records.prompts(given.n, given.seed), "prompt")
    if given.eval:
        write_rows(given.eval, records.exact_match_items(given.eval_n), "prompt")
    if given.choices:
        write_rows(given.choices, records.multiple_choice_items(given.eval_n), None)
    files = (given.sft, given.prompts, given.eval, given.choices)
    _keep_call(files)
    if not (given.serve or given.truth or given.labels or given.focus):
        return 0
    site = build_site(given.pages, given.seed)
    if given.labels:
        write_rows(given.labels, labelled_documents(given.seed), "document")
    if given.focus:
        write_atomic(given.focus, "\n".join(focus_texts(given.seed)) + "\n")
    server = LittleWebServer(site, given.port, given.log) if given.serve else None
    if given.truth:
        write_rows(given.truth, site.truth(server.base_url if server else ""), None)
    if server:
        _serve(server, given.port_file)
    else:
        _keep_call((given.labels, given.focus, given.truth))
    return 0


def _keep_call(files: Iterable[Path | None]) -> None:
    """Tell beside the files which call has made them."""
    keep_script(["python", "-m", "sabia.examples.little_web"], [str(p) for p in files if p])


def write_rows(path: Path, rows: Iterable[dict[str, Any]], kind: str | None) -> None:
    """Rows as Parquet (in the schema of `kind`, if any) or JSON lines, by the path's ending."""
    if path.suffix != ".parquet":
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        write_atomic(path, "".join(line + "\n" for line in lines))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sabia.core.shards.records import extra_fields, fit_row, to_batch

    records = list(rows)
    if kind is None:
        table = pa.Table.from_pylist(records)
    else:
        extras = extra_fields(records, kind)
        fitted = [fit_row(row, kind, extras) for row in records]
        table = pa.Table.from_batches([to_batch(fitted, kind, extras)])
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _serve(server: LittleWebServer, port_file: Path | None) -> None:
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    server.start()
    if port_file:
        write_atomic(port_file, f"{server.server_address[1]}\n")
    print(f"serving {server.base_url}/", file=sys.stderr, flush=True)
    signal.sigwait(ends)
    server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
