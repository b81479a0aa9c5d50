#!/bin/sh
# Builds everything and shows what gpupool does, on this machine's GPUs or on simulated ones.
set -eu
cd "$(dirname "$0")/.."

for tool in cargo cc; do
    command -v "$tool" >/dev/null || { echo "demo.sh: $tool is missing; install it and start again" >&2; exit 1; }
done

cargo build --release --package gpupool --package simcuda --package gpupool-cli
exec "${CARGO_TARGET_DIR:-target}/release/gpupool" demo "$@"
