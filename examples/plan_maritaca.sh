#!/usr/bin/env bash
# What a 1.6T model and its whole generation cost: the figures of the article
# maritaca.ai/en/blog/como-treinamos-modelos from sabia, each beside the article's own.
#   bash examples/plan_maritaca.sh [DIRECTORY]
# A few seconds, no GPU. The JSON of every run is kept in DIRECTORY if one is named.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v sabia >/dev/null; then
  source "$root/examples/environment.sh"
  make_environment "$root" ""
fi
python=$(dirname "$(readlink -f "$(command -v sabia)")")/python
[ -x "$python" ] || python=python3
if [ $# -gt 0 ]; then
  work=$1 && mkdir -p "$work"
else
  work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
fi

article=(--params 1.6T --active 49B --tokens 500B --seq 8k --chip b200 --mfu 40% --price 4.4,12)

# plan NAME ARGUMENT…: keep the run's JSON as NAME.json; runs beside the others
running=()
plan() {
  sabia plan-cluster --quiet "${@:2}" --json >"$work/$1.json" &
  running+=($!)
}

# show TITLE ARGUMENT…: print the run's table under the line that makes it
show() {
  printf '\n== %s\n$ sabia plan-cluster %s\n' "$1" "${*:2}"
  sabia plan-cluster --quiet "${@:2}"
}

serve=(--stage serve --params 1T --active 32B --weights fp8 --chip b200 --chips 8 --price 4.4)
update=(--stage grpo --params 1T --active 32B --lora --chip b300 --price 6.99
  --chips 16 --generation-chips 8 --weights fp8)
plan table1 "${article[@]}" --batch-tokens 4M
plan chips150 "${article[@]}" --chips 150
# several assumptions changed at once, each seen in another figure
plan changed "${article[@]}" --tokens 32T --batch-tokens 15M --state-recipe megatron18 \
  --deadline 3000d
plan tuned_badly "${article[@]}" --chips 150 --mfu 20% --batch-tokens 8M
plan lora "${article[@]}" --lora --chips 20 --deadline 10w
plan budget --budget "$root/examples/pyramid.toml"
plan failures10 --params 8B --tokens 100B --chip b200 --chips 10 --failure-rate 0.1% --price 4.4
plan failures300 "${article[@]}" --chips 300 --failure-rate 0.1%
v5p=(--params 1.6T --active 49B --chip v5p --chips 512 --price 4.2 --preempt 12h)
plan storage5 "${v5p[@]}" --bucket-gbps 5
plan storage10 "${v5p[@]}" --bucket-gbps 10
plan serve1T "${serve[@]}"
plan update1T "${update[@]}"

show "Table 1: one training of the large model" "${article[@]}"
show "Table 2: a whole generation" --budget "$root/examples/pyramid.toml"
show "LoRA on 20 chips" "${article[@]}" --lora --chips 20 --deadline 10w
show "300 preemptible chips, storage of 8 GB/s" \
  "${article[@]}" --chips 300 --preempt 6h --bucket-gbps 8
show "1T in FP8 on one host" "${serve[@]}"
show "GRPO of 1T with LoRA: a host that updates, a host that generates" "${update[@]}"

for run in "${running[@]}"; do wait "$run"; done
printf '\n== The article, and sabia\n'
"$python" "$root/examples/plan_maritaca_report.py" "$work"
