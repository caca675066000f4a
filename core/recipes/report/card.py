"""`sabia report --card`: a model card, and the public summary of training content."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.options.reporting import ReportOptions
from sabia.core.recipes.report import model_card, training_summary
from sabia.core.recipes.report.card_content import Content, content_of, ids_in, tokens_in
from sabia.core.recipes.report.card_facts import Facts, facts_of
from sabia.core.recipes.report.evaluation_results import Results, read_results
from sabia.core.recipes.report.given_outputs import Output, open_outputs
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.job import Job


@dataclass(frozen=True)
class Card:
    """What is known; tokens: of documents in the token rows, None without these."""

    facts: Facts
    content: Content
    tokens: int | None
    results: Results | None = None

    def text(self, small: bool) -> str:
        """Both documents as Markdown."""
        return "\n".join([
            *model_card.front_matter(self.facts, self.content),
            "",
            *model_card.card(self.facts, self.content, self.tokens, self.results),
            *training_summary.summary(self.facts, self.content, self.tokens, small),
        ])  # fmt: skip

    def json(self) -> str:
        """All figures as JSON."""
        facts = asdict(self.facts)
        for run, one in zip(facts["runs"], self.facts.runs, strict=True):
            run |= {"flops": one.flops, "generation_flops": one.generation_flops,
                    "energy_kwh": one.energy_kwh}  # fmt: skip
        content = asdict(self.content)
        evaluated = {"evaluation": self.results.json()} if self.results else {}
        return json.dumps({**facts, "content": content, "tokens_of_documents": self.tokens,
                           "flops": model_card.compute(self.facts), **evaluated},
                          default=str)  # fmt: skip


def make_card(run: str, folders: list[str], scores: Sequence[str] = ()) -> Card:
    """Read records, documents, token rows and scores. UsageError for a directory without a run."""
    facts = facts_of(run, folders)
    tokens = _outputs(facts.tokens, "tokens")
    ids = ids_in(tokens) if facts.piped and tokens else None
    content = content_of(_outputs(facts.documents, "document"), ids)
    results = read_results(scores, facts.documents) if scores else None
    return Card(facts, content, tokens_in(tokens) if tokens else None, results)


def _outputs(paths: Sequence[str], kind: str) -> list[Output]:
    """The outputs of a kind; those in other formats are named and left out."""
    outputs: list[Output] = []
    for path in paths:
        try:
            outputs += [one for one in open_outputs([path])[0] if one.kind == kind]
        except UsageError as error:
            notes.warn(f"left out of the card: {error}")
    return outputs


def run(job: Job, options: ReportOptions) -> None:
    """Write the card to stdout or to --out."""
    card = make_card(str(options.card), list(job.inputs or (".",)), options.scores)
    text = card.json() if options.json else card.text(options.sme)
    if options.out in (None, "-"):
        print(text)
    else:
        write_atomic(Path(str(options.out)), f"{text}\n")
        notes.summarize(f"model card → {options.out}", {"out": str(options.out)})
