#!/usr/bin/env bash
# Builds what users install, into target/package:
#   scripts/package.sh               the wheel, tar archive, deb and rpm, for every Linux on x86-64 with glibc 2.28 or newer
#   scripts/package.sh --no-build [FOLDER]
#                                    the wheel alone, of the build in that folder (target/release), for this machine and newer ones
# Two runs on one commit give the same bytes. Needs cargo, cc, python3 and binutils; the first form fetches what knows the symbols of an
# old glibc (zig, pinned) from the Python index.
set -euo pipefail
case "${CARGO_TARGET_DIR:-}" in
    '' | /*) ;;
    *) export CARGO_TARGET_DIR="$PWD/$CARGO_TARGET_DIR" ;;
esac
cd "$(dirname "$0")/.."
root=$PWD
target=${CARGO_TARGET_DIR:-$root/target}
out=${GPUPOOL_PACKAGE_OUTPUT:-$target/package}
stage=$out/stage
glibc=2.28
triple=x86_64-unknown-linux-gnu
packages=(--package gpupool --package gpupool-cli --package simcuda --package simnvml)
files=(gpupool libgpupool.so libsimcuda.so libsimnvml.so)

for tool in cargo cc python3 strip objdump; do
    command -v "$tool" >/dev/null || { echo "package.sh: $tool is missing; install it and start again" >&2; exit 1; }
done

# The commit says which build it is and gives every file its time. Outside of a checkout (an archive of the sources) nobody knows.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
export LC_ALL=C TZ=UTC
umask 022
mkdir -p "$stage"

if [ "${1:-}" = --no-build ]; then
    built=${2:-$target/release}
    cc -O2 -o "$stage/two_arrays" src/cli/demo/two_arrays.c -ldl
    expect=()
else
    # Whoever sees the build's name should find its sources.
    if commit=$(git rev-parse --short=12 HEAD 2>/dev/null); then
        [ -z "$(git status --porcelain --untracked-files=no)" ] || commit=$commit+changes
        export GPUPOOL_BUILD="$commit, $(date -u -d "@$SOURCE_DATE_EPOCH" +%F)"
    fi
    tools=$out/tools
    if ! cmp -s src/package/requirements.txt "$tools/installed.txt"; then
        python3 -m venv --clear "$tools"
        "$tools/bin/pip" install --quiet --disable-pip-version-check --requirement src/package/requirements.txt
        cp src/package/requirements.txt "$tools/installed.txt"
    fi
    # zig has a list of the symbols of each glibc, and makes libraries of it that can be linked against. It is not the linker: it knows not
    # all that build.rs asks of one, and would link an unwinder of its own into each library, while an unwinding that the C library
    # begins (a cancelled thread) goes through frames of ours with the system's.
    sysroot=$out/sysroot
    rm -rf "$sysroot"
    mkdir -p "$sysroot"
    ZIG_GLOBAL_CACHE_DIR=$sysroot/cache "$tools/bin/python" -m ziglang cc -target "x86_64-linux-gnu.$glibc" -fPIE -pie -O2 -s \
        -o "$stage/two_arrays" src/cli/demo/two_arrays.c -ldl -lpthread -lm -lrt -lutil
    find "$sysroot/cache/o" \( -name 'lib*.so.*' -o -name '*crt1.o' -o -name libc_nonshared.a \) -exec cp {} "$sysroot" \;
    for library in dl.so.2 pthread.so.0 m.so.6 rt.so.1 util.so.1; do ln -s "lib$library" "$sysroot/lib${library%.*}"; done
    echo 'GROUP ( libc.so.6 libc_nonshared.a AS_NEEDED ( libld.so.2 ) )' >"$sysroot/libc.so"
    # The compiler's own libraries may be linked against a newer glibc than the list has; what they need is this machine's affair.
    RUSTFLAGS="-C link-arg=-B$sysroot/ -C link-arg=-L$sysroot -C link-arg=-Wl,--allow-shlib-undefined"
    # Paths of this machine are in no file.
    RUSTFLAGS+=" --remap-path-prefix=$root=gpupool --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}/registry/src=crates"
    # With a target that is named, build scripts and macros are linked for this machine.
    export RUSTFLAGS CARGO_INCREMENTAL=0
    cargo build --profile dist --locked --target "$triple" "${packages[@]}"
    built=$target/$triple/dist
    expect=(--expect "manylinux_${glibc/./_}")
fi

for file in "${files[@]}"; do
    [ -f "$built/$file" ] || { echo "package.sh: $built/$file is missing; cargo build --release ${packages[*]} makes it" >&2; exit 1; }
    strip --strip-unneeded -o "$stage/$file" "$built/$file"
done
python3 src/package/notices.py --output "$out/notices"
python3 src/package/wheel.py --stage "$stage" --notices "$out/notices" --output "$out" "${expect[@]}"
