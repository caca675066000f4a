"""Reading a config.json field by field, so that no field that changes the result is overlooked.

Every field is either read by the family, or known not to change the function that the model
computes, or null. Any other field is an error that names it.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeVar

from sabia.core.errors import UsageError

T = TypeVar("T")
_REQUIRED = object()

# Provenance, tokens, generation defaults, outputs, training settings: they change no result.
# fmt: off
INERT = frozenset({
    "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype",
    "use_cache", "_name_or_path", "_commit_hash", "_attn_implementation",
    "_attn_implementation_autoset", "attn_implementation", "name_or_path", "bos_token_id",
    "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params", "prefix", "output_attentions", "output_hidden_states",
    "return_dict", "return_dict_in_generate", "output_scores", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "tokenizer_class", "chunk_size_feed_forward", "is_decoder",
    "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
    "tie_encoder_decoder", "pruned_heads", "pretraining_tp", "unsloth_version",
    "unsloth_fixed", "do_sample", "early_stopping",
    "max_length", "min_length", "num_beams", "num_beam_groups", "num_return_sequences",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "cache_implementation", "remove_invalid_values", "exponential_decay_length_penalty",
    "classifier_length",
})
# fmt: on


class Fields:
    """The fields of a configuration, each read once; `finish` refuses those that were not read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._left = {
            key: value for key, value in config.items() if key not in INERT and value is not None
        }
        self._stated = frozenset(config)
        self.family = str(config.get("model_type"))

    @cached_property
    def hidden(self) -> int:
        """Width of the residual stream, under its usual name."""
        return self.size("hidden_size")

    @cached_property
    def depth(self) -> int:
        """Number of layers, under its usual name."""
        return self.size("num_hidden_layers")

    @cached_property
    def positions(self) -> int:
        """Number of positions, under its usual name."""
        return self.size("max_position_embeddings", 2048)

    def stated_positions(self) -> int:
        """`positions`, which must be given because the rotation depends on it."""
        if "positions" not in self.__dict__ and "max_position_embeddings" not in self:
            raise UsageError("config.json: max_position_embeddings is missing (expected a number)")
        return self.positions

    def __contains__(self, name: str) -> bool:
        """Whether the field has a value that was not read yet."""
        return name in self._left

    def defaults(self, **values: object) -> None:
        """Set the family's defaults of fields that the file does not have (null: no default)."""
        self._left |= {key: value for key, value in values.items() if key not in self._stated}

    def take(self, name: str, kind: type[T], default: Any = _REQUIRED) -> T:
        """The value of `name`, or `default` if absent or null. Whole floats are read as int."""
        if name not in self._left:
            if default is _REQUIRED:
                raise UsageError(
                    f"config.json: {name} is missing (expected in a {self.family} model)"
                )
            return default
        value = self._left.pop(name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise UsageError(f"config.json: {name} is {value!r} (expected {kind.__name__})")
        return value

    def size(self, name: str, default: object = _REQUIRED, alias: str = "") -> int:
        """A whole number ≥ 1, or the default None; alias: another name of the field."""
        other = self.take(alias, int, None) if alias else None
        value = self.take(name, int, default if other is None else other)
        if other is not None and value != other:
            raise UsageError(f"config.json: {name} is {value}, {alias} {other} (expected one)")
        if value is not None and value < 1:
            raise UsageError(f"config.json: {name} is {value} (expected 1 or more)")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A number > 0, or the default None."""
        value = self.take(name, float, default)
        if value is not None and not value > 0:
            raise UsageError(f"config.json: {name} is {value} (expected a number above 0)")
        return value

    def each(self, name: str, count: int, allowed: tuple[str, ...], usual: list[str]) -> list[str]:
        """One of `allowed` for each of `count` layers; `usual` if absent."""
        kinds = self.take(name, list, usual)
        if len(kinds) != count or not set(kinds) <= set(allowed):
            raise UsageError(
                f"config.json: {name} is {kinds!r} (expected {count} of {', '.join(allowed)})"
            )
        return kinds

    def expect(self, name: str, allowed: tuple[Any, ...], default: object) -> Any:
        """A value that must be one of `allowed`, because others are not supported."""
        value = self._left.pop(name, default)
        if value not in allowed:
            choices = ", ".join(repr(choice) for choice in allowed)
            raise UsageError(
                f"config.json: {name} is {value!r} (expected {choices} in a {self.family} model)"
            )
        return value

    def finish(self) -> None:
        """Raise UsageError for fields that were not read."""
        if self._left:
            name, value = next(iter(self._left.items()))
            raise UsageError(
                f"config.json: {name}={value!r} is unknown to the {self.family} family "
                "(expected only fields whose effect is computed; remove it if it has none)"
            )
