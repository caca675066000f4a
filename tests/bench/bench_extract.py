"""HTML to main text beside trafilatura and resiliparse: agreement with true texts, and speed.

    python tests/bench/bench_extract.py score DATA [--wcxb FOLDER]
    python tests/bench/bench_extract.py passages FOLDER
    python tests/bench/bench_extract.py speed DATA [--runs 5] [--repeats 1 6]

DATA holds article-extraction/ (ground-truth.json, html/*.html.gz) and trafilatura/ (evaldata.json,
eval/*.html); FOLDER is a split of WCXB (ground-truth/, html/). `score`: mean F1 of 3-word shingles
a page, and against trafilatura(fast=True) the mean difference with its paired standard error; by
halves, since weights and thresholds were chosen on the tuning half (`fit_extract.tuning`). Of the
pages in trafilatura/, how many passages that belong are found and how many that do not are left
out. `passages`: the same for trafilatura's own evaluation (FOLDER is `tests` of its repository:
evaldata.json, eval/, cache/), white space folded, and the share of right answers a page, compared
in pairs, of all pages and of those in doubt. `speed`: every contender in processes of its own, in
turns; the cost of a page is the slope of CPU seconds between the pages read --repeats[0] and
--repeats[1] times, so that start-up is apart. `turns`: in one process, for a busy
machine (not for ours-fast-tier, which changes the others).
"""

import argparse
import gzip
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from itertools import compress
from pathlib import Path

from fit_extract import f1, tuning, words_of

Page = tuple[str, bytes, str]
PEERS = ("trafilatura-fast", "trafilatura", "resiliparse")
OURS = ("ours", "ours-fast-tier", "ours-links", "ours-markdown", "ours-sandbox")


def news(data: Path) -> list[Page]:
    """(id, page, true text) of article-extraction."""
    folder = data / "article-extraction"
    truth = json.loads((folder / "ground-truth.json").read_text())
    return [(name, gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes()),
             facts["articleBody"]) for name, facts in sorted(truth.items())
            if (folder / "html" / f"{name}.html.gz").exists()]  # fmt: skip


def wcxb(folder: Path) -> Iterable[Page]:
    """(number, page, true text) of a split of WCXB."""
    for path in sorted((folder / "html").glob("*.html.gz")):
        name = path.name.removesuffix(".html.gz")
        known = json.loads((folder / "ground-truth" / f"{name}.json").read_text())
        kind = known["_internal"]["page_type"]["primary"]
        text = known.get("ground_truth", {}).get("main_content") or ""
        yield f"{kind} {name}", gzip.decompress(path.read_bytes()), text


def contender(name: str) -> Callable[[bytes], str]:
    """A page's bytes to its text."""
    if name == "resiliparse":
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.encoding import detect_encoding
        from resiliparse.parse.html import HTMLTree

        return lambda page: extract_plain_text(
            HTMLTree.parse_from_bytes(page, detect_encoding(page)),
            main_content=True, alt_texts=False)  # fmt: skip
    if name.startswith("trafilatura"):
        import trafilatura

        return lambda page: trafilatura.extract(page, fast=name.endswith("fast")) or ""
    return _ours(name)


def _ours(name: str) -> Callable[[bytes], str]:
    from sabia.core.web.extraction import extract
    from sabia.core.web.extraction.sandbox import Sandbox

    if name == "ours-sandbox":
        sandbox = Sandbox(time_s=60)
        return lambda page: str(sandbox.extract(page, "text/html", "http://h/", False)["text"])
    extract.warm_up()
    if name == "ours-fast-tier":
        extract.DOUBT, extract.FEW_WORDS = 9.0, 0
    links, markdown = name in ("ours-links", "ours-markdown"), name == "ours-markdown"
    return lambda page: extract.extract(page, "text/html", "http://h/", links, markdown).text


