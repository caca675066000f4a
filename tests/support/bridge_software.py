"""Software of published MoE runs of Megatron-Bridge: what its recipes set, by release.

The tables of docs/performance-summary.md print layouts, not software. The recipes do
(scripts/performance/configs/*_workload_base_configs.py of NVIDIA-NeMo/Megatron-Bridge, in the state
in which a release's table was published): CUDA graphs, dispatcher, overlap of the experts'
exchange. Where recipe and row differ in layout, the last recipe with the row's layout counts.

WHOLE: graphs of whole steps, attention in FP8, exchange beside computation (arXiv 2603.07685,
figure 18: 93 % of it). LAYERS: graphs of attention, router and what prepares the exchange; experts,
the other half of the launches, are not in them. OVERLAP: exchange of one micro-batch beside the
computation of another, without graphs: a layer is launched in more parts. COPIES: all-to-all of
each copy of a token.
"""

from typing import Any

WHOLE: dict[str, Any] = {
    "launched": 0.0, "narrow_attention": True, "fused_sinks": True, "expert_overlap": 0.93,
}  # fmt: skip
LAYERS: dict[str, Any] = {"launched": 0.5}
OVERLAP: dict[str, Any] = {"expert_overlap": 0.93, "launched": 1.5}
COPIES: dict[str, Any] = {"sends_once": False}
FIRST, LAST = "25.00", "27.00"
# first release, the one after the last, beginning of the model's name, chips, fields of Stack
FACTS: tuple[tuple[str, str, str, tuple[str, ...], dict[str, Any]], ...] = (
    ("26.06", LAST, "deepseek-v3", ("gb200", "gb300"), WHOLE),
    ("26.06", LAST, "qwen3", ("gb200", "gb300"), WHOLE),
    ("26.06", LAST, "qwen3-30b", ("b300",), WHOLE),
    ("26.06", LAST, "gpt-oss", ("gb200", "gb300"), WHOLE),
    # docs/performance-summary-archive.md: a regression of cudnn-frontend (its issue 256)
    ("26.06.01", "26.08", "gpt-oss", ("gb200", "gb300"), {"fused_sinks": False}),
    (FIRST, "26.06", "deepseek-v3", ("gb200",), LAYERS),
    (FIRST, "26.02", "deepseek-v3", ("gb300",), LAYERS),
    ("26.04", LAST, "deepseek-v3", ("b300",), LAYERS),
    ("26.04.01", LAST, "deepseek-v3", ("b200",), {**LAYERS, "expert_overlap": 0.93}),
    (FIRST, "26.02", "deepseek-v3", ("b200",), COPIES),
    (FIRST, "26.06", "qwen3-235b", ("gb200",), LAYERS),
    ("26.02", "26.06", "qwen3-235b", ("gb300",), LAYERS),
    (FIRST, "26.02", "qwen3-235b", ("b200",), {**OVERLAP, **COPIES}),
    ("26.04", LAST, "qwen3-235b", ("b200",), COPIES),
    ("26.02", "26.04", "qwen3-235b", ("b300",), OVERLAP),
    (FIRST, LAST, "qwen3-235b", ("h100",), OVERLAP),
    (FIRST, "26.02", "qwen3-235b", ("h100",), COPIES),
    ("26.04", LAST, "qwen3-235b", ("h100",), COPIES),
    ("26.02.01", LAST, "qwen3-30b", ("b200",), LAYERS),
    (FIRST, "26.02", "qwen3-30b", ("b200", "h100"), COPIES),
    (FIRST, "26.02.01", "qwen3-30b", ("h100",), OVERLAP),
    (FIRST, "26.06", "gpt-oss", ("gb300",), {**LAYERS, **COPIES}),
    (FIRST, "26.04.01", "gpt-oss", ("b300",), {**LAYERS, **COPIES}),
    ("26.04.01", LAST, "gpt-oss", ("b300",), LAYERS),
    (FIRST, "26.06", "gpt-oss", ("gb200", "b200", "h100"), COPIES),
    ("26.04.01", "26.06", "gpt-oss", ("gb200",), OVERLAP),
)  # fmt: skip


def software(release: str, model: str, chip: str) -> dict[str, Any]:
    """The fields of Stack that differ from the preset megatron; experts are balanced."""
    found: dict[str, Any] = {"expert_imbalance": 1.0}
    for first, after, begins, chips, fields in FACTS:
        if first <= release < after and model.startswith(begins) and chip in chips:
            found |= fields
    return found
