#!/usr/bin/env bash
# Stores a process with its GPU memory by `gpupool checkpoint --process` and CRIU, kills it, and has it back: on the simulated driver, with the real CRIU.
#   scripts/criu.sh
# Needs CRIU 4 in PATH and root. Debian 12 has 3.17, which does not work on kernels of today; from its source: apt-get install libprotobuf-dev libprotobuf-c-dev
# protobuf-c-compiler protobuf-compiler python3-protobuf libnl-3-dev libcap-dev libnet1-dev libaio-dev uuid-dev libbsd-dev pkg-config, then make criu.
# Needs a build of everything (cargo build --release --workspace); GPUPOOL_RELEASE names its folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
release=${GPUPOOL_RELEASE:-$root/target/release}
# It is no setting of the library, which refuses what it does not know.
unset GPUPOOL_RELEASE
command -v criu >/dev/null || { echo "criu is not in PATH; the script's head says how to build it" >&2; exit 2; }
criu check >/dev/null 2>&1 || { echo "criu does not work here (criu check, as root)" >&2; exit 2; }
work=$(mktemp -d)
program=
trap 'if [ -n "$program" ]; then kill -9 "$program" 2>/dev/null || true; fi; rm -rf "$work"' EXIT

mkdir -m 700 "$work/driver" "$work/session"
for name in libcuda.so.1 libcuda.so; do ln -s "$release/libsimcuda.so" "$work/driver/$name"; done
ln -s "$release/libsimnvml.so" "$work/driver/libnvidia-ml.so.1"
export LD_LIBRARY_PATH=$work/driver SIMCUDA_GPUS=2x1GiB SIMCUDA_MACHINE=$work/machine XDG_RUNTIME_DIR=$work/session
cc -std=gnu11 -O1 -o "$work/keeps" "$root/tests/programs/keeps.c" -L"$work/driver" -lcuda
log=$work/rounds store=$work/store
touch "$log"

# more N: waits until the program has made so many rounds more.
more() {
    local from wanted
    from=$(wc -l <"$log" 2>/dev/null || echo 0)
    wanted=$((from + $1))
    for _ in $(seq 600); do
        [ "$(wc -l <"$log" 2>/dev/null || echo 0)" -lt "$wanted" ] || return 0
        sleep 0.05
    done
    echo "the program made no $1 rounds more" >&2
    exit 1
}

cd "$work"
LD_PRELOAD=$release/libgpupool.so GPUPOOL_SUMMARY=off GPUPOOL_LOG=error setsid "$work/keeps" "$log" </dev/null >"$work/said" 2>&1 &
program=$!
more 5
"$release/gpupool" checkpoint --process "$program" "$store"
page=$(ls "$work"/session/gpupool/"$program"-*.page)
"$release/gpupool" resume "$program"
more 5
kill -9 "$program"
wait "$program" 2>/dev/null || true
stored=$(grep -c . "$log")
# What clears up behind processes that are gone removes the page, and this is what the command said is to be done then.
rm -f "$page"
cp -p "$store/process-000001/gpupool.page" "$page"
criu restore --images-dir "$store/process-000001" --shell-job --file-locks --restore-detached >/dev/null 2>"$work/restored" || { tail -3 "$work/restored" >&2; exit 1; }
for _ in $(seq 200); do
    "$release/gpupool" ps | grep -q suspended && break
    sleep 0.05
done
"$release/gpupool" resume "$program"
more 5
kill -9 "$program"
if grep -v ': 0 wrong$' "$log" || [ -s "$work/said" ]; then
    cat "$work/said" >&2
    echo "the program had other bytes, or complained" >&2
    exit 1
fi
echo "stored at round $(sed -n '5s/.*round \([0-9]*\):.*/\1/p' "$log") or later, killed after $stored rounds, brought back by CRIU $(criu --version | sed -n 's/^Version: //p'): all bytes right in all rounds since"
