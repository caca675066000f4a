"""Options of `sabia sft`."""

from sabia.core.options.option import changed, needs, quantity, switch, text
from sabia.core.options.shared import Trainer
from sabia.core.options.training import Logging, Training


class SftOptions(
    Trainer, Training, group="Model", defaults={"lr": 2e-5, "warmup": "3%", "weight_decay": 0.0}
):
    """Options of `sabia sft`."""

    model: str = text("Model directory to start from", "DIR", required=True, common=True)
    tokenizer: str = text("Tokenizer with a chat template", "DIR", unset="the model's")
    """The model grows for a tokenizer that extends its own (see `sabia pretrain`)."""
    length: int = quantity("length", "Maximum tokens of a conversation, and of a row", "2k",
                           group="Data")  # fmt: skip
    """Longer conversations are rejected."""
    pack: bool = switch(
        "Pack several conversations into a row", default=True, negative=True, group="Data"
    )
    """No conversation sees another one of its row."""
    validation: str = text("Chat records to validate on", "PATH", group="Data")
    eval_every: int = changed(Logging.eval_every, only=needs("validation"))
