#!/usr/bin/env bash
# Simulate what docs/results-simulator.md shows, part by part, and write its tables anew. What out/simulator/ holds
# already is not run again: an interrupted batch goes on where it was, and a finished one only prints.
#
#   tools/simulate.sh                 all parts
#   tools/simulate.sh grid frontier   these
#
# Results are kept by what a cell is, not by what the simulator was: after a change to the simulator, the policies or the
# profiles, remove out/simulator/ first. JOBS processes at a time (2). COMPILED=1 runs the copy that
# tools/compile_simulator.py makes, several times as fast, and makes it anew first
# where a source is younger. The rates are those of evaluation/saturation.json.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
into=$root/out/simulator
mkdir -p "$into"
all="grid unseen scarcity frontier calibration noise routers robustness table2 width ablation fairness"
all="$all load burst heterogeneity staleness"
six=round_robin,least_loaded,token_product,drain_time,marginal_cost,late_binding
four=least_loaded,token_product,drain_time,late_binding

if [ "${COMPILED:-}" = 1 ]; then
  if [ ! -e out/compiled/built ] ||
    [ -n "$(find simulator enginemodel dataplane/core evaluation -name '*.py' -newer out/compiled/built)" ]; then
    .venv/bin/python tools/compile_simulator.py
  fi
  # From there, since the folder that one is in goes before PYTHONPATH.
  export PYTHONPATH=$root/out/compiled
  cd out/compiled
fi

simulate() { # experiment, name, more options
  local experiment=$1 name=$2
  shift 2
  echo "$name"
  "$root/.venv/bin/python" -m cli.app evaluate "$experiment" --jobs "${JOBS:-2}" \
    --resume "$into/$name.seeds.jsonl" --json "$into/$name.jsonl" --report "$into/$name" \
    --cache "$into/saturation.json" "$@" >"$into/$name.log"
}

for part in "${@:-$all}"; do
  for name in $part; do
    case $name in
      grid) simulate grid grid --seeds 4 ;;
      unseen) simulate grid grid-41 --first-seed 41 --seeds 2 --policies $six ;;
      scarcity) simulate scarcity scarcity --seeds 4 --policies $six ;;
      frontier)
        simulate frontier frontier --seeds 4 --policies round_robin,least_loaded,marginal_cost,late_binding
        ;;
      calibration) simulate calibration calibration --seeds 4 ;;
      noise) simulate noise noise --seeds 4 ;;
      routers)
        simulate routers routers --workloads chat,mixed,reasoning --seeds 4
        simulate routers routers-documents --workloads documents --seeds 8
        ;;
      robustness)
        simulate robustness robustness-documents --workloads documents --seeds 8 --policies round_robin,$four
        simulate robustness robustness --workloads mixed,reasoning --seeds 4 --policies round_robin,$four
        simulate robustness robustness-chat --workloads chat --seeds 4 --policies $four
        ;;
      table2) simulate table2 table2 --seeds 4 ;;
      width) simulate width width --seeds 4 --policies $six ;;
      ablation)
        simulate ablation ablation --quick --seeds 4
        simulate ablation ablation-all --seeds 2 --seconds 45
        ;;
      fairness)
        simulate fairness fairness --workloads mixed --seeds 4
        simulate fairness fairness-2 --workloads documents,reasoning --seeds 2
        simulate fairness fairness-chat --workloads chat --seeds 2 --seconds 45
        ;;
      load) simulate load load --seeds 2 --seconds 45 --policies $six ;;
      burst) simulate burst-train burst-train --seeds 2 --policies $six ;;
      heterogeneity) simulate heterogeneity heterogeneity --workloads mixed --seeds 4 --policies $six ;;
      staleness)
        simulate staleness staleness --quick --seeds 2 --policies least_loaded,marginal_cost,late_binding
        ;;
      *)
        echo "no part named $name: $all" >&2
        exit 2
        ;;
    esac
  done
done
cd "$root"
unset PYTHONPATH
.venv/bin/python -m evaluation.published --results "$into"
