#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, for tests of job scripts. Needs the package slurm-wlm.
#
#   cluster.sh up DIR           start it; DIR/slurm.conf is for SLURM_CONF
#   cluster.sh down DIR         end it, with all that runs on it
#   cluster.sh cut DIR NODE     the node loses power
#   cluster.sh boot DIR NODE    it starts again
#
# As root each node has a network namespace and a host name of its own, and a cut takes its network away first, so that
# nobody is told of its end. Without root the nodes are daemons on one host, and a cut kills their processes.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

command=${1:?up, down, cut or boot}
lab=$(realpath -m "${2:?a folder}")
nodes=(lab0 lab1)
bridge=magilab
network=198.18.77 # of the range that is reserved for tests
export SLURM_CONF=$lab/slurm.conf

is_root() { [ "$(id -u)" = 0 ]; }
address() { echo "$network.$((10 + ${1#lab}))"; }

up() {
  local tool
  for tool in munged slurmctld slurmd sbatch srun; do
    command -v "$tool" >/dev/null || { echo "$tool is missing: install slurm-wlm (Debian, Ubuntu)" >&2; exit 2; }
  done
  mkdir -p "$lab"/{munge,state,run,log,dev}
  chmod 755 "$lab"
  chmod 711 "$lab/munge"
  (umask 077 && head -c 1024 /dev/urandom >"$lab/munge/key")
  ln -sf /dev/null "$lab/dev/nvidia0" # a GPU to ask for; it is never opened
  if is_root; then up_networks; fi
  write_configuration
  munged --key-file="$lab/munge/key" --socket="$lab/munge/socket" --pid-file="$lab/run/munged.pid" \
    --seed-file="$lab/munge/seed" --log-file="$lab/log/munged.log"
  slurmctld -c
  local node
  for node in "${nodes[@]}"; do boot "$node"; done
  wait_for_nodes
}

up_networks() {
  ip link add "$bridge" type bridge
  ip addr add "$network.1/24" dev "$bridge"
  ip link set "$bridge" up
  # Names come from a file alone: in a namespace no name server answers, and asking one takes seconds.
  { grep -v '^hosts:' /etc/nsswitch.conf; echo "hosts: files"; } >"$lab/nsswitch.conf"
  { echo "127.0.0.1 localhost"; echo "$network.1 $(hostname)"; } >"$lab/hosts"
  local node
  for node in "${nodes[@]}"; do
    echo "$(address "$node") $node" >>"$lab/hosts"
    ip netns add "$node"
    ip link add "$bridge-$node" type veth peer name eth0 netns "$node"
    ip link set "$bridge-$node" master "$bridge" up
    ip -n "$node" link set lo up
    ip -n "$node" addr add "$(address "$node")/24" dev eth0
    ip -n "$node" link set eth0 up
  done
}

write_configuration() {
  local user controller=127.0.0.1 node
  user=$(id -un)
  if is_root; then controller=$network.1; fi
  : >"$lab/plugstack.conf"
  cat >"$lab/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$(hostname)($controller)
SlurmctldPort=16817
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$lab/munge/socket,cred_expire=5
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool-%n
SlurmctldPidFile=$lab/run/slurmctld.pid
SlurmdPidFile=$lab/run/slurmd-%n.pid
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd-%n.log
PlugStackConfig=$lab/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
SlurmdTimeout=15
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,bf_interval=2
CONF
  for node in "${nodes[@]}"; do
    if is_root; then
      echo "NodeName=$node NodeAddr=$(address "$node") Port=16900 CPUs=1 RealMemory=4000 Gres=gpu:1"
    else
      echo "NodeName=$node NodeHostname=localhost Port=$((16900 + ${node#lab})) CPUs=1 RealMemory=4000 Gres=gpu:1"
    fi
  done >>"$lab/slurm.conf"
  cat >>"$lab/slurm.conf" <<CONF
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10
CONF
  echo "NodeName=lab[0-1] Name=gpu File=$lab/dev/nvidia0" >"$lab/gres.conf"
}

boot() {
  mkdir -p "$lab/spool-$1"
  if ! is_root; then
    slurmd -N "$1"
    return
  fi
  ip link set "$bridge-$1" up
  # shellcheck disable=SC2016  # expanded by the shell in the namespace
  nsenter --net="/run/netns/$1" unshare --uts --mount bash -c '
    hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf &&
      exec slurmd -N "$1"' boot "$1" "$lab"
}

wait_for_nodes() {
  local _ ready
  for _ in $(seq 100); do
    ready=$(sinfo --noheader --partition low --states idle --format %D 2>/dev/null || true)
    [ "$ready" != "${#nodes[@]}" ] || return 0
    sleep 0.2
  done
  echo "the cluster does not start, see $lab/log" >&2
  exit 1
}

processes_of() {
  if is_root; then
    ip netns pids "$1" 2>/dev/null || true
    return
  fi
  # The node's daemon, its steps and their tasks: only tasks carry the node's name in their environment.
  cat "$lab/run/slurmd-$1.pid" 2>/dev/null || true
  local folder parent
  for folder in /proc/[0-9]*; do
    if grep -qzx "SLURMD_NODENAME=$1" "$folder/environ" 2>/dev/null &&
      grep -qzx "SLURM_CONF=$SLURM_CONF" "$folder/environ" 2>/dev/null; then
      echo "${folder#/proc/}"
      parent=$(awk '/^PPid/ {print $2}' "$folder/status" 2>/dev/null) || continue
      if grep -q '^slurmstepd' "/proc/$parent/comm" 2>/dev/null; then echo "$parent"; fi
    fi
  done
}

kill_processes() {
  local pids
  mapfile -t pids < <(processes_of "$1" | sort -u)
  if [ "${#pids[@]}" != 0 ]; then kill -KILL "${pids[@]}" 2>/dev/null || true; fi
}

cut_power() {
  if is_root; then ip link set "$bridge-$1" down; fi
  kill_processes "$1"
  rm -f "$lab/run/slurmd-$1.pid"
}

down() {
  local node pid file
  timeout 20 scancel --full --user "$(id -un)" 2>/dev/null || true
  for node in "${nodes[@]}"; do
    kill_processes "$node"
    if is_root; then
      ip netns del "$node" 2>/dev/null || true
      ip link del "$bridge-$node" 2>/dev/null || true
    fi
  done
  if is_root; then ip link del "$bridge" 2>/dev/null || true; fi
  for file in "$lab"/run/slurmctld.pid "$lab"/run/munged.pid; do
    pid=$(cat "$file" 2>/dev/null) || continue
    kill "$pid" 2>/dev/null || true
    timeout 20 tail --pid="$pid" -f /dev/null || kill -KILL "$pid" 2>/dev/null || true
  done
}

case $command in
  up) up ;;
  down) down ;;
  cut) cut_power "${3:?a node}" ;;
  boot) boot "${3:?a node}" ;;
  *) echo "unknown command $command" >&2 && exit 2 ;;
esac
