#!/usr/bin/env bash
# The tests. usage: bash tests/run.sh [--lowest] [PYTEST ARGUMENTS]
#   bash tests/run.sh                     the fast suite (about 20 minutes on two cores)
#   bash tests/run.sh -m slow             the slow tests
#   bash tests/run.sh tests/core/plan     one room
#   bash tests/run.sh --lowest            with the lowest versions that pyproject.toml admits, in an
#                                         environment of their own, .venv-lowest (Python 3.11)
# SABIA_TEST_DATA names a folder of real data; tests that need it are skipped without it.
# At the end stands how many CPU minutes it all took.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/examples/environment.sh"
if [ "${1:-}" = --lowest ]; then
  shift
  export SABIA_CONSTRAINTS="$root/tests/constraints-lowest.txt"
  export SABIA_VENV="${SABIA_VENV:-$root/.venv-lowest}" PYTHON="${PYTHON:-python3.11}"
fi
make_environment "$root" "[dev]"
if [ -z "${SABIA_TEST_DATA:-}" ] && [ -d "$root/../shared/data" ]; then
  SABIA_TEST_DATA=$(cd "$root/../shared/data" && pwd)
  export SABIA_TEST_DATA
fi
workers="${SABIA_TEST_WORKERS:-$(env -u OMP_NUM_THREADS nproc)}"  # nproc heeds OMP_NUM_THREADS
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
cd "$root"
exec python tests/support/timed_pytest.py -q -n "$workers" --dist loadfile --no-loadscope-reorder --durations 15 "$@"
