#!/usr/bin/env bash
# Whether the public package index has all versions of constraints.txt and constraints-lowest.txt,
# whether they fit together, and whether they name every package that is installed.
#   bash tests/check_pins.sh
# Nothing of it is installed. uv resolves, in an environment that is thrown away, since it reads the
# packages' metadata alone (40 MB); `pip install --dry-run` downloads whole wheels (3 GB) from an
# index that does not serve metadata by itself. Settings of pip and uv are left out, so that no other
# index helps; certificates and proxies are kept. Skipped where the index cannot be reached.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/examples/environment.sh"
python=$(find_python)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

plain=(env -i PATH="$PATH" HOME="$scratch" TMPDIR="$scratch" PIP_CONFIG_FILE=/dev/null)
certificates=${SSL_CERT_FILE:-${PIP_CERT:-}}
[ -n "$certificates" ] ||
  certificates=$("$python" -m pip config list | sed -n "s/^[a-z]*\.cert='\(.*\)'/\1/p" | tail -n 1)
[ -z "$certificates" ] || plain+=(SSL_CERT_FILE="$certificates" PIP_CERT="$certificates")
for name in HTTPS_PROXY HTTP_PROXY ALL_PROXY NO_PROXY https_proxy http_proxy all_proxy no_proxy; do
  [ -z "${!name:-}" ] || plain+=("$name=${!name}")
done

# fit FILE PYTHON: resolve sabia[dev] with the versions of FILE
fit() {
  local file=$1 version=$2 found="$scratch/found.txt" missing
  "${plain[@]}" "$scratch/venv/bin/uv" pip compile --quiet --no-config --system-certs \
    --cache-dir "$scratch/cache" --only-binary :all: --python-version "$version" \
    --python-platform x86_64-manylinux_2_28 --extra dev --constraint "$file" \
    --no-annotate --no-header --output-file "$found" "$root/pyproject.toml" >/dev/null || return 1
  missing=$(comm -13 <(names "$file") <(names "$found"))
  if [ -n "$missing" ]; then
    echo "$file has no version of: $(echo "$missing" | paste -sd ' ')" >&2
    return 1
  fi
  echo "$(basename "$file"): $(wc -l <"$found") packages fit together on Python $version"
}

# names FILE: the packages of a list of versions, in the one spelling that the index uses
names() { sed -n 's/==.*//p' "$1" | tr 'A-Z_.' 'a-z--' | sort -u; }

"$python" -m venv "$scratch/venv"
if ! "${plain[@]}" "$scratch/venv/bin/python" -m pip install --disable-pip-version-check \
  --no-cache-dir --quiet uv==0.13.9 >"$scratch/log" 2>&1; then
  why=$(cause_of "$scratch/log")
  case $why in
    "pip cannot reach"* | "pip does not trust"*) echo "check_pins: skipped: $why" && exit 0 ;;
  esac
  cat "$scratch/log" >&2
  exit 1
fi
for version in 3.11 3.12 3.13; do
  fit "$root/tests/constraints.txt" "$version"
done
fit "$root/tests/constraints-lowest.txt" 3.11