def score(data: Path, other: Path | None) -> dict[str, object]:
    """F1 by halves, of all, and of the other folder; the assertions."""
    pages = news(data)
    halves: dict[str, Callable[[str], bool]] = {
        "tuning half": tuning,
        "scored half": lambda name: not tuning(name),
        "all": lambda name: True,
    }
    answer: dict[str, object] = {}
    answer["careful"] = _careful(pages)
    results = {name: _f1s(name, pages) for name in ("ours", *PEERS)}
    for half, inside in halves.items():
        kept = [inside(name) for name, *_ in pages]
        answer[half] = _compare(
            {name: [*compress(values, kept)] for name, values in results.items()}
        )
    answer["assertions"] = {name: _counted(_assertions(data / "trafilatura", name))
                            for name in ("ours", *PEERS)}  # fmt: skip
    if other:
        answer["wcxb"] = _by_kind(list(wcxb(other)))
    return answer


def _by_kind(pages: list[Page]) -> dict[str, object]:
    results = {name: _f1s(name, pages) for name in ("ours", "trafilatura-fast", "resiliparse")}
    kinds = sorted({page[0].split()[0] for page in pages})
    groups = {"all": kinds, **{kind: [kind] for kind in kinds}}
    return {group: _compare({name: [v for page, v in zip(pages, values, strict=True)
                                    if page[0].split()[0] in members]
                             for name, values in results.items()})
            for group, members in groups.items()} | {"careful": _careful(pages)}  # fmt: skip


def _f1s(name: str, pages: list[Page]) -> list[float]:
    extract = contender(name)
    return [f1(words_of(extract(page)), words_of(truth)) for _, page, truth in pages]


def _compare(results: dict[str, list[float]]) -> dict[str, object]:
    base = results["trafilatura-fast"]
    answer: dict[str, object] = {"pages": len(base)}
    for name, values in results.items():
        gaps = [a - b for a, b in zip(values, base, strict=True)]
        answer[name] = {"mean": round(statistics.mean(values), 4),
                        "less_trafilatura_fast": round(statistics.mean(gaps), 4),
                        "paired_stderr": round(statistics.stdev(gaps) / len(gaps) ** 0.5, 4),
                        "below_0.8": sum(v < 0.8 for v in values)}  # fmt: skip
    return answer


def _careful(pages: list[Page]) -> float:
    """The share of pages that the second tier was asked for and answered."""
    from sabia.core.web.extraction.extract import CAREFUL, extract

    asked = [extract(page, "text/html", "http://h/", False).extractor for _, page, _ in pages]
    return round(asked.count(CAREFUL) / len(asked), 3)


def passages(folder: Path) -> dict[str, object]:
    """Passages of trafilatura's own evaluation: counts, and right answers a page in pairs."""
    from sabia.core.web.extraction.extract import CAREFUL, extract

    asked = [extract(page, "text/html", "http://h/", False).extractor == CAREFUL
             for page, _ in _asserted(folder)]  # fmt: skip
    names = ("ours", "ours-fast-tier", "trafilatura-fast", "trafilatura")
    results = {name: _assertions(folder, name) for name in names}
    answer: dict[str, object] = {"pages": len(asked), "careful": round(statistics.mean(asked), 3)}
    for group, kept in (("all", [True] * len(asked)), ("careful", asked)):
        rows = {name: [*compress(values, kept)] for name, values in results.items()}
        shares = {name: [(a + b) / (c + d) for a, c, b, d in values]
                  for name, values in rows.items()}  # fmt: skip
        answer[f"{group} passages"] = {name: _counted(values) for name, values in rows.items()}
        answer[f"{group} shares"] = _compare(shares)
    return answer


def _asserted(folder: Path) -> list[tuple[bytes, dict[str, list[str]]]]:
    """(page, its passages "with" and "without") of trafilatura's evaluation."""
    entries = json.loads((folder / "evaldata.json").read_text()).values()
    paths = [[folder / part / facts["file"] for part in ("eval", "cache")] for facts in entries]
    return [(next(path for path in both if path.exists()).read_bytes(), facts)
            for both, facts in zip(paths, entries, strict=True)]  # fmt: skip


