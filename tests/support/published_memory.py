"""Published peaks of training memory beside the planner's figures.

The data are tests/core/plan/published_memory.toml and those rows of published_steps.toml that
print a memory. A row becomes a workload, a layout and a stack of the planner. The sources, in the
order of their names, are alternately fitted on and judged by; one figure is fitted (`fsdp` presets
of stacks.toml).
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plain_models import attention_layer, decoder, with_experts
from published_steps import UNKNOWN, Row, expand
from published_steps import load as load_steps

from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import from_spec
from sabia.core.plan.device.layout import AXES, Layout, Workload, find_stack
from sabia.core.plan.device.memory import GIB, Memory, device_memory
from sabia.core.plan.memory import RECIPES
from sabia.core.spec import from_config

FILE = Path(__file__).parents[1] / "core" / "plan" / "published_memory.toml"
MOONLIGHT = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163840,
    "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "attention_bias": False,
    "moe_layer_freq": 1, "ep_size": 1,
}  # fmt: skip
V2_LITE = {"vocab_size": 102400, "intermediate_size": 10944}
# of torchtitan's tables: mixed precision with fp32 weights and moments; a pipeline's micro-batches
# are as many as its stages unless told otherwise; compiled losses since 2025 hold bf16 logits
TITAN = {"stack": "fsdp", "recipe": "fsdp-fp32", "zero": 3, "measure": "reserved", "facts": {}}
TITAN_FACTS = {"titan-h200": {"logit_bytes": 4}}
TITAN_MISSES = {
    "titan-5 virtual=1": "what the stages of 1F1B hold of inputs and outputs is not counted",
    "titan-6 context=8": "what ring attention holds is not counted",
}


@dataclass(frozen=True)
class Peak:
    """One published figure and ours, in GiB; miss: why it is outside the band, if it is."""

    name: str
    published: float
    predicted: float
    memory: Memory
    miss: str

    @property
    def error(self) -> float:
        """Share by which ours is above."""
        return self.predicted / self.published - 1

    @property
    def inside(self) -> bool:
        """Whether it is within -5/+15 %."""
        return -0.05 <= self.error <= 0.15

    @property
    def source(self) -> str:
        """The id of its table."""
        return self.name.partition(":")[0]


def judged(found: list[Peak]) -> list[Peak]:
    """Those of the half of the sources that nothing is fitted on."""
    sources = sorted({peak.source for peak in found})
    return [peak for peak in found if peak.source in sources[1::2]]


def architecture(shape: Row) -> Architecture:
    """The decoder of a shape row."""
    h, ffn = shape["hidden"], shape.get("ffn", 0)
    heads, size = (shape["heads"], shape["kv_heads"]), shape["head_dim"]
    layer = attention_layer(h, *heads, size, ffn, gated=shape["gated"])
    if shape.get("experts"):
        layer = with_experts(layer, h, shape["experts"], shape["top_k"], shape["moe_ffn"])
    if shape.get("head_norms"):
        layer = replace(layer, head_normed=sum(heads) * size)
    layers = (replace(layer, count=shape["layers"]),)
    return decoder(shape["name"], h, shape["vocab"], layers, tied=shape["tied"])


def peaks() -> Iterator[Peak]:
    """All rows of both files."""
    data = tomllib.loads(FILE.read_text())
    shapes = {row["name"]: row for group in data["models"] for row in expand(group)}
    models = {name: architecture(shape) for name, shape in shapes.items()}
    models["moonlight-16b-a3b"] = from_spec(from_config(MOONLIGHT))
    models["deepseek-v2-lite"] = from_spec(from_config(MOONLIGHT | V2_LITE))
    for table in data["table"]:
        for row in expand(table):
            yield _peak(table["id"], models[row["model"]], row)
    yield from _titan_peaks()


def _titan_peaks() -> Iterator[Peak]:
    shapes, tables = load_steps()
    for table in tables:
        for row in table["expanded"]:
            if not isinstance(row.get("memory_gib"), int | float):
                continue
            stages = 2 * row["pipe"] if row.get("virtual") == UNKNOWN else row.get("pipe", 1)
            told = {"virtual": stages // row.get("pipe", 1), "gib": row["memory_gib"]}
            names = [f"{table['id']} context={row.get('context', 1)}"]
            names.append(f"{table['id']} virtual={told['virtual']}")
            miss = next((TITAN_MISSES[name] for name in names if name in TITAN_MISSES), "")
            told["miss"] = miss
            if row.get("mbs", UNKNOWN) == UNKNOWN:
                told["mbs"] = row["local_batch"] / row["pipe"]
            facts = {"facts": TITAN_FACTS.get(table["id"], {})}
            model = architecture(shapes[row["model"]] | {"name": row["model"]})
            yield _peak(table["id"], model, TITAN | row | told | facts)


def _peak(table: str, model: Architecture, row: dict[str, Any]) -> Peak:
    lists = {key: tuple(x) if isinstance(x, list) else x for key, x in row["facts"].items()}
    stack = replace(find_stack(row["stack"]), **lists)
    workload = Workload(
        model, row["seq"], row["gbs"], RECIPES[row["recipe"]], precision=row["precision"]
    )
    axes = {axis: row[axis] for axis in AXES if axis in row}
    choices = ("experts_over_tensor", "sequence_parallel", "virtual")
    layout = Layout(
        **axes,
        **{name: row[name] for name in choices if name in row},
        micro_batch=row["mbs"],
        zero=row["zero"],
        recompute=row["recompute"],
    )
    memory = device_memory(workload, layout, stack)
    # torch's figures leave out the runtime; a device's own has it
    held = memory.total - (0 if row["measure"] == "device" else memory["runtime"])
    shape = " ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1)
    name = f"{table}: {row['model']} {shape} mb={row['mbs']:g} {row.get('software', '')}".strip()
    return Peak(name, row["gib"], held / GIB, memory, row.get("miss", ""))
