"""Results of a local model by content, kept as they are computed.

A start after a kill reads them instead of computing them again, as it reads finished calls of
servers. A result is named by everything that it depends on: the model's files, the version of the
results of eval, the backend and number format, and the token ids with what was asked of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sabia.core.bench.contamination.figures import TextFigures
from sabia.core.bench.loglikelihood import Unit, Value
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import content_key
from sabia.core.generate.requests import Completion, Request
from sabia.core.results import result_version


class KeptResults:
    """The results of one model. `anew`: earlier ones are not read, but new ones are written.
    `draft`: what changes which tokens are drawn."""

    def __init__(self, folder: Path, identity: str, anew: bool = False, draft: str = "") -> None:
        self.identity = f"{identity} eval {result_version('eval')}"
        self.cache, self.anew, self._draft = CallCache(folder), anew, draft

    def loglikelihoods(self, unit: Unit, greedy: bool) -> list[Value] | None:
        """The log-likelihoods (nats) of the rows of a unit, if they are known."""
        kept = self._get(self._unit_key(unit, greedy))
        return None if kept is None else kept["nats"]

    def keep_loglikelihoods(self, values: Sequence[tuple[Unit, list[Value]]], greedy: bool) -> None:
        """Keep the log-likelihoods of the units of a batch."""
        self.cache.write_all([(self._unit_key(unit, greedy), {"nats": v}) for unit, v in values])

    def completion(self, request: Request, sample: int) -> Completion | None:
        """A sample of a request without its log-probabilities, if it is known."""
        kept = self._get(self._sample_key(request, sample))
        if kept is None:
            return None
        text, reason = kept["text"], kept["finish_reason"]
        return Completion(request.name, sample, kept["tokens"], text, [], [], reason)

    def same(self, request: Request) -> str:
        """A text that is equal for requests with the same first sample: equal prompts and settings,
        and if it is drawn, the same item."""
        return self._sample_key(request, 0)

    def keep_completion(self, request: Request, done: Completion) -> None:
        """Keep a finished sample."""
        kept = {"text": done.text, "finish_reason": done.finish_reason, "tokens": done.tokens}
        self.cache.write_all([(self._sample_key(request, done.sample), kept)])

    def figures(self, ids: Sequence[int], share: float) -> TextFigures | None:
        """The figures of a text of these token ids, if they are known."""
        kept = self._get(self._figures_key(ids, share))
        return None if kept is None else TextFigures(**kept)

    def keep_figures(
        self, values: Sequence[tuple[Sequence[int], TextFigures]], share: float
    ) -> None:
        """Keep the figures of some texts."""
        self.cache.write_all([(self._figures_key(ids, share), asdict(v)) for ids, v in values])

    def close(self) -> None:
        """Close the files."""
        self.cache.close()

    def _get(self, key: str) -> dict[str, Any] | None:
        return None if self.anew else self.cache.get(key)

    def _figures_key(self, ids: Sequence[int], share: float) -> str:
        return self._key({"figures": list(ids), "share": share})

    def _unit_key(self, unit: Unit, greedy: bool) -> str:
        asked = {"greedy": True} if greedy else {}
        return self._key({"rows": [[list(row.ids), row.scored] for row in unit]} | asked)

    def _sample_key(self, request: Request, sample: int) -> str:
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "stop_ids")
        # of sampled texts, the random numbers depend on the item
        drawn = ("seed", "name") if request.temperature else ()
        asked = {name: getattr(request, name) for name in (*names, *drawn)}
        asked |= {"draft": self._draft} if self._draft and request.temperature else {}
        asked |= {"thinking": asdict(request.thinking)} if request.thinking else {}
        return self._key({"ids": list(request.prompt), "sample": sample} | asked)

    def _key(self, body: Mapping[str, Any]) -> str:
        return content_key("local", {"model": self.identity, **body})
