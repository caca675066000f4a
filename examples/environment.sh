# Sourced by quickstart.sh, own_data.sh and tests/run.sh: make the virtual environment once.
# usage: make_environment ROOT EXTRAS      (EXTRAS such as "" or "[dev]")
# PYTHON=/path/to/python picks another interpreter; SABIA_VENV another folder than ROOT/.venv.

newest_python() {
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
      2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "sabia needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2
  return 1
}

make_environment() {
  local root=$1 extras=$2 python mark
  venv=${SABIA_VENV:-$root/.venv}
  mark="$venv/.sabia$extras-$(cksum <"$root/pyproject.toml" | cut -d' ' -f1)"
  if [ ! -e "$mark" ]; then
    python=$(newest_python) || return 1
    echo "setting up $venv (once; about a minute and a half)" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || return 1
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --constraint "$root/tests/constraints.txt" --editable "$root$extras" || return 1
    touch "$mark"
  fi
  export PATH="$venv/bin:$PATH"
}
