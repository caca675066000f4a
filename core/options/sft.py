"""Options of `sabia sft`."""

from sabia.core.options.chat_template import ChatTemplate
from sabia.core.options.option import changed, needs, quantity, switch, text
from sabia.core.options.shared import Trainer, Workers
from sabia.core.options.training import DistillationOptions, Logging, Training


class SftOptions(
    Trainer,
    Training,
    DistillationOptions,
    ChatTemplate,
    group="Model",
    defaults={"lr": 2e-5, "warmup": "3%", "weight_decay": 0.0},
):
    """Options of `sabia sft`."""

    model: str = text("Model directory to fine-tune", "DIR", required=True, common=True)
    tokenizer: str = text("Tokenizer directory with a chat template", "DIR", unset="the model's")
    """If `sabia tokenize --extend` made it from the model's tokenizer, the model is extended (see
    `--tokenizer` in `sabia pretrain`)."""
    length: int = quantity("length", "Row length: maximum tokens of a conversation", "2k",
                           group="Data")  # fmt: skip
    """Longer conversations are rejected. `2k` is 2048."""
    pack: bool = switch(
        "Pack several conversations into a row", default=True, negative=True, group="Data",
        unset="--pack",
    )  # fmt: skip
    """Attention does not cross the boundary between conversations."""
    jobs: int = changed(Workers.jobs, help="Number of worker processes that render conversations")
    """They are rendered once, into `rows/` in the run directory."""
    validation: str = text("Chat records to validate on", "PATH", group="Data")
    eval_every: int = changed(Logging.eval_every, only=needs("validation"))
