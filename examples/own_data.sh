#!/usr/bin/env bash
# The whole job over your own files: from pages to a small model, quantized and evaluated.
#   bash examples/own_data.sh [--tokens N] [--tasks FOLDER] [--work FOLDER] DIR
# DIR holds WARC, HTML, text (.txt .md), JSON lines and Parquet files, in folders as you like. Files
# that cannot be read are rejected with the reason; other kinds are left alone; a folder DIR/eval is
# never read as training text. Tasks (TOML files, see man sabia-eval) are FOLDER/*.toml, else
# DIR/*.toml; rubric tasks need a judge: export SABIA_EVAL_JUDGE_URL and SABIA_EVAL_JUDGE_MODEL.
# About ten minutes on two CPU cores for a few megabytes of text; --tokens (default 1M) is how much
# the model reads. Everything is kept in the --work folder (default: own_data); the same line again
# goes on where it stopped. The lines marked $ are what you would type.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
tokens=1M tasks='' work="$root/own_data" data=''
usage() { echo "own_data: $1 (expected [--tokens N] [--tasks FOLDER] [--work FOLDER] DIR)" >&2 && exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --tokens | --tasks | --work)
      [ $# -gt 1 ] || usage "$1 needs a value"
      case $1 in --tokens) tokens=$2 ;; --tasks) tasks=$2 ;; --work) work=$2 ;; esac
      shift ;;
    -*) usage "unknown option $1" ;;
    *) [ -z "$data" ] || usage "two folders: $data and $1"; data=$1 ;;
  esac
  shift
done
[ -n "$data" ] || usage "no folder given"
[ -d "$data" ] || usage "$data is no folder"
data=$(cd "$data" && pwd)
tasks=$(cd "${tasks:-$data}" && pwd) || usage "no folder $tasks"
case "$(realpath -m "$work")/" in "$data"/*) usage "--work $work lies in $data and would be read" ;; esac
if [ -e "$work" ] && [ ! -e "$work/.own_data" ] && [ -n "$(ls -A "$work")" ]; then
  echo "own_data: $work has other files in it; name an empty folder with --work" >&2 && exit 2
fi
started=$(date +%s)
source "$root/examples/environment.sh"
make_environment "$root" ""
mkdir -p "$work" && cd "$work" && touch .own_data
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
printf 'set up\t%s\tmain\n' "$(($(date +%s) - started))" >times.tsv

# step NAME 'LINE': show the line, run it, note how long it took
step() {
  local from
  printf '\n== %s\n$ %s\n' "$1" "$2"
  from=$(date +%s.%N)
  eval "$2"
  printf '%s\t%s\tmain\n' "$1" "$(echo "$(date +%s.%N) $from" | awk '{print $1 - $2}')" >>times.tsv
}

# -- data
step "read" "sabia crawl $(printf %q "$data") --exclude eval -o pages.parquet --stats crawl.json"
step "classify" 'sabia classify pages.parquet --where "quality >= 0.5 and word_count >= 50" --removed dropped.parquet -o good.parquet --stats classify.json'
step "dedup" 'sabia dedup good.parquet --removed duplicates.parquet -o unique.parquet --stats dedup.json'
step "rewrite" 'sabia rewrite unique.parquet --recipe reason-first -o rewritten.parquet --stats rewrite.json'
step "hold some out" "python $(printf %q "$root/examples/own_data_split.py") rewritten.parquet train.parquet held-out.parquet --share 0.05 --stats split.json"
step "tokenize" 'sabia tokenize train.parquet --vocab-size 4096 --length 512 -o tokens/ --stats tokenize.json'
step "tokenize, held out" 'sabia tokenize held-out.parquet --tokenizer tokens/_tokenizer --length 512 -o held-out-tokens/'

# -- models
step "pretrain" "sabia pretrain tokens/ --shape d=128,layers=4,heads=4,ffn=384,context=512 --tokens $tokens --batch 4 --lr 3e-3 --validation held-out-tokens/ -o run > metrics.parquet"
step "quantize" 'sabia quantize tokens/ --model run/final --recipe mixed --samples 64 -o small > errors.parquet'

# -- evaluation: the held-out text, and your tasks
cat >held-out.toml <<'TOML'
# Text that the model has not seen, scored token by token.
name = "held-out text"
kind = "perplexity"
data = "held-out.parquet"
metric = "bits_per_byte"
TOML
list=' --task held-out.toml'
for task in "$tasks"/*.toml; do
  [ -e "$task" ] && list+=" --task $(printf %q "$task")"
done
step "eval" "sabia eval$list --model trained=run/final --model quantized=small -o scores.parquet --report eval.html"
python "$root/examples/own_data_report.py" . "$data" --seconds $(($(date +%s) - started))
