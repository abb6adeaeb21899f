#!/usr/bin/env bash
# Every suite in one pytest run, so that one summary speaks for all of them. The compose suite takes part
# where a Docker engine answers; with CI=true it takes part in any case, and fails where none does.
set -euo pipefail
cd "$(dirname "$0")/.."
suites=(tests/unit tests/contract tests/integration tests/real_vllm)
if [[ ${CI:-} == true ]] || docker info >/dev/null 2>&1; then
  suites+=(tests/compose)
else
  echo "no Docker engine answers: tests/compose is left out (make test-compose says more)"
fi
exec .venv/bin/python -m pytest "${suites[@]}"
