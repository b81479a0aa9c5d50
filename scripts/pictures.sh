#!/usr/bin/env bash
# Makes the pictures of README.md anew, into scripts/pictures: `gpupool top` beside two programs on four simulated GPUs, and the page of one's log.
#   scripts/pictures.sh
# Needs the build (cargo build --release --workspace), python3, and for the page a headless Chromium; without one its picture stays as it is, and
# that is said. The dashboard has none: Grafana is in no registry that this uses.
set -euo pipefail
cd "$(dirname "$0")/.."
built=${GPUPOOL_RELEASE:-$PWD/target/release}
for file in gpupool libgpupool.so libsimcuda.so; do
    [ -f "$built/$file" ] || { echo "pictures.sh: $built/$file is missing; cargo build --release --workspace makes it" >&2; exit 1; }
done
tools=$PWD/target/pictures
if ! cmp -s scripts/pictures/requirements.txt "$tools/installed.txt"; then
    python3 -m venv --clear "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check --requirement scripts/pictures/requirements.txt
    cp scripts/pictures/requirements.txt "$tools/installed.txt"
fi
exec "$built/gpupool" sim --gpus 4x32GiB -- "$tools/bin/python" scripts/pictures/take.py "$built/gpupool"
