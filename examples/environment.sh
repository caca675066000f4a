# Sourced by quickstart.sh, own_data.sh, plan_maritaca.sh and tests/run.sh: make the virtual
# environment once, and again when what it is made from changes or when it was interrupted.
# usage: make_environment ROOT EXTRAS      (EXTRAS such as "" or "[dev]")
#   PYTHON=/path/to/python    the interpreter; else the first of python3, python3.13, … that serves
#   SABIA_TORCH=cpu           torch from PyTorch's own index: cpu, or a CUDA build such as cu130; an
#                             environment keeps its build. Else pip's index: on Linux the CUDA build
#   SABIA_VENV=FOLDER         the environment; else ROOT/.venv
#   SABIA_CONSTRAINTS=FILE    versions; else ROOT/tests/constraints.txt
# FOLDER/.sabia-setup says what the environment was made from: `made` here or `found`, then a line
# for each set of extras; or `unfinished`, and then it is made anew.

# find_python: the first interpreter that serves; Python 3.14 has no wheels of some packages yet
find_python() {
  local candidate after candidates=(python3 python3.13 python3.12 python3.11)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for after in 14 100; do
    for candidate in "${candidates[@]}"; do
      if "$candidate" -c "import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, $after))" \
        2>/dev/null; then
        echo "$candidate"
        return
      fi
    done
  done
  {
    echo "sabia needs Python 3.11 or newer with its venv module, and did not find it as any of:"
    for candidate in "${candidates[@]}"; do
      echo "  $candidate ($("$candidate" --version 2>/dev/null || echo not there))"
    done
    echo "Install it (on Debian and Ubuntu: python3 and python3-venv) or set PYTHON=/path/to/python."
  } >&2
  return 1
}

# torch_build STATE: which build of torch is wanted, `index` for that of pip's index
torch_build() {
  local wanted=${SABIA_TORCH:-}
  [ -n "$wanted" ] || wanted=$(sed -n '2s/^[0-9]* \([a-z0-9]*\) .*/\1/p' "$1" 2>/dev/null) || true
  if ! [[ ${wanted:=index} =~ ^(index|cpu|cu[0-9]+)$ ]]; then
    echo "SABIA_TORCH: '$wanted' (expected cpu, or a CUDA build of PyTorch's index such as cu130)" >&2
    return 1
  fi
  echo "$wanted"
}

# run_pip LOG WORDS: pip, with its own bars on a terminal, else a line for each phase and large file
run_pip() {
  local log=$1 pip=("$venv/bin/python" -m pip install --disable-pip-version-check --log "$1")
  shift
  if [ -t 2 ]; then
    "${pip[@]}" "$@" >&2
  else
    "${pip[@]}" --progress-bar off "$@" 2>&1 | awk '
      /^ *(Downloading|Using cached) .*\([0-9.]+ [MG]B\)/ {
        split($(NF - 2), name, "-")
        if ($NF == "GB)" || substr($(NF - 1), 2) + 0 >= 5)
          print "  " ($1 == "Using" ? "cached" : "downloaded") " " name[1] " " name[2] " " $(NF - 1) " " $NF
      }
      /^Installing collected packages/ { print "  installing " NF - 3 " packages" }
      /^ERROR/ { print "  " $0 }
      { fflush() }' >&2
    return "${PIPESTATUS[0]}"
  fi
}

# cause_of LOG: why pip failed, in words
cause_of() {
  if grep -qsE 'No space left|Disk quota exceeded' "$1"; then
    echo "no space is left for the environment, for pip's cache (~/.cache/pip) or in" \
      "${TMPDIR:-/tmp} (TMPDIR=FOLDER names another)"
  elif grep -qsE 'CERTIFICATE_VERIFY_FAILED' "$1"; then
    echo "pip does not trust the certificate of its package index, or of a proxy before it" \
      "(PIP_CERT=/path/to/certificates.pem)"
  elif grep -qsE 'NewConnectionError|NameResolutionError|(Connect|Read)Timeout|ProxyError|IncompleteRead|Network is unreachable|Connection (refused|reset)' "$1"; then
    echo "pip cannot reach its package index: there is no network, or it needs a proxy" \
      "(HTTPS_PROXY=http://host:port)"
  elif grep -qsE 'No matching distribution|ResolutionImpossible|Failed building|Failed to build' "$1"; then
    echo "a pinned version is not in the package index that pip uses (pip config list), or not for" \
      "this system and Python; sabia is tested with Python 3.11 to 3.13 (PYTHON=/path/to/python)"
  else
    echo "see the last lines of the log"
  fi
}