def _assertions(folder: Path, name: str) -> list[tuple[int, int, int, int]]:
    """A page: passages found, of how many; passages left out, of how many."""
    extract, rows = contender(name), []
    for page, facts in _asserted(folder):
        text = " ".join(extract(page).split())
        inside, outside = ([" ".join(passage.split()) in text for passage in facts[kind]]
                           for kind in ("with", "without"))  # fmt: skip
        rows.append((sum(inside), len(inside), len(outside) - sum(outside), len(outside)))
    return rows


def _counted(rows: list[tuple[int, int, int, int]]) -> dict[str, str]:
    found, wanted, kept_out, unwanted = (sum(column) for column in zip(*rows, strict=True))
    return {"with": f"{found} of {wanted}", "without": f"{kept_out} of {unwanted}"}


def speed(data: Path, runs: int, repeats: tuple[int, int], names: list[str]) -> dict[str, object]:
    """Pages per CPU second by slope, median over the runs."""
    costs: dict[str, list[float]] = {name: [] for name in names}
    count = len(news(data))
    for _ in range(runs):
        for name in names:
            small, large = (_measured(name, data, times) for times in repeats)
            costs[name].append((large - small) / (count * (repeats[1] - repeats[0])))
    rates = {name: 1 / statistics.median(values) for name, values in costs.items()}
    base = costs["trafilatura-fast"]
    return {name: {"pages_per_cpu_second": round(rates[name], 1),
                   "times_trafilatura_fast": [round(a / b, 2) for a, b in
                                              zip(base, costs[name], strict=True)]}
            for name in names}  # fmt: skip


def _measured(name: str, data: Path, times: int) -> float:
    words = [
        sys.executable,
        __file__,
        "work",
        str(data),
        "--contender",
        name,
        "--times",
        str(times),
    ]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def turns(data: Path, runs: int, names: list[str]) -> dict[str, object]:
    """Pages per CPU second in one process, the contenders in turns; median of the runs."""
    pages = [page for _, page, _ in news(data)]
    extracts = {name: contender(name) for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(runs + 1):  # the first warms up
        for name, extract in extracts.items():
            start = time.process_time()
            for page in pages:
                extract(page)
            costs[name].append(time.process_time() - start)
    base = costs["trafilatura-fast"][1:]
    return {name: {"pages_per_cpu_second": round(len(pages) / statistics.median(spent[1:]), 1),
                   "times_trafilatura_fast": [round(a / b, 2) for a, b in
                                              zip(base, spent[1:], strict=True)]}
            for name, spent in costs.items()}  # fmt: skip


def work(name: str, data: Path, times: int) -> float:
    """CPU seconds, children included, of the pages read so many times."""
    pages = [page for _, page, _ in news(data)]
    extract = contender(name)
    extract(pages[0])
    start = time.process_time()
    for _ in range(times):
        for page in pages:
            extract(page)
    spent = time.process_time() - start
    if name == "ours-sandbox":
        extract.__closure__[0].cell_contents.close()  # type: ignore[index]
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent += children.ru_utime + children.ru_stime
    return spent


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("score", "passages", "speed", "turns", "work"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--wcxb", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--repeats", type=int, nargs=2, default=(1, 6))
    parser.add_argument("--names", nargs="+", default=["trafilatura-fast", *OURS, "resiliparse"])
    parser.add_argument("--contender", default="ours")
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    if options.action == "work":
        print(work(options.contender, options.data, options.times))
        return
    answer = (score(options.data, options.wcxb) if options.action == "score" else
              passages(options.data) if options.action == "passages" else
              turns(options.data, options.runs, options.names) if options.action == "turns" else
              speed(options.data, options.runs, tuple(options.repeats), options.names))  # fmt: skip
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
