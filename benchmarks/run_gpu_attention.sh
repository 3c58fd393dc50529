#!/usr/bin/env bash
# Checks the Hopper kernels and measures them, on a machine with a Hopper GPU, in less than ten minutes.
#   [OUT=results_folder] [BENCH="--masks ... --lengths ..."] [TESTS="tests/ops/..."] bash benchmarks/run_gpu_attention.sh
# Writes to build/gpu_attention where OUT is not given: gpu_tests.csv, what compute-sanitizer finds where it is there,
# attention.csv, its charts and what was printed.
# Each part has its own time limit: a kernel that hangs is killed, and does not cost the other part. Empty TESTS: only
# measure. Peers take part where PYTHONPATH has them; what they compile is kept in the temporary folder for the next run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
OUT=${OUT:-build/gpu_attention}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}
PYTHON=${PYTHON:-python3}
status=0

part() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout --kill-after=10 "$limit" "$@" 2>&1 | grep --line-buffered -vE "Warning|warnings.warn" | tee "$OUT/$name.txt" | tail -n "${LINES_SHOWN:-120}"
  local code=${PIPESTATUS[0]}
  ((code)) && status=1
  echo "== $name: exit $code after $((SECONDS - begin)) s"
}

TESTS=${TESTS-tests/ops tests/backends}
costs=tests/backends/sm90/test_resources.py # times of the host: alone
# shellcheck disable=SC2086  # several folders, several arguments
if [ -n "$TESTS" ]; then
  LINES_SHOWN=40 part attention_tests "${TESTS_S:-270}" \
    "$PYTHON" -m benchmarks.record_tests --csv "$OUT/gpu_tests.csv" -- -m gpu $TESTS --ignore $costs \
    -n "${TEST_PROCESSES:-8}" -q --no-header -p no:cacheprovider
  LINES_SHOWN=40 part attention_test_costs 60 \
    "$PYTHON" -m benchmarks.record_tests --csv "$OUT/gpu_test_costs.csv" -- \
    -m gpu $costs -q --no-header -p no:cacheprovider
fi
if command -v compute-sanitizer >/dev/null; then
  LINES_SHOWN=5 part attention_memcheck "${SANITIZE_S:-180}" \
    compute-sanitizer --tool memcheck --error-exitcode 1 "$PYTHON" -W ignore -m benchmarks.sanitize.attention
fi
# shellcheck disable=SC2086
part attention "${BENCH_S:-300}" \
  "$PYTHON" -m benchmarks.kernels.bench_attention --csv "$OUT/attention.csv" --charts "$OUT" ${BENCH:-}
part attention_costs "${COSTS_S:-120}" \
  "$PYTHON" -m benchmarks.kernels.bench_attention_costs --csv "$OUT/attention_costs.csv"
exit $status
