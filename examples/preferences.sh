#!/usr/bin/env bash
# Direct preference optimization on a few made-up pairs: a small model learns which answers to prefer.
#   bash examples/preferences.sh [FOLDER]      (default: preferences; two minutes on two CPU cores)
# It pretrains a model on sums, fine-tunes it on answers that are sentences or bare numbers by turns,
# and then trains it to prefer sentences. The lines marked $ are what you would type.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/examples/environment.sh"
make_environment "$root" ""
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
mkdir -p "${1:-$root/preferences}" && cd "${1:-$root/preferences}"

python - <<'PYTHON'
import json, random
draw = random.Random(0)

def write(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)

def sums(count):
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        sentence, number = f"The sum of {a} and {b} is {a + b}.", f"{a + b}"
        yield [{"role": "user", "content": f"What is {a} + {b}?"}], sentence, number

write("texts.jsonl", ({"text": f"{p[0]['content']} {a}"} for p, a, _ in sums(3000)))
write("chats.jsonl", ({"messages": [*p, {"role": "assistant", "content": draw.choice((a, b))}]}
                      for p, a, b in sums(1500)))
for name, count in (("pairs.jsonl", 600), ("held-out.jsonl", 100)):
    write(name, ({"prompt": p, "chosen": a, "rejected": b} for p, a, b in sums(count)))
PYTHON

run() { echo "\$ $*" >&2 && "$@"; }
run sabia tokenize texts.jsonl --train-tokenizer --vocab-size 320 -o tokens/
run sabia pretrain tokens/ --shape d=64,layers=2,heads=4,context=256 --epochs 2 --lr 2e-3 -o base/ >base.parquet
run sabia sft chats.jsonl --model base/final --length 256 --lr 1e-3 -o sft/ >sft.parquet
run sabia sft pairs.jsonl --loss dpo --model sft/final --length 256 --batch 8 --epochs 2 --lr 3e-4 \
  --validation held-out.jsonl -o dpo/ >dpo.parquet
python - <<'PYTHON'
import json
rows = [json.loads(line) for line in open("dpo/metrics.jsonl")]
last = [row for row in rows if "validation_accuracy" in row][-1]
print(f"{last['validation_accuracy']:.1%} of the held-out pairs in the right order, margin "
      f"{last['validation_margin']:.2f}")
PYTHON
