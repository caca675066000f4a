#!/usr/bin/env bash
# Does rewriting pages so that the reasoning precedes the answer give a better model? A measurement.
#   bash examples/rewrite_claim.sh [--fast] [--seeds N] [--first-seed N] [FOLDER]
# 25 CPU minutes, about 14 minutes on two free cores (--fast: 1 CPU minute, a test of the commands, whose
# result means nothing). Everything is kept in FOLDER (default: rewrite-claim).
# The pages are generated: problems of four steps, the answer first. For each seed one model is
# pretrained on the pages as they are and one on the same pages after `sabia rewrite`, with as many
# tokens, and both are evaluated on held-out problems before fine-tuning, after few demonstrations
# and after many. `sabia rewrite` uses its rules, which only move sentences; no model is needed.
# Each seed has pages, problems and weights of its own. The lines marked $ are what you would type.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
fast=no seeds=8 first=1 work="$root/rewrite-claim"
while [ $# -gt 0 ]; do
  case $1 in
    --fast) fast=yes ;;
    --seeds) seeds=$2 && shift ;;
    --first-seed) first=$2 && shift ;;
    -*) echo "rewrite_claim: unknown option $1 (expected --fast, --seeds N, --first-seed N)" >&2 && exit 2 ;;
    *) work=$1 ;;
  esac
  shift
done
source "$root/examples/environment.sh"
make_environment "$root" ""
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
mkdir -p "$work" && cd "$work"
times >cpu-before.txt # of the set-up

# sizes: pages, tokens of pretraining, demonstrations (few, many), held-out problems
if [ "$fast" = yes ]; then
  seeds=2 pages=1200 tokens=60k few=16 many=64 items=40
else
  pages=16000 tokens=1.2M few=32 many=8000 items=300
fi

run() { echo "\$ $*" && "$@"; }

# arm NAME PAGES: pretrain a model on the pages and fine-tune it on few and on many demonstrations
arm() {
  run sabia tokenize "$2" --tokenizer tokenizer/_tokenizer --length 256 -o "$1/tokens/"
  run sabia pretrain "$1/tokens/" --shape d=64,layers=2,heads=4,ffn=256,context=256 --tokens "$tokens" \
    --batch 8 --lr 3e-3 --seed "$seed" -o "$1/none" >"$1.none.parquet"
  tune="--model $1/none/final --length 256 --batch 16 --lr 1e-3 --seed $seed"
  run sabia sft few.jsonl $tune --epochs 10 -o "$1/few" >"$1.few.parquet"
  run sabia sft many.jsonl $tune --epochs 1 -o "$1/many" >"$1.many.parquet"
}

for seed in $(seq "$first" $((first + seeds - 1))); do
  echo "== seed $seed"
  rm -rf "seed-$seed" && mkdir "seed-$seed" && cd "seed-$seed"
  python "$root/examples/rewrite_claim_data.py" . --seed "$seed" --pages "$pages" --few "$few" \
    --many "$many" --held-out "$items"
  cp "$root"/examples/tasks/worked_*.toml .
  run sabia rewrite pages.jsonl --recipe reason-first -o rewritten.parquet
  run sabia tokenize pages.jsonl --train-tokenizer --vocab-size 320 --length 256 -o tokenizer/
  arm rewritten rewritten.parquet >rewritten.log 2>&1 &
  arm pages pages.jsonl >pages.log 2>&1 || { cat pages.log && exit 1; }
  wait $! || { cat rewritten.log && exit 1; }
  cat pages.log rewritten.log
  run sabia eval --task worked_text.toml --model pages.none=pages/none/final \
    --model rewritten.none=rewritten/none/final -o none.parquet
  run sabia eval --task worked_chat.toml --model pages.few=pages/few/final \
    --model rewritten.few=rewritten/few/final --model pages.many=pages/many/final \
    --model rewritten.many=rewritten/many/final -o tuned.parquet
  cd ..
done
times >cpu-after.txt
python "$root/examples/rewrite_claim_report.py" . $(seq -f "seed-%g" "$first" $((first + seeds - 1)))
