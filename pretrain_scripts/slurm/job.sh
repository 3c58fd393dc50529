# shellcheck shell=bash
# Sourced by the sbatch files of this folder: trains on the job's nodes until training is complete.
#
# Before its time limit (USR1, see --signal) and when it is preempted (TERM) the job saves, requeues itself and later
# resumes. It is also requeued when a node dies, and after any failure if there is a newer checkpoint than at its start.
# A failure without a new checkpoint ends it.
#
# Its arguments are those of pretrain_gpt.py. Variables, all optional:
#   CP               --context-parallel-size; else as the arguments and the configuration say
#   NPROC_PER_NODE   ranks per node; else the number of GPUs that the job has on a node
#   RUN_DIR          folder on a file system that all nodes share: checkpoints, losses; runs/NAME-JOBID if not given
#   PYTHON           interpreter; .venv/bin/python of the folder the job was submitted in if not given
#   CONTAINER        what runs a node's command in a container: srun options such as `--container-image=IMAGE
#                    --container-mounts=...` (Pyxis), or a command such as `apptainer exec --nv IMAGE`. The job's folder
#                    and RUN_DIR must be mounted at the same paths. PYTHON is then the container's, by default `python`
set -euo pipefail

fail() {
  echo "$*" >&2
  exit 2
}

: "${SLURM_JOB_ID:?is not set: submit this file with sbatch}"
cd "$SLURM_SUBMIT_DIR"
[ -f pretrain_scripts/slurm/node.sh ] || fail "submit from the folder that holds pretrain_scripts/, not from $PWD"
refuse() {
  case $1 in
    load) fail "$2: the job resumes from its own checkpoints; to begin with others give --pretrained-checkpoint" ;;
    save) fail "$2: checkpoints are kept in RUN_DIR/checkpoints; set RUN_DIR" ;;
  esac
}

# The job's own options override those of a configuration file, so there they would be ignored.
config=
previous=
for argument in "$@"; do
  case $argument in
    --load | --load=*) refuse load --load ;;
    --save | --save=*) refuse save --save ;;
    --config=*) config=${argument#*=} ;;
  esac
  [ "$previous" != --config ] || config=$argument
  previous=$argument
done
mark=$'\xef\xbb\xbf' # some editors begin a file with it
for name in load save; do
  # A line begins with the name, or has it inside {}.
  ! grep -Eqs "^($mark)?([^#]*[{,])?[[:space:]]*[\"']?${name}[\"']?[[:space:]]*:" "${config:-/dev/null}" ||
    refuse "$name" "$config: $name"
done

# All lines: `read` stops at a NUL byte, and fails where there is none.
read -r -d '' -a container <<<"${CONTAINER:-}" || true
if [ "${#container[@]}" = 0 ]; then
  export PYTHON=${PYTHON:-$PWD/.venv/bin/python}
  command -v "$PYTHON" >/dev/null || fail "PYTHON: there is no interpreter $PYTHON; submit with PYTHON=\$(command -v python)"
else
  export PYTHON=${PYTHON:-python}
fi
export NPROC_PER_NODE=${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
RUN_DIR=$(realpath -m "${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}")
checkpoints=$RUN_DIR/checkpoints
export COMPLETE_FILE=$RUN_DIR/complete
mkdir -p "$checkpoints"
rm -f "$COMPLETE_FILE"

# The first node is the rendezvous host. Each start has its own id, so that ranks of the previous start cannot join.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_address=$(scontrol --oneliner show node "${nodes[0]}" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
export RENDEZVOUS=$head_address:$((10000 + SLURM_JOB_ID % 20000))
export RENDEZVOUS_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

latest() {
  local iteration=
  # The job may be killed, or the disk full, while the file is written.
  { read -r iteration <"$checkpoints/latest_checkpointed_iteration.txt"; } 2>/dev/null || true
  [[ $iteration =~ ^[0-9]+$ ]] || iteration=0
  echo "$iteration"
}

# SLURM_JOB_ID of one job of an array may also name the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

requeue() {
  local state
  # A job that is cancelled, or requeued by Slurm itself, is no longer running. Where squeue fails, requeueing may still work.
  state=$(squeue --noheader --jobs "$job" --format %T) || state=RUNNING
  if [ "$state" != RUNNING ]; then
    echo "job $SLURM_JOB_ID: $1; Slurm is ending it"
    exit 0
  fi
  echo "job $SLURM_JOB_ID: $1; requeued"
  scontrol requeue "$job"
  exit 0
}

# One task on each node, whatever the job's options, and with the variables of this script also after `sbatch --export`.
export SLURM_EXPORT_ENV=ALL
step=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)

nodes_answer() {
  timeout 60 "${step[@]}" --overlap true
}

stopping=
# URG goes to the steps, not to this script; node.sh says why it is this signal.
trap 'stopping="time limit"; scancel --signal=URG "$job" || echo "scancel failed"' USR1
trap 'stopping="ended by Slurm"' TERM

echo "job $SLURM_JOB_ID start ${SLURM_RESTART_COUNT:-0}: nodes $SLURM_JOB_NODELIST, $NPROC_PER_NODE ranks each, from iteration $(latest)"
first=$(latest)
# --wait: nodes whose ranks have ended wait at most this long for others that hang.
"${step[@]}" --kill-on-bad-exit=1 --wait=300 \
  ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$((SLURM_CPUS_PER_TASK * ${SLURM_NTASKS_PER_NODE:-1}))} "${container[@]}" \
  bash pretrain_scripts/slurm/node.sh "$@" ${CP:+--context-parallel-size "$CP"} \
  --save "$checkpoints" --load "$checkpoints" --magi-loss-log "$RUN_DIR/losses.jsonl" &
running=$!
status=0
# A trapped signal interrupts `wait`.
while :; do
  wait "$running" && status=0 || status=$?
  kill -0 "$running" 2>/dev/null || break
done

if [ -f "$COMPLETE_FILE" ]; then
  echo "job $SLURM_JOB_ID: complete at iteration $(latest)"
  exit 0
fi
[ -z "$stopping" ] || requeue "$stopping, last checkpoint at iteration $(latest)"
nodes_answer || requeue "a node does not answer"
[ "$(latest)" -le "$first" ] || requeue "stopped with status $status, last checkpoint at iteration $(latest)"
echo "job $SLURM_JOB_ID: stopped with status $status and no new checkpoint" >&2
# Megatron ends with 0 where it cannot read what it resumes from.
exit $((status == 0 ? 1 : status))
