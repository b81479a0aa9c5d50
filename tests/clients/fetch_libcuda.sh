#!/bin/sh
# fetch_libcuda.sh FOLDER: real libcuda builds of three major versions from Debian's archive, as
# FOLDER/VERSION/libcuda.so.1. They answer symbol lookups on any machine, which is all the tests ask of them.
#
# Only apt's own tools are used, with a configuration of their own: the system's sources are neither read nor changed, and
# packages are verified by Debian's keyring. Where that cannot be done, one line says why and the exit code is 3.
set -eu

folder=$(mkdir -p "$1" && cd "$1" && pwd)
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
# 535, 550 and 555 at the time of writing.
suites="bookworm trixie experimental"

skip() {
    echo "no real libcuda: $1"
    exit 3
}

for tool in apt-get dpkg-deb; do
    command -v $tool >/dev/null || skip "$tool is not installed"
done
[ -r $keyring ] || skip "$keyring is missing; install debian-archive-keyring"
[ "$(dpkg --print-architecture)" = amd64 ] || skip "this machine is not amd64"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
for suite in $suites; do
    echo "deb [arch=amd64 signed-by=$keyring] http://deb.debian.org/debian $suite non-free"
done >"$work/sources.list"

apt() {
    apt-get -q -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o Acquire::Languages=none \
        -o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o APT::Sandbox::User= "$@" >"$work/apt.log" 2>&1
}

apt update || skip "the archive cannot be reached: $(grep '^[EW]:' "$work/apt.log" | head -n 1)"
cd "$work"
for suite in $suites; do
    rm -rf ./*.deb unpacked
    apt download "libcuda1/$suite" || skip "libcuda1 of $suite cannot be fetched: $(tail -n 1 "$work/apt.log")"
    dpkg-deb -x libcuda1_*.deb unpacked
    library=$(find unpacked -name 'libcuda.so.*.*' -type f | head -n 1)
    [ -n "$library" ] || skip "libcuda1 of $suite holds no libcuda"
    version=${library##*libcuda.so.}
    mkdir -p "$folder/$version.new"
    cp "$library" "$folder/$version.new/libcuda.so.1"
    rm -rf "${folder:?}/$version"
    mv "$folder/$version.new" "$folder/$version"
done
ls "$folder"
