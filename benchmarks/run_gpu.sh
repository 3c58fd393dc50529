#!/usr/bin/env bash
# Everything that needs GPUs: training parity and the long batch, all GPU tests, overlap, with Transformer Engine installed
# its layers and the table of training speed (on two of the GPUs), the demo; and, unless ATTENTION is empty,
# run_gpu_attention.sh with its settings.
#   OUT=results_folder [ATTENTION=] bash benchmarks/run_gpu.sh
# Each part has its own time limit, so that one that hangs does not cost the others.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
: "${OUT:?folder of the results}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-python3}
status=0

part() {
  local name=$1 limit=$2 begin=$SECONDS
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local code=$?
  ((code)) && status=1
  echo "== $name: exit $code after $((SECONDS - begin)) s"
  grep -vE "Warning|warnings.warn" "$OUT/$name.log" | tail -n "${LINES_SHOWN:-14}"
}

part training "${TRAINING_S:-280}" "$PYTHON" -m benchmarks.training.loss_parity --out "$OUT"
# shellcheck disable=SC2086  # several folders
part tests "${TESTS_S:-300}" "$PYTHON" -m benchmarks.record_tests --csv "$OUT/gpu_tests_distributed.csv" -- \
  -m gpu ${TESTS:-tests/comm tests/attention} -q --no-header -p no:cacheprovider
part distributed 75 "$PYTHON" -m benchmarks.distributed.bench_methods --csv "$OUT/distributed.csv"
part collectives 75 "$PYTHON" -m benchmarks.collectives.bench_group_collective --csv "$OUT/group_collective.csv"
part soak "${SOAK_S:-120}" "$PYTHON" -m benchmarks.soak.collectives --csv "$OUT/soak.csv"
part soak_attention "${SOAK_S:-180}" "$PYTHON" -m benchmarks.soak.attention --csv "$OUT/soak_attention.csv"
if "$PYTHON" -c 'import transformer_engine' 2>/dev/null; then
  part te "${TE_S:-420}" "$PYTHON" -m benchmarks.training.loss_parity_te --out te_work
  cp te_work/training_te.csv "$OUT/" 2>/dev/null
  CUDA_DEVICE_MAX_CONNECTIONS=1 part speed "${SPEED_S:-900}" "$PYTHON" -m torch.distributed.run --nproc-per-node 2 \
    -m benchmarks.training.bench_speed --out speed_work --profile
  cp speed_work/*.csv speed_work/*.txt "$OUT/" 2>/dev/null
fi
part demo 110 "$PYTHON" -m megatron_magi.demo --out demo_out
cp demo_out/report.txt "$OUT/demo_report.txt" 2>/dev/null
if [ -n "${ATTENTION-1}" ]; then
  bash benchmarks/run_gpu_attention.sh || status=1
fi
exit $status
