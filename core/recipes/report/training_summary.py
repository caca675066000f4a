"""The public summary of training content, by the template of the EU AI Office of 24 July 2025.

The template belongs to Article 53(1)(d) of Regulation (EU) 2024/1689. The numbers of its sections
are kept; the wording is our own. Records fill what they tell, and a person the rest.
"""

import math
from collections.abc import Iterator

from sabia.core.recipes.report.card_content import Content, largest_first
from sabia.core.recipes.report.card_facts import Facts, StageFacts
from sabia.core.recipes.report.card_text import FILL_IN, UNKNOWN, plain, share, short_path, table
from sabia.core.recipes.report.model_card import period
from sabia.core.web.archives.warc_reader import ENDINGS

SHARE, SME_SHARE, SME_MOST = 0.10, 0.05, 1_000  # of the domains that are to be listed
RANGES = ((1e9, "less than 1 billion tokens"), (1e13, "1 billion to 10 trillion tokens"),
          (math.inf, "more than 10 trillion tokens"))  # fmt: skip


def summary(facts: Facts, content: Content, tokens: int | None, small: bool) -> Iterator[str]:
    """The sections of the summary. small: by the rule for small and medium-sized providers."""
    yield from ("# Public summary of training content", "")
    yield from (f"Version of the summary: {FILL_IN}", f"Last update: {FILL_IN}", "")
    yield from _general(facts, content, tokens)
    yield from _sources(facts, content, small)
    yield from _processing(facts)


def _fields(*fields: tuple[str, str]) -> Iterator[str]:
    for name, value in fields:
        yield f"- {name}: {value}"
    yield ""


def _general(facts: Facts, content: Content, tokens: int | None) -> Iterator[str]:
    yield from ("## 1. General information", "", "### 1.1 Provider", "")
    yield from _fields(("Name and contact", FILL_IN), ("Authorised representative", FILL_IN))
    yield from ("### 1.2 Model", "")
    began = ", ".join(map(plain, facts.models)) or "none: trained from random parameters"
    yield from _fields(
        ("Versioned name", FILL_IN),
        ("Models that it depends on", began),
        ("Date of placement on the Union market", FILL_IN),
    )
    yield from ("### 1.3 Modalities, size and characteristics of the training data", "")
    languages = sorted(name for name in content.languages if name)
    yield from _fields(
        ("Modality", "text"),
        ("Size", _range(tokens)),
        ("Types of content", FILL_IN),
        ("Latest date of collection", str(content.last.date()) if content.last else UNKNOWN),
        ("Languages", ", ".join(map(plain, languages)) or UNKNOWN),
        ("Other characteristics, of people and places", FILL_IN),
    )


def _range(tokens: int | None) -> str:
    if tokens is None:
        return UNKNOWN
    return f"{next(name for end, name in RANGES if tokens < end)} ({tokens:,} tokens of documents)"


def _sources(facts: Facts, content: Content, small: bool) -> Iterator[str]:
    given = [short_path(one.path) for one in facts.given if not one.seeds]
    archives = [path for path in given if path.lower().endswith(ENDINGS)]
    others = [path for path in given if path not in archives]
    crawls = _crawls(facts)
    yield from ("## 2. List of data sources", "", "### 2.1 Publicly available datasets", "")
    yield from _files(others, "Files and directories that no stage has made")
    yield from _files(archives, "Archives of web pages that were read")
    yield from _fields(("Which of them are public datasets, with names and links", FILL_IN))
    yield from ("### 2.2 Non-public datasets from third parties", "")
    yield from _fields(
        ("Licensed commercially by rightsholders or their representatives", FILL_IN),
        ("Obtained from other third parties", FILL_IN),
    )
    yield from ("### 2.3 Data crawled and scraped from online sources", "")
    agents = dict.fromkeys(map(_agent, crawls))
    yield from _fields(
        ("Crawlers of the provider were used", "yes" if crawls else UNKNOWN),
        ("Names of the crawlers", ", ".join(map(plain, agents)) or UNKNOWN),
        ("Purpose", FILL_IN),
        ("Behaviour", _behaviour(facts)),
        ("Period of collection", period(content)),
        ("Kinds of content and of sites", FILL_IN),
        ("Modality", "text"),
    )
    yield from _domains(content, small)
    yield from ("### 2.4 User data", "")
    yield from _fields(("Data from users of the provider's services", FILL_IN))
    yield from ("### 2.5 Synthetic data", "", *_synthetic(facts, content), "")
    yield from ("### 2.6 Other sources", "", FILL_IN, "")


