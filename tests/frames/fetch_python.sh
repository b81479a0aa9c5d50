#!/bin/sh
# Unpacks CPython 3.14 of Debian's unstable suite into DEST, with the libraries it needs beside it: nothing is installed.
# Its C library is newer than this machine's may be, so it is started by its own loader; DEST/python3.14 does that.
# Where that is not possible, says why and leaves no DEST/python3.14; that is no failure.
set -eu
if [ $# -ne 1 ]; then
    echo "usage: $0 DEST" >&2
    exit 2
fi
skip() {
    echo "no CPython 3.14 was fetched: $*" >&2
    exit 0
}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
machine=$(uname -m || echo unknown)
[ "$machine" = x86_64 ] || skip "the packages are for x86_64, this is $machine"
for tool in apt-get dpkg; do
    command -v "$tool" >/dev/null || skip "there is no $tool here"
done
[ -r "$keyring" ] || skip "$keyring is missing, without which the packages cannot be verified"

mkdir -p "$1"
dest=$(cd "$1" && pwd)
[ -x "$dest/python3.14" ] && exit 0
work=$(mktemp -d "$dest/fetch.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/packages" "$work/root"
echo "deb [arch=amd64 signed-by=$keyring] http://deb.debian.org/debian sid main" >"$work/sources.list"
apt() {
    apt-get --quiet --quiet \
        -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work" -o APT::Sandbox::User= \
        -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o Acquire::Languages=none \
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false \
        -o Acquire::Retries=0 -o Acquire::http::Timeout=20 "$@"
}
apt update 2>"$work/errors" || skip "apt-get update failed: $(tail -n 1 "$work/errors")"
# apt-get update calls a server that cannot be reached a warning.
ls "$work"/lists/*Packages* >/dev/null 2>&1 || skip "apt-get update got nothing: $(tail -n 1 "$work/errors")"
(cd "$work/packages" && apt download python3.14-minimal libpython3.14-minimal libpython3.14-stdlib \
    libc6 libexpat1 zlib1g libffi8 libssl3t64) 2>"$work/errors" ||
    skip "apt-get download failed: $(tail -n 1 "$work/errors")"
for package in "$work"/packages/*.deb; do
    dpkg -x "$package" "$work/root"
done
rm -rf "$dest/root"
mv "$work/root" "$dest/root"
cat >"$work/python3.14" <<EOF
#!/bin/sh
PYTHONHOME="$dest/root/usr" exec "$dest/root/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" \\
    --library-path "$dest/root/usr/lib/x86_64-linux-gnu" "$dest/root/usr/bin/python3.14" "\$@"
EOF
chmod +x "$work/python3.14"
"$work/python3.14" -c 'import ctypes, asyncio' 2>"$work/errors" || skip "it does not run: $(tail -n 1 "$work/errors")"
mv "$work/python3.14" "$dest/python3.14"