# say_why LOG: the one message about a failure
say_why() {
  cat >&2 <<END
sabia: setting up $venv failed: $(cause_of "$1").
  The set-up needs a network, $(room_needed), and Python 3.11 or newer.
  The log is $1. Run the same command again to go on.
END
}

room_needed() {
  if [ "$build" = cpu ]; then echo "about 3 GB of disk"; else echo "about 9 GB of disk"; fi
}

# install_packages ROOT EXTRAS LOG
install_packages() {
  local pin
  if [ "$build" != index ]; then
    pin=$(sed -n 's/^torch==//p' "$constraints")
    run_pip "$3" --no-deps --index-url "https://download.pytorch.org/whl/$build" \
      "torch==$pin+$build" || return 1
  fi
  run_pip "$3" --constraint "$constraints" --editable "$1$2"
}

# new_environment: an empty $venv in place of none, or of one that was made here
new_environment() {
  local python
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
    echo "SABIA_VENV: $venv has other files in it (expected an environment or a new folder)" >&2
    return 1
  fi
  python=$(find_python) || return 1
  mkdir -p "$venv" && echo unfinished >"$venv/.sabia-setup" && "$python" -m venv "$venv"
}

# set_up ROOT EXTRAS SUM: make $venv or bring it up to date; SUM of the files that it is made from
set_up() {
  local root=$1 extras=$2 sum=$3 log="$venv/setup.log" state="$venv/.sabia-setup" before
  before=$(cat "$state" 2>/dev/null) || true
  case $before in
    unfinished) rm -rf "$venv" ;;
    made*) [[ $before == *" $build "* ]] || rm -rf "$venv" ;;
  esac
  if [ ! -e "$venv/pyvenv.cfg" ]; then
    new_environment || return 1
    before=unfinished
  fi
  echo "setting up $venv: $("$venv/bin/python" --version), $(room_needed), once" >&2
  case $before in
    made* | unfinished) echo unfinished >"$state" ;; # until the end
    *) before=found ;;
  esac
  rm -f "$log"
  if ! install_packages "$root" "$extras" "$log"; then
    grep -qsE '^[^ ]+ Installing collected packages' "$log" || echo "$before" >"$state"
    say_why "$log"
    return 1
  fi
  rm -f "$log"
  # runs compile what is missing, so a failure is no more than a note
  "$venv/bin/python" -m sabia.kernels.compile || echo "sabia: kernels are compiled by the first runs" >&2
  mkdir -p "$venv/share/man/man1" && ln -sf "$root"/man/*.1 "$venv/share/man/man1/" || return 1
  {
    if [[ $before == found* ]]; then echo found; else echo made; fi
    echo "$sum $build $extras"
    grep "^$sum $build " <<<"$before" || true
  } >"$state"
}

make_environment() {
  local root=$1 extras=$2 build constraints sum
  venv=${SABIA_VENV:-$root/.venv}
  [[ $venv == /* ]] || venv="$PWD/$venv"
  constraints=${SABIA_CONSTRAINTS:-$root/tests/constraints.txt}
  build=$(torch_build "$venv/.sabia-setup") || return 1
  sum=$(cat "$root/pyproject.toml" "$constraints" | cksum | cut -d' ' -f1) || return 1
  if ! grep -qsF -- "$sum $build $extras" "$venv/.sabia-setup"; then # all extras include ""
    set_up "$root" "$extras" "$sum" || return 1
  fi
  export PATH="$venv/bin:$PATH"
}
