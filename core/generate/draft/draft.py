"""What proposes tokens for an engine: the samples' own text, or a smaller model."""

from __future__ import annotations

from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.generate.draft.draft_model import ModelDrafter
from sabia.core.generate.draft.ngram import NgramDrafter
from sabia.core.generate.draft.proposal import Drafter
from sabia.core.generate.runner.interface import Model
from sabia.core.generate.runner.load import load_runner
from sabia.core.ops.base import dtype_name
from sabia.core.ops.kv_cache import cache_bytes, check_context


@dataclass(frozen=True)
class Draft:
    """At most `tokens` are proposed at a time; without a model, by n-grams of the text so far."""

    tokens: int
    model: Model | None = None

    def check(self, engine: Model) -> None:
        """Raise UsageError for a model whose tokens are not those of the engine's."""
        if self.model is None:
            return
        ours, theirs = engine.spec.vocab_size, self.model.spec.vocab_size
        if ours != theirs:
            raise UsageError(
                f"--draft: a vocabulary of {theirs:,} (expected {ours:,}, that of the model)"
            )
        one, other = (of.tokenizer.backend.get_vocab() for of in (engine, self.model))
        if one != other:
            text = min(dict(one.items() ^ other.items()))
            raise UsageError(
                f"--draft: another tokenizer than the model's: {text!r} is {other.get(text)} "
                f"(expected {one.get(text)})"
            )
        if engine.spec.max_positions > self.model.spec.max_positions:
            raise UsageError(
                f"--draft: a context of {self.model.spec.max_positions:,} tokens (expected at "
                f"least {engine.spec.max_positions:,}, that of the model)"
            )

    def drafter(self, capacity: int, context: int, slots: int) -> Drafter:
        """What proposes tokens for a session of `capacity` rows of `context` positions, in so many
        slots, which have slack for them."""
        if self.model is None:
            return NgramDrafter()
        check_context(self.model.spec, context)
        runner = load_runner(self.model, capacity, slots, slack=self.tokens)
        return ModelDrafter(runner, capacity, self.tokens, self.model.spec)

    def row_bytes(self, slots: int) -> int:
        """Bytes of the cache for a row of so many slots."""
        if self.model is None:
            return 0
        dtype = dtype_name(self.model.params["embed"])
        return cache_bytes(self.model.spec, 1, slots, dtype, self.tokens)
