"""Options of `sabia sft`."""

from sabia.core.errors import UsageError
from sabia.core.options.chat_template import ChatTemplate
from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    number,
    quantity,
    several,
    switch,
    text,
)
from sabia.core.options.shared import (
    Backend,
    Call,
    InputOptions,
    Output,
    Redo,
    RowOptions,
    Trainer,
    Workers,
)
from sabia.core.options.table import Options
from sabia.core.options.training import (
    DISTILL,
    AdapterStart,
    Checkpoints,
    DistillationOptions,
    Logging,
    Optimizer,
    Schedule,
    Training,
)

CHATS = ("next-token",)
TOKENS = (*CHATS, DISTILL)
PAIRS = ("dpo", "ipo", "kto", "orpo", "simpo", "reward")
CHAT_LOSS, TOKEN_LOSS = needs(loss=CHATS), needs(loss=TOKENS)
BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
# peak learning rates, of whole models and of adapters
LR, PAIRS_LR, PAIRS_LORA_LR = 2e-5, 1e-6, 1e-5


class PreferenceOptions(Options, group="Loss", recorded=False):
    """What is learned: conversations, or which of two answers is better."""

    loss: str = choice(
        "Loss: of the assistant's tokens, or of preferences", *TOKENS, *PAIRS, common=True
    )
    """`next-token` imitates conversations. `distill` reads distillation records, which `sabia sft
    teacher` makes: the loss of a token is KL(teacher ‖ model) over the teacher's likeliest tokens
    and one more outcome, all other tokens together. The others read preference records: a prompt
    with a chosen and a rejected answer, texts or lists of messages; lists that are whole
    conversations need no prompt. With log-ratios to the starting model: `dpo` (arXiv 2305.18290),
    `ipo` (2310.12036) and `kto` (2402.01306), which needs no pairs: either answer may be null, or
    one is given as `completion` with a boolean `label`. Without them: `orpo` (2403.07691), whose
    loss contains the next-token loss of the chosen answers, and `simpo` (2405.14734). `reward`
    trains a model with a score in place of its head (Bradley–Terry), for `sabia grpo --reward
    model`; transformers loads it with AutoModelForSequenceClassification. The answers of a record
    stay in one row, with the prompt before each, and `--length` bounds them together. The
    log-probabilities of the starting model are computed once, into `reference/` in the run
    directory."""
    beta: float | None = number(
        "Coefficient of the log-ratios or log-probabilities", above=0, unset="0.1, with simpo 2",
        only=needs(loss=tuple(BETA)),
    )  # fmt: skip
    """Larger values keep the model nearer to the starting model with `dpo`, `ipo` and `kto`. With
    `orpo` it is the weight of the odds ratio, λ in the paper."""
    label_smoothing: float = number(
        "Share of pairs whose labels are assumed to be wrong", 0.0, least=0, most=0.5,
        only=needs(loss="dpo"),
    )  # fmt: skip
    length_norm: bool = switch(
        "Divide the log-ratio of an answer by its number of tokens",
        only=needs(loss=("dpo", "ipo", "kto")),
    )  # fmt: skip
    """`simpo` always does. Use a larger `--beta` with it, such as 5."""
    nll: float = number(
        "Coefficient of the chosen answers' next-token loss, added to the loss", 0.0, least=0,
        only=needs(loss=("dpo", "ipo", "simpo")),
    )  # fmt: skip
    """The mean over all tokens of the chosen answers of a step. It keeps their probabilities from
    falling."""
    margin: float = number(
        "Margin by which the chosen answer's reward is to be larger", 1.0, least=0,
        only=needs(loss="simpo"),
    )  # fmt: skip
    """γ in the paper, which recommends about half of `--beta`."""
    undesirable_weight: float = number(
        "Weight of rejected answers, relative to chosen ones", 1.0, above=0, only=needs(loss="kto")
    )
    """Times the number of rejected answers it should be about that of the chosen ones."""

    def complete(self) -> None:
        """The coefficient depends on the loss."""
        super().complete()
        if self.beta is None:
            self.beta = BETA.get(self.loss, 0.0)

    def preference(self) -> dict[str, object]:
        """The entries of a run's identity; {} with another loss."""
        if self.loss not in PAIRS:
            return {}
        values = {name: getattr(self, name) for name in PreferenceOptions.table}
        return {
            name: value
            for name, value in values.items()
            if all(condition.holds(values) for condition in PreferenceOptions.table[name].only)
        }


