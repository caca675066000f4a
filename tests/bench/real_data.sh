#!/usr/bin/env bash
# Real data through the whole job: examples/own_data.sh over the folder that SABIA_TEST_DATA names,
# then published answers to OAB-bench through the rubric judge. Prints the figures as Markdown.
#   SABIA_TEST_DATA=DIR bash tests/bench/real_data.sh [WORK [OPTIONS OF own_data.sh]] > figures.md
# DIR holds pages and texts, and in eval/ ENEM 2022, GSM8K and OAB-bench. Commands and their notes go
# to stderr. Judges are scripted (scripted_judge.py): nothing leaves the machine, nothing costs money.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
bench="$root/tests/bench"
data=${SABIA_TEST_DATA:?names a folder of real data}
work=$(realpath -m "${1:-$root/real_data}")
[ $# -eq 0 ] || shift
source "$root/examples/environment.sh"
make_environment "$root" ""
mkdir -p "$work/tasks/own" "$work/tasks/published"
ln -sfn "$data/eval" "$work/tasks/own/data"
python "$bench/oab_rows.py" "$data/eval/oab-bench" "$work/tasks/own/oab"
ln -sfn ../own/oab "$work/tasks/published/oab"
cp "$bench"/tasks/{enem,enem_few_shot,gsm8k,oab}.toml "$work/tasks/own/"
cp "$bench"/tasks/{oab,oab_points}.toml "$work/tasks/published/"

rm -f "$work/port"
python "$bench/scripted_judge.py" --port-file "$work/port" --replay "$data/eval/oab-bench" &
judge=$!
trap 'kill "$judge" 2>/dev/null || true' EXIT
for _ in $(seq 300); do [ -s "$work/port" ] && break || sleep 0.1; done
export SABIA_EVAL_JUDGE_URL="http://127.0.0.1:$(cat "$work/port")/v1" SABIA_EVAL_JUDGE_MODEL=scripted
export SABIA_EVAL_JUDGE_CACHE="$work/calls"

bash "$root/examples/own_data.sh" --tasks "$work/tasks/own" --work "$work/run" "$@" "$data" >&2
cd "$work"
answers=''
for file in "$work"/tasks/own/oab/*.jsonl; do
  case $(basename "$file" .jsonl) in questions) ;; *) answers+=" --answers $file" ;; esac
done
replayed=''
for file in "$data"/eval/oab-bench/model_answer/{o3,sabia-3.1}-*.jsonl; do
  replayed+=" --answers $work/tasks/own/oab/$(basename "$file")"
done
sabia eval --task tasks/published/oab.toml $answers -o overlap.parquet --report overlap.html
sabia eval --task tasks/published/oab_points.toml $replayed -o replayed.parquet --report replayed.html
python "$root/examples/own_data_report.py" run "$data" --markdown
printf '\n**Published answers, scripted judge (word overlap)**\n\n'
python "$root/examples/own_data_report.py" . "$data" --scores overlap.parquet
printf '\n**Published answers, published verdicts replayed**\n\n'
python "$root/examples/own_data_report.py" . "$data" --scores replayed.parquet
