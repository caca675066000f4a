"""Options that pretrain and sft share, declared once; the commands give the defaults."""

from typing import Annotated

from sabia.cli.grammar import count, option

Lr = Annotated[float, option("Peak learning rate.", metavar="RATE")]
Schedule = Annotated[str, option("wsd, cosine or constant.", metavar="NAME")]
Warmup = Annotated[str, option("Steps, or a share of them: 100 or 2%.", metavar="STEPS")]
Decay = Annotated[str, option("Length of wsd's tail: 200 or 20%.", metavar="STEPS")]
DecayShape = Annotated[str, option("linear, exponential, cosine or 1-sqrt.", metavar="NAME")]
FinalLr = Annotated[float, option("Share of --lr left at the end.", min=0.0, max=1.0)]
WeightDecay = Annotated[float, option("AdamW's decay of matrices.", metavar="RATE", min=0.0)]
Betas = Annotated[str, option("AdamW's betas.", metavar="B1,B2")]
ClipNorm = Annotated[float, option("Largest gradient norm; 0: any.", metavar="NORM", min=0.0)]
Batch = Annotated[int, option("Rows in a step, over all devices (default: 32).", metavar="ROWS",
                              min=0, show_default=False)]  # fmt: skip
BatchTokens = Annotated[float, count("Tokens in a step, instead of --batch.", show_default=False)]
MicroBatch = Annotated[int, option("Rows at a time on a device (default: all).", metavar="ROWS",
                                   min=0, show_default=False)]  # fmt: skip
Steps = Annotated[int, option("Steps to train.", metavar="N", min=0, show_default=False)]
Tokens = Annotated[float, count("Tokens to train on, instead of --steps.", show_default=False)]
Epochs = Annotated[float, option("Passes over the rows (default: 1).", metavar="N", min=0.0,
                                 show_default=False)]  # fmt: skip
Precision = Annotated[str, option("fp32, or bf16 with fp32 masters.", metavar="NAME")]
Compiled = Annotated[bool, option("torch.compile the step.", "--compile")]
RematOption = Annotated[str, option("What to recompute: none, matmuls or full.", "--remat",
                                    metavar="NAME")]  # fmt: skip
SaveEvery = Annotated[str, option("Steps or a duration: 500 or 10m.", metavar="INTERVAL")]
KeepCheckpoints = Annotated[int, option("Checkpoints to keep.", metavar="N", min=1)]
EvalEvery = Annotated[int, option("Steps between validations (default: at start and end).",
                                  metavar="N", min=0, show_default=False)]  # fmt: skip
LogEvery = Annotated[int, option("Steps between rows of metrics.", metavar="N", min=1)]
PeakFlops = Annotated[float, count("Peak FLOP/s of a device for MFU (default: measured).",
                                   show_default=False)]  # fmt: skip
ExportDtype = Annotated[str, option("float32 or bfloat16 in final/.", metavar="NAME")]
