#!/usr/bin/env bash
# Starts workers by real launchers on simulated GPUs, bare and under gpupool, and compares what they say; where memory lay says the log of each.
#   scripts/launchers.sh [NAMES]
# NAMES: mpirun, slurm, ray, dask, torchrun, spawn; what is not installed is told and left out. Of real GPUs the same is asked by `scripts/gpu-check.sh --only launchers`.
#
# What it takes, on Debian 12:
#   mpirun   apt-get install openmpi-bin (4.1.4); root runs it with OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, which is set here
#   slurm    apt-get install slurm-wlm munge (22.05.8), and a cluster of this one host:
#              printf 'ClusterName=one\nSlurmctldHost=%s\nAuthType=auth/munge\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nReturnToService=2\n' "$(hostname -s)" >/etc/slurm/slurm.conf
#              printf 'NodeName=%s CPUs=%s State=UNKNOWN\nPartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8\n' "$(hostname -s)" "$(nproc)" >>/etc/slurm/slurm.conf
#              service munge start; slurmctld; slurmd; sinfo
#   ray      python -m pip install ray            PYTHON names the interpreter that has these (default: python3)
#   dask     python -m pip install dask-cuda cuda-bindings      (it asks NVML for the GPUs, which the simulated one tells)
#   torchrun, spawn                               python -m pip install torch
# Needs a build of everything (cargo build --release --workspace); GPUPOOL_RELEASE names its folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
release=${GPUPOOL_RELEASE:-$root/target/release}
# It is no setting of the library, which refuses what it does not know.
unset GPUPOOL_RELEASE
python=${PYTHON:-python3}
workers=2
mib=768
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

driver=$work/driver
mkdir -p "$driver"
for name in libcuda.so.1 libcuda.so; do ln -s "$release/libsimcuda.so" "$driver/$name"; done
ln -s "$release/libsimnvml.so" "$driver/libnvidia-ml.so.1"
export LD_LIBRARY_PATH=$driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export SIMCUDA_GPUS=${workers}x2GiB SIMCUDA_CONTEXT_MIB=16 PYTHONDONTWRITEBYTECODE=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# What of a worker's memory its GPU may hold: the rest goes to the host, and not to the other worker's GPU.
limit=256MiB
export GPUPOOL_HOST_LIMIT=4GiB GPUPOOL_RESERVE=64MiB GPUPOOL_SOFT_OOM=off GPUPOOL_LOG=info

# command_of NAME FOLDER [GPUPOOL…]: what starts the workers, which meet in that folder. The words of GPUPOOL stand in front of the launcher, and behind those that
# start processes of their own (README, Launchers).
command_of() {
    local name=$1 meeting=$2
    shift 2
    local client=$root/tests/gpu/clients/launched.py
    case $name in
    mpirun) echo mpirun --oversubscribe -np $workers -x LD_LIBRARY_PATH -x SIMCUDA_GPUS -x SIMCUDA_MACHINE -x SIMCUDA_CONTEXT_MIB "$@" "$python" "$client" rank $workers $mib "$meeting" ;;
    slurm) echo srun --overcommit -n $workers "$@" "$python" "$client" rank $workers $mib "$meeting" ;;
    torchrun) echo "$@" "$python" -m torch.distributed.run --nproc_per_node $workers --master_addr 127.0.0.1 "$client" rank $workers $mib "$meeting" ;;
    spawn | ray | dask) echo "$@" "$python" "$client" "$name" $workers $mib "$meeting" ;;
    *) return 1 ;;
    esac
}

is_there() {
    case $1 in
    mpirun) command -v mpirun ;;
    slurm) command -v srun && sinfo -h ;;
    ray) "$python" -c 'import ray' ;;
    dask) "$python" -c 'import dask_cuda, distributed' ;;
    torchrun | spawn) "$python" -c 'import torch' ;;
    *) return 1 ;;
    esac >/dev/null 2>&1
}

failed=0
for name in ${*:-mpirun slurm ray dask torchrun spawn}; do
    if ! is_there "$name"; then
        echo "$name: not there, left out"
        continue
    fi
    # Ray shows each worker its own GPU alone, as its first; a limit of a GPU that a program does not see is an error.
    if [ "$name" = ray ]; then export GPUPOOL_LIMIT=0:$limit; else export GPUPOOL_LIMIT=0:$limit,1:$limit; fi
    for how in bare gpupool; do
        mkdir -p "$work/$name/$how/meeting"
        export SIMCUDA_MACHINE=$work/$name/$how/machine
        wrapper=()
        if [ $how = gpupool ]; then wrapper=("$release/gpupool" run --log "$work/$name/%p.jsonl" --); fi
        # No word of these has a blank in it.
        # shellcheck disable=SC2046
        if ! timeout 300 $(command_of "$name" "$work/$name/$how/meeting" ${wrapper[@]+"${wrapper[@]}"}) 2>"$work/$name/$how/err" | grep ' blocks wrong$' | sort >"$work/$name/$how/said"; then
            echo "$name, $how: failed"
            tail -5 "$work/$name/$how/err"
            failed=1
            continue 2
        fi
    done
    if [ "$(sort -u "$work/$name/bare/said" | wc -l)" != $workers ] || ! diff "$work/$name/bare/said" "$work/$name/gpupool/said"; then
        echo "$name: the workers say something else than bare"
        failed=1
        continue
    fi
    "$python" - "$name" $workers "$work/$name"/*.jsonl <<'END' || failed=1
import json
import sys

name, count, homes = sys.argv[1], int(sys.argv[2]), []
for path in sys.argv[3:]:
    with open(path, encoding="utf-8") as lines:
        log = [json.loads(line) for line in lines]
    contexts = {record["device"]: record["uuid"] for record in log if record["event"] == "context.create"}
    places = [place for record in log if record["event"] == "pool.level" for place in record["places"] if place["held"]]
    held = {place["place"] for place in places}
    if not held:
        continue
    on_gpus = {place for place in held if place.startswith("gpu")}
    if on_gpus != {f"gpu{device}" for device in contexts} or not any(place.startswith("host") for place in held):
        sys.exit(f"{name}: a worker on {sorted(contexts)} had memory on {sorted(held)}")
    homes += contexts.values()
if len(homes) != count or len(set(homes)) != count:
    sys.exit(f"{name}: {count} workers worked on {homes}")
print(f"{name}: {count} workers, the same lines as bare, each on its own GPU and the host")
END
done
exit $failed
