"""Options of dedup, tokenize, quantize and eval: what is refused, completed and recorded."""

import pickle
from typing import Any

import pytest

from sabia.core.errors import UsageError
from sabia.core.options.about import by_group, long_help
from sabia.core.options.dedup import DedupOptions
from sabia.core.options.eval import EvalOptions
from sabia.core.options.quantize import QuantizeOptions
from sabia.core.options.tokenize import TokenizeOptions

ALL = (DedupOptions, TokenizeOptions, QuantizeOptions, EvalOptions)
MODEL = {"out": "o", "model": "m"}


@pytest.mark.parametrize("cls", ALL)
def test_every_option_has_a_group_and_a_line_of_help(cls: Any) -> None:
    assert by_group(cls)
    for option in cls.table.values():
        assert option.help and len(option.help) <= 120 and not option.help.endswith("."), (
            option.name
        )
        for condition in option.only:
            assert condition.text(cls.table)
    assert long_help(cls)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"method": "url", "ngram": 5}, "--ngram: only with --method minhash"),
        ({"method": "exact", "threshold": 0.7}, "--threshold: only with --method minhash or sem"),
        ({"decontaminate": ["t.toml"], "method": "minhash"}, "--method: only without --decont"),
        ({"decontaminate": ["t.toml"], "keep": "longest"}, "--keep: only with --method"),
        ({"verdict": "auto"}, "--verdict: only with --decontaminate"),
        ({"method": "line", "span": 9}, "--span: only with --method substring"),
        ({"method": "line", "action": "mark", "share": 1}, "--share: only with --action cut"),
        ({"method": "semantic", "embeddings": "v", "model": "m"}, "--embeddings: not together"),
        ({"method": "semantic", "embeddings": "v", "backend": "torch"}, "--backend: only with"),
        ({"method": "exact", "seed": 0}, "--seed: only with --method minhash or semantic"),
        ({"phase": "compare"}, "--phase: only with --scratch"),
        ({"decisions": True, "scratch": "s", "phase": "write"}, "--decisions: not together with"),
        ({"replaced": "r.parquet"}, "--replaced: only with --against"),
        ({"decontaminate": ["t.toml"], "run": 4}, "--run: 4 is out of range"),
        ({"decontaminate": ["t.toml"], "overlap": 0}, "--overlap: 0 is out of range"),
    ],
)
def test_dedup_refuses_what_has_no_meaning(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DedupOptions.read(values)


def test_dedup_completes_defaults() -> None:
    def completed(**values: Any) -> tuple[Any, ...]:
        options = DedupOptions.read(values)
        return options.threshold, options.span, options.share

    assert completed() == (0.7, 200, 1.0)
    assert completed(method="semantic", embeddings="v")[0] == 0.95
    assert completed(method="substring", tokenizer="t")[1:] == (50, 1.0)
    assert completed(method="line", action="drop")[2] == 0.5
    assert completed(method="line", action="drop", share="40%")[2] == 0.4


def test_dedup_records_what_decides_and_nothing_else() -> None:
    plain = DedupOptions().recorded()
    assert plain.keys() == {"method", "threshold", "ngram", "permutations", "signatures", "keep",
                            "verify", "decisions", "decontaminate"}  # fmt: skip
    elsewhere = {"mem": "8GiB", "engine": "numpy", "removed": "r.parquet", "scratch": "s",
                 "against": "a", "index": "a", "jobs": 4, "threshold": 0.7}  # fmt: skip
    assert DedupOptions.read(elsewhere).recorded() == plain
    assert DedupOptions.read({"ngram": 6}).recorded() != plain
    bench = DedupOptions.read({"decontaminate": ["t.toml"]})
    assert bench.recorded().keys() == {"decontaminate", "verdict", "overlap", "run"}


def test_when_dedup_needs_all_shards() -> None:
    def needs(**values: Any) -> bool:
        return DedupOptions.read(values).needs_all_shards()

    assert needs() and needs(method="url") and needs(scratch="s", phase="compare")
    assert not needs(scratch="s", phase="sketch") and not needs(scratch="s", phase="write")
    assert not needs(decontaminate=["t.toml"])


def test_eval_records_who_answers_and_judges_not_how_calls_are_made() -> None:
    given = {"task": ["t"], "model": ["http://h/v1#m"], "judge_url": "http://j", "judge_model": "j"}
    plain = EvalOptions.read(given).recorded()
    how = {"concurrency": 2, "max_requests": 9, "api_key_env": "K", "judge_cache": "c", "out": "x"}
    assert EvalOptions.read(given | how).recorded() == plain
    assert EvalOptions.read(given | {"judge_votes": 3}).recorded() != plain
    assert EvalOptions.read(given | {"limit": 3}).recorded() != plain


@pytest.mark.parametrize("missing", ["out", "model"])
def test_quantize_needs_a_model_and_a_directory(missing: str) -> None:
    with pytest.raises(UsageError, match=f"--{missing}: is missing"):
        QuantizeOptions.read({k: v for k, v in MODEL.items() if k != missing})


@pytest.mark.parametrize("cls", ALL[:2])
def test_options_travel_to_workers(cls: Any) -> None:
    options = cls(jobs=3)
    assert pickle.loads(pickle.dumps(options)) == options
