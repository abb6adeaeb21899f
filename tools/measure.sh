#!/usr/bin/env bash
# Measure the tables of docs/results.md on paced real engines, part by part. What docs/results/ holds
# already is not run again: an interrupted batch goes on where it was, and a finished one only prints.
#
#   tools/measure.sh                 all parts
#   tools/measure.sh table2 others   these
#
# Needs `make setup venv-vllm` and two idle cores. A run takes (SECONDS_OF_ARRIVALS + 8) times the dilation and
# some seconds: 2:25 min here, so 37 min for table2, 15 for saturation, 7 for again,
# 40 for others, 26 for workloads; 12 for emulated, in real time and at half of it.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${SECONDS_OF_ARRIVALS:-25}
into=docs/results
all="table2 saturation again others workloads emulated"

measure() { # experiment, name, dilation, more options
  local experiment=$1 name=$2 dilation=$3
  shift 3
  .venv/bin/steelyard evaluate "$experiment" --backend "${backend:-paced}" --dilation "$dilation" --seconds "$seconds" \
    --resume "$into/$name.seeds.jsonl" --json "out/measured/$name.jsonl" \
    --journal "out/measured/requests" "$@"
}

for part in "${@:-$all}"; do
  for name in $part; do
    case $name in
      table2) measure measured-table2 table2 4 --seeds 3 ;;
      saturation) measure measured-saturation table2 4 --seeds 3 ;; # shares a cell with table2
      again) # what a second run of the same cell and trace differs by
        measure measured-table2 again 4 --seeds 1 --first-seed 32 --policies round_robin,least_loaded,late_binding
        ;;
      emulated)
        backend=emulated measure measured-table2 emulated 1 --seeds 1 --first-seed 32
        backend=emulated measure measured-table2 emulated-2 2 --seeds 1 --first-seed 32 --policies marginal_cost,late_binding
        ;;
      others) measure measured others 4 --seeds 1 --first-seed 32 ;;
      workloads)
        measure measured-workloads documents-reasoning 4 --seeds 1 --first-seed 32 --workloads documents,reasoning
        # Five times as many requests a second, and batches five times as large.
        measure measured-workloads chat 6 --seeds 1 --first-seed 32 --workloads chat
        ;;
      *)
        echo "no part named $name: $all" >&2
        exit 2
        ;;
    esac
  done
done