def _files(paths: list[str], title: str) -> Iterator[str]:
    if paths:
        yield from (f"{title}:", "", *(f"- {plain(path)}" for path in paths), "")


def _crawls(facts: Facts) -> list[StageFacts]:
    return [stage for stage in facts.stages if stage.of_network]


def _agent(stage: StageFacts) -> str:
    link = stage.contact if "://" in stage.contact else f"mailto:{stage.contact}"
    return f"sabia/{stage.record.get('version')} (+{link})"


def _behaviour(facts: Facts) -> str:
    if not _crawls(facts):
        return UNKNOWN
    return ("it obeys robots.txt (RFC 9309), waits between requests to a host, does not log in or "
            "solve CAPTCHAs, and keeps no page that asks not to be indexed")  # fmt: skip


def listed_domains(count: int, small: bool) -> int:
    """How many of so many domains the template asks for."""
    return min(math.ceil(SME_SHARE * count), SME_MOST) if small else math.ceil(SHARE * count)


def _domains(content: Content, small: bool) -> Iterator[str]:
    domains = largest_first({name: one for name, one in content.domains.items() if name})
    if not domains:
        yield from (f"Domains: {UNKNOWN}.", "")
        return
    most = listed_domains(len(domains), small)
    rule = "top 5 %, at most 1,000" if small else "top 10 %"
    total = content.total.size
    rows = [(name, one.documents, share(one.size, total)) for name, one in domains[:most]]
    without = content.domains.get("")
    yield (f"The {rule} of {len(domains):,} domains by the bytes of their text in the documents of "
           f"the training: {most:,} of them"
           + (f"; {without.documents:,} documents have no URL." if without else "."))  # fmt: skip
    yield from ("", *table(["domain", "documents", "share of text bytes"], rows), "")


def _synthetic(facts: Facts, content: Content) -> Iterator[str]:
    for name, amount in content.synthetic.items():
        part = f"{amount.documents:,} documents ({share(amount.size, content.total.size)} of bytes)"
        yield f"- {part} were rewritten by {plain(name)}."
    for run in facts.runs:
        if run.sampled:
            yield (f"- {run.sampled:,} tokens were sampled by the model itself in reinforcement "
                   "learning.")  # fmt: skip
    yield f"- Other data that models have made: {FILL_IN}"


def _processing(facts: Facts) -> Iterator[str]:
    yield from ("## 3. Data processing aspects", "")
    yield from ("### 3.1 Respect of the reservation of rights from text and data mining", "")
    protocol = "robots.txt (RFC 9309), before each fetch" if _crawls(facts) else UNKNOWN
    yield from _fields(
        ("Opt-outs obeyed in the provider's crawls", protocol),
        ("Other protocols and opt-outs, also for data of third parties", FILL_IN),
        ("Code of practice signed, and copyright policy", FILL_IN),
    )
    yield from ("### 3.2 Removal of illegal content", "", *_illegal(facts), "")
    yield from ("### 3.3 Other information", "", FILL_IN, "")


def _illegal(facts: Facts) -> Iterator[str]:
    """Filters that were in use which may concern it."""
    meaning = {"block_urls": "lists of blocked URLs", "bad_words": "lists of words",
               "pii": "personal data"}  # fmt: skip
    for stage in facts.stages:
        for name, what in meaning.items():
            if value := stage.options.get(name):
                given = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
                rule = f", where {stage.options['where']}" if stage.options.get("where") else ""
                yield f"- {stage.command}, {what}: {plain(f'{given}{rule}')}"
    yield f"- Measures against illegal content: {FILL_IN}"
