#!/usr/bin/env bash
# Checks a built gpupool on this machine's real GPUs and writes a table:
#   scripts/gpu-check.sh [--only NAMES] [--output FOLDER]
# NAMES are checks or sets of them: pool, pinned, allocators, probes, moving, suspend, fleet, launchers, checkpoint, look, diagnosis, costs, whole. All of them take longer than one
# run has; suspend15, images15 and whole15 are what leaves GPUs, in sittings of 9 minutes at most on two GPUs. What 560 seconds (--seconds N) do not suffice for is not run.
# Needs the two files of the build, python3, cc and a driver. What a check needs beyond that (nvcc, CuPy, PyTorch, JAX,
# Numba, RMM, Ray, Dask-CUDA, a second GPU) and does not find is told as "not run". Packages that are not installed may lie in folders of
# their own, made by pip install --target: RMM_SITE names RMM's (librmm-cu13, rapids-logger), NUMBA_SITE one with a NumPy that
# Numba can use, CUDA_CORE_SITE cuda-core's with CUDA_CORE_TESTS for its tests. GPUPOOL_BEFORE names the folder of an earlier
# build, which "before" times beside this one.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

for folder in "${CUDA_HOME:-/usr/local/cuda}/bin" /usr/local/cuda/bin; do
    if [ -x "$folder/nvcc" ] || [ -x "$folder/compute-sanitizer" ]; then PATH=$PATH:$folder; fi
done

release=${GPUPOOL_RELEASE:-$root/target/release}
for file in libgpupool.so gpupool; do
    if [ ! -f "$release/$file" ]; then
        echo "gpu-check.sh: $release/$file is missing; build it with" >&2
        echo "    cargo build --release --package gpupool --package gpupool-cli" >&2
        echo "or set GPUPOOL_RELEASE to the folder that has it" >&2
        exit 2
    fi
done
# A copy from another machine may have lost this.
chmod +x "$release/gpupool" 2>/dev/null || true

exec python3 "$root/tests/gpu/check.py" --release "$release" "$@"
