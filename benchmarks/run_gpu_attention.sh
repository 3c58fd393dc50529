#!/bin/bash
# Checks the Hopper kernels and measures them, on a machine with a Hopper GPU, from the root of the repository.
# Results go to the folder given, or to benchmarks/results. Every step has a time limit: a kernel that hangs is killed.
set -u
out=${1:-${OUT:-benchmarks/results}}
mkdir -p "$out"
timeout -s KILL 400 python3 -m pytest -q -m gpu tests/ops -p no:cacheprovider 2>&1 | tail -30 | tee "$out/attention_tests.txt"
if [ "${PIPESTATUS[0]}" -ne 0 ]; then
  echo "tests failed: not measured"
  exit 1
fi
timeout -s KILL 600 python3 benchmarks/bench_attention.py --csv "$out/attention.csv"
timeout -s KILL 200 python3 benchmarks/bench_attention_costs.py --csv "$out/attention_costs.csv"
