#!/usr/bin/env bash
# What job.sh starts on each node: torchrun with the job's rendezvous. It also tells the ranks when to save and stop.
#
# Ranks save and stop at URG. job.sh sends it, and Slurm sends TERM, to every process of a step: also to torchrun, which
# would give its ranks 30 seconds, and to the helpers of a rank (Megatron's checkpoint writer, data loaders), without
# which it cannot save. URG is ignored by processes that do not handle it; TERM is ignored here and in pretrain_job.py,
# and passed on as URG.
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((${SLURM_CPUS_ON_NODE:-1} + NPROC_PER_NODE - 1) / NPROC_PER_NODE))}
# Transformer Engine takes any cuDNN of the system before the one that torch brings.
find_cudnn='import importlib.util as u; print(u.find_spec("nvidia.cudnn").submodule_search_locations[0])'
if [ -z "${CUDNN_HOME:-}" ] && CUDNN_HOME=$("$PYTHON" -c "$find_cudnn" 2>/dev/null); then export CUDNN_HOME; fi

# Like `pgrep --parent`, which slim container images lack.
children_of() {
  local file line parent
  for file in /proc/[0-9]*/stat; do
    { read -r line <"$file"; } 2>/dev/null || continue
    # PID (NAME) STATE PARENT ...; the name may contain anything.
    read -r _ parent _ <<<"${line##*) }"
    [ "$parent" != "$1" ] || echo "${line%% *}"
  done
}

stopping=
trap 'stopping=1' TERM URG

is_host=false
[ "$SLURM_NODEID" != 0 ] || is_host=true
(
  trap '' TERM
  exec "$PYTHON" -m torch.distributed.run \
    --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="$NPROC_PER_NODE" --max-restarts=0 \
    --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS" --rdzv-id="$RENDEZVOUS_ID" --rdzv-conf="is_host=$is_host" \
    --signals-to-handle=SIGINT,SIGHUP,SIGQUIT \
    pretrain_scripts/slurm/pretrain_job.py "$COMPLETE_FILE" "$@" --exit-signal-handler --exit-signal SIGURG
) &
launcher=$!

status=0
while :; do
  # A trapped signal interrupts `wait`.
  wait "$launcher" && status=0 || status=$?
  kill -0 "$launcher" 2>/dev/null || exit "$status"
  # Again and again: ranks that are still starting do not listen yet.
  while [ -n "$stopping" ] && kill -0 "$launcher" 2>/dev/null; do
    mapfile -t ranks < <(children_of "$launcher")
    [ "${#ranks[@]}" = 0 ] || kill -URG "${ranks[@]}" 2>/dev/null || true
    # Signals that Slurm sends to all processes of a step end it.
    sleep 2 || true
  done
done
