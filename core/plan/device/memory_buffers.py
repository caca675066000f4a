"""What a device holds besides state and activations: logits, whole weights, buffers, the runtime.

logits      b·s/c · V/t · bytes per logit: 10 is 2 (bf16) + 4 (fp32 softmax) + 4 (fp32 gradient);
            a chunked cross-entropy holds those of a chunk of tokens
gathered    under zero 3 the whole weights (over fsdp) of the layers at work, in the dtype of
            computation; at the loss, of the head
gradient    the whole gradient of one layer, or of the head, before it is reduced over fsdp
exchange    experts' all-to-all: the copies of tokens that arrive, and those that leave
runtime     context, kernels and communication library
"""

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.device.layout import Layout
from sabia.core.plan.device.memory_activations import element_bytes, live_tokens
from sabia.core.plan.device.memory_stage import Stage
from sabia.core.plan.device.memory_term import Term, billions, ways
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.workload import Workload
from sabia.core.plan.elementwise import Number, choose, larger, smaller

LOGITS, GATHERED, GRADIENT, EXCHANGE = (
    "logits", "gathered weights", "unreduced gradient", "expert exchange",
)  # fmt: skip


def context(stack: Stack) -> Term:
    """The runtime's own memory."""
    return Term("runtime", stack.context_bytes, lambda: "context, kernels, communicators")


def logits(workload: Workload, layout: Layout, stack: Stack, stage: Stage) -> Term:
    """At the loss of one micro-batch, on the stage with the head."""
    tokens = live_tokens(workload, layout)
    if stack.loss_chunk:
        tokens = smaller(tokens, stack.loss_chunk)
    vocab = workload.architecture.vocab
    size = stage.head * tokens * vocab * stack.logit_bytes / layout.tensor

    def formula() -> str:
        over = ways(("tensor", layout.tensor))
        return f"{tokens:g} tokens x {vocab} x {stack.logit_bytes:g} B{over}"

    return Term(LOGITS, size, formula)


def gathered_layers(workload: Workload, layout: Layout, stack: Stack) -> Term:
    """Whole weights of the layers at work in a backward pass."""
    layer, element = _layer_elements(workload, layout), element_bytes(workload)
    layers = stack.gathered_layers
    size = layers * layer * element * _is_split(layout, 3)
    return Term(GATHERED, size, lambda: f"{layers} layers x {billions(layer)} x {element} B")


def gathered_head(workload: Workload, layout: Layout, stack: Stack, stage: Stage) -> Term:
    """Whole weights of the head, or of the last layers on stages without it."""
    head, element = _head_elements(workload, layout), element_bytes(workload)
    layers = gathered_layers(workload, layout, stack)
    size = choose(stage.head > 0, head * element * _is_split(layout, 3), layers.bytes)

    def formula() -> str:
        return f"head {billions(head)} x {element} B" if stage.head else layers.how

    return Term(GATHERED, size, formula)


def layer_gradient(workload: Workload, layout: Layout, stack: Stack) -> Term:
    """One layer's gradient, whole, before it is reduced."""
    del stack
    layer, size = _layer_elements(workload, layout), workload.recipe.gradients
    found = layer * size * _is_split(layout, 2)
    return Term(GRADIENT, found, lambda: f"1 layer x {billions(layer)} x {size:g} B")


def head_gradient(workload: Workload, layout: Layout, stack: Stack, stage: Stage) -> Term:
    """The head's gradient, whole, while the logits are still there."""
    del stack
    head, size = _head_elements(workload, layout), workload.recipe.gradients
    found = stage.head * head * size * _is_split(layout, 2)
    return Term(GRADIENT, found, lambda: f"head {billions(head)} x {size:g} B")


def exchange(workload: Workload, layout: Layout, stack: Stack) -> Term:
    """Copies of tokens sent to and received from other devices' experts, one layer's."""
    tokens, element = live_tokens(workload, layout), element_bytes(workload)
    hidden = workload.architecture.hidden
    top_k = max((kind.top_k for kind in workload.architecture.layers), default=0)
    among = layout.tensor if layout.experts_over_tensor else 1
    copies = (1 + stack.expert_imbalance) * top_k * tokens / among
    size = choose(layout.expert_ranks > 1, copies * hidden * element, 0)
    return Term(EXCHANGE, size, lambda: f"{copies:g} copies x {hidden} x {element} B")


def _is_split(layout: Layout, level: int) -> Number:
    """1 where fsdp splits what `level` names, else 0."""
    return choose(layout.fsdp > 1, 1, 0) if layout.zero >= level else 0


def _layer_elements(workload: Workload, layout: Layout) -> Number:
    """Parameters of the largest kind of layer on one device, not divided over fsdp."""
    most: Number = 0
    for kind in workload.architecture.layers:
        most = larger(most, _on_device(kind, layout))
    return most


def _on_device(kind: LayerKind, layout: Layout) -> Number:
    dense = kind.params - kind.expert_params
    return (dense + kind.expert_params / layout.expert) / layout.tensor


def _head_elements(workload: Workload, layout: Layout) -> Number:
    return workload.architecture.vocab * workload.architecture.hidden / layout.tensor