class SftOptions(
    Trainer,
    Training,
    AdapterStart,
    DistillationOptions,
    PreferenceOptions,
    ChatTemplate,
    group="Model",
    defaults={"warmup": "3%", "weight_decay": 0.0},
    only={DistillationOptions: CHAT_LOSS},
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
    validation: str = text("Records to validate on, of the kind of the input", "PATH", group="Data")
    """Of preferences the share of pairs in the right order is reported besides the loss."""
    eval_every: int = changed(Logging.eval_every, only=needs("validation"))
    lr: float = changed(
        Schedule.lr, default=None,
        unset="2e-5; with dpo, ipo, kto, orpo and simpo 1e-6, with adapters 1e-5",
    )  # fmt: skip
    teacher_share: float = changed(
        DistillationOptions.teacher_share, only=needs("teacher", loss=DISTILL)
    )
    z_loss: float = changed(Optimizer.z_loss, only=TOKEN_LOSS)
    balance: float = changed(Optimizer.balance, only=TOKEN_LOSS)
    router_z: float = changed(Optimizer.router_z, only=TOKEN_LOSS)
    bias_rate: float = changed(Optimizer.bias_rate, only=TOKEN_LOSS)

    def complete(self) -> None:
        """The learning rate depends on the loss; preferences move no biases of experts."""
        super().complete()
        if self.lr is None:
            adapters = PAIRS_LORA_LR if self.lora_rank or self.adapter else PAIRS_LR
            self.lr = adapters if self.loss in BETA else LR
        if self.loss in PAIRS:
            self.bias_rate = 0.0

    def check(self) -> None:
        """A teacher is for conversations."""
        super().check()
        if self.loss not in CHATS and self.teacher:
            raise UsageError("--teacher: only with --loss next-token")


class TeacherOptions(RowOptions, ChatTemplate, Backend, group="Model"):
    """Options of `sabia sft teacher`."""

    teacher: str = text("Model directory whose predictions are written", "DIR", required=True,
                        common=True)  # fmt: skip
    top: int = integer("Number of the teacher's likeliest tokens at each token", 20, least=1,
                       common=True)  # fmt: skip
    length: int = quantity("length", "Maximum tokens of a conversation", "2k", group="Data")
    """Longer conversations are rejected. `2k` is 2048."""


class MergeOptions(InputOptions, Redo, Call, group="Model"):
    """Options of `sabia sft merge`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Model directories, or a run directory with --checkpoints"
    )
    out: str | None = changed(Output.out, help="Directory to write the model to", required=True)
    method: str = choice(
        "How the models are merged", "linear", "slerp", "ties", common=True,
        only=needs(checkpoints=0),
    )  # fmt: skip
    """`linear` is the weighted mean. `slerp` interpolates two models along an arc, tensor by
    tensor. `ties` (arXiv 2306.01708) adds to `--base` what the models have changed most, where
    they agree about the sign."""
    weights: str = text("Weights of the models, in order", "W,W,…", unset="equal", common=True)
    """They are divided by their sum."""
    for_: tuple[str, ...] = several("Weights of the tensors whose names match", "PATTERN=W,W,…")
    """PATTERN is a regular expression, searched in the tensors' names in the files, or with
    `--checkpoints` in names such as `layers.0.mlp.up`. The first match counts."""
    base: str = text("Model that the others were trained from", "DIR", only=needs(method="ties"))
    density: float = quantity(
        "share", "Share of a tensor's differences that is kept, the largest", "20%",
        only=needs(method="ties"),
    )  # fmt: skip
    scale: float = number(
        "Factor of the merged differences", 1.0, above=0, only=needs(method="ties")
    )
    checkpoints: int = integer("Average the last N checkpoints of a run", 0, least=0, unset="off")
    export_dtype: str = changed(
        Checkpoints.export_dtype, help="Number format of the averaged checkpoints",
        only=needs("checkpoints"),
    )  # fmt: skip

    def check(self) -> None:
        """TIES needs the model that the others began with."""
        super().check()
        if self.method == "ties" and not self.base:
            raise UsageError("--base: is missing (expected DIR, with --method ties)")
