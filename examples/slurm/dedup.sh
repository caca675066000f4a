#!/bin/bash
# Deduplication of many shards as three dependent Slurm jobs: an array that sketches the shards, one
# job that compares all sketches, and an array that writes the output.
#   examples/slurm/dedup.sh TASKS SCRATCH INPUT… -o DIRECTORY [options of sabia dedup]
#   examples/slurm/dedup.sh 32 scratch/ crawl/ --method minhash -o unique/ --removed removed/
# SCRATCH is a directory that all nodes share. Prints the number of the last job. Run the same line
# again after a failure: finished sketches and shards are skipped. Options of sbatch are taken from
# its environment variables: SBATCH_PARTITION, SBATCH_TIMELIMIT, SBATCH_MEM_PER_NODE …
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 TASKS SCRATCH INPUT… -o DIRECTORY [options of sabia dedup]" >&2
    exit 2
fi
tasks=$1 scratch=$2
shift 2
job="$(dirname "$0")/data_array.sbatch"
line=(dedup "$@" --scratch "$scratch" --phase)
array=(--parsable --kill-on-invalid-dep=yes "--array=0-$((tasks - 1))")

sketch=$(sbatch "${array[@]}" "$job" "${line[@]}" sketch --shard auto)
compare=$(sbatch --parsable --kill-on-invalid-dep=yes --output=sabia-%j.log \
    --dependency="afterok:${sketch%%;*}" "$job" "${line[@]}" compare)
sbatch "${array[@]}" --dependency="afterok:${compare%%;*}" "$job" "${line[@]}" write --shard auto
