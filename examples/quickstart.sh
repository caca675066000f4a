#!/usr/bin/env bash
# The whole job, from a small web site to a quantized and evaluated model, on two CPU cores.
#   bash examples/quickstart.sh [--fast] [--seed N] [DIRECTORY]
# About 8 minutes with the set-up (--fast: 3, with smaller figures). Everything is kept in DIRECTORY
# (default: quickstart); report.html there tells what each stage did. The lines marked $ are what
# you would type: copy them for your own data, or see examples/own_data.sh.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
fast=no seed=0 work="$root/quickstart"
while [ $# -gt 0 ]; do
  case $1 in
    --fast) fast=yes ;;
    --seed) seed=$2 && shift ;;
    -*) echo "quickstart: unknown option $1 (expected --fast, --seed N)" >&2 && exit 2 ;;
    *) work=$1 ;;
  esac
  shift
done
if [ -e "$work" ] && [ ! -e "$work/.quickstart" ] && [ -n "$(ls -A "$work")" ]; then
  echo "quickstart: $work has other files in it; name an empty directory" >&2 && exit 2
fi
started=$(date +%s)
source "$root/examples/environment.sh"
make_environment "$root" ""
rm -rf "$work" && mkdir -p "$work" && cd "$work" && touch .quickstart
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
printf 'set up\t%s\tmain\n' "$(($(date +%s) - started))" >times.tsv

# sizes: pretraining tokens, sft steps and records, grpo steps, held-out sums
if [ "$fast" = yes ]; then
  tokens=150k sft=100 records=3200 grpo=16 items=300
else
  tokens=900k sft=1400 records=32000 grpo=80 items=2501
fi
corrupt=0.65 # share of the demonstrations with one digit replaced, so that grpo has something to do

# step NAME 'LINE': show the line, run it, note how long it took
branch=main
step() {
  local from
  printf '\n== %s\n$ %s\n' "$1" "$2"
  from=$(date +%s.%N)
  eval "$2"
  printf '%s\t%s\t%s\n' "$1" "$(echo "$(date +%s.%N) $from" | awk '{print $1 - $2}')" "$branch" >>times.tsv
}

# -- the world: a site on loopback with relevant pages and others; records of sums to learn
python -m sabia.examples.little_web --seed "$seed" --truth truth.jsonl --labels labels.jsonl \
  --focus focus.txt --sft sft.parquet --corrupt "$corrupt" --n "$records" --prompts prompts.parquet \
  --eval sums.parquet --choices choices.parquet --eval-n "$items"
python -m sabia.examples.little_web --seed "$seed" --serve --port-file port 2>web.log &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for _ in $(seq 100); do [ -s port ] && break || sleep 0.1; done
echo "http://127.0.0.1:$(cat port)/" >seeds.txt
cp "$root"/examples/tasks/*.toml .

# -- data
crawl="--contact you@example.org --focus focus.txt --allow-private --delay 0s --backoff 0.1s --budget 350"
step "crawl, best first" "sabia crawl seeds.txt $crawl -o crawled.parquet --stats crawl.json"
step "crawl, breadth first" "sabia crawl seeds.txt $crawl --order breadth -o breadth.parquet"
step "train a classifier" 'sabia classify train labels.jsonl --label label -o wanted.bin'
# one pipe: rows stream through both commands; tee keeps those in between for the report
step "classify and dedup" '(export SABIA_PIPE=arrow; sabia classify crawled.parquet --model wanted.bin --where "keep >= 0.5 and word_count >= 50" --removed off-topic.parquet --stats classify.json | tee classified.arrow | sabia dedup --removed duplicates.parquet -o unique.parquet --stats dedup.json)'
step "rewrite" 'sabia rewrite unique.parquet --recipe reason-first -o rewritten.parquet --stats rewrite.json'
step "tokenize" 'sabia tokenize rewritten.parquet --vocab-size 512 --length 256 -o tokens/ --stats tokenize.json'

# -- models. $1: tokens, $2: suffix of the run directories
train() {
  step "pretrain$2" "sabia pretrain $1 --shape d=128,layers=4,heads=4,ffn=384 --tokens $tokens --batch 16 --lr 2e-3 --seed $seed -o base$2 > base$2.metrics.parquet"
  step "sft$2" "sabia sft sft.parquet --model base$2/final --no-pack --batch 32 --steps $sft --lr 8e-4 --seed $seed -o sft$2 > sft$2.metrics.parquet"
}
# the same without the rewrite, at the same time on the other core
(
  branch=other
  step "tokenize, not rewritten" 'sabia tokenize unique.parquet --tokenizer tokens/_tokenizer --length 256 -o tokens-plain/'
  train tokens-plain/ -plain
) >plain.log 2>&1 &
plain=$!
train tokens/ ""
step "grpo" "sabia grpo prompts.parquet --model sft/final --steps $grpo --prompts 32 --group 16 --lr 2e-4 --schedule wsd --decay $((grpo * 3 / 8)) --max-new-tokens 8 --seed $seed -o grpo > samples.parquet"
step "quantize to 8 bits" 'sabia quantize sft.parquet --model grpo/final --recipe w8 -o grpo-w8 > errors-w8.parquet'
step "quantize, mixed" 'sabia quantize sft.parquet --model grpo/final --recipe mixed -o grpo-mixed > errors-mixed.parquet'
wait "$plain" || { cat plain.log && exit 1; }
cat plain.log
step "eval" "sabia eval --task sums.toml --task greedy.toml --task choices.toml --model base=base/final --model sft-plain=sft-plain/final --model sft=sft/final --model grpo=grpo/final --model w8=grpo-w8 --model mixed=grpo-mixed --seed $seed -o scores.parquet --report eval.html --json > eval.json"
# -- the quantized model behind an endpoint: the same questions, now as a client of it asks them
sabia serve --model grpo-w8 --name sums --port 0 2>serve.log &
server=$!
until url=$(grep -o 'http://.*/v1' serve.log); do
  kill -0 "$server" || { cat serve.log && exit 1; }
  sleep 0.1
done
step "serve" "sabia eval --task greedy.toml --model served=$url#sums --judge-cache calls -o served.parquet"
kill "$server" && wait "$server" || [ $? = 75 ]
step "plan the next one" 'sabia plan-cluster --params 1.6T --active 49B | tee plan.txt'
python "$root/examples/quickstart_report.py" . --corrupt "$corrupt" --seconds $(($(date +%s) - started))
