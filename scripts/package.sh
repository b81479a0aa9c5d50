#!/usr/bin/env bash
# Builds what users install, into target/package:
#   scripts/package.sh               wheel, tar archive, deb and rpm, for every Linux on x86-64 with glibc 2.28 or newer, and checksums
#   scripts/package.sh --no-build [FOLDER]
#                                    the same of the build in that folder (target/release), for this machine's glibc
# Two runs on one commit give the same bytes, in whatever folders, where cc and binutils are the same. Needs cargo, cc, python3 and binutils; a
# deb is made where there is dpkg-deb, and an rpm where there is rpmbuild. The first form wants the Rust that is named below, and fetches what
# knows the symbols of an old glibc (zig, pinned) from the Python index.
set -euo pipefail
case "${CARGO_TARGET_DIR:-}" in
    '' | /*) ;;
    *) export CARGO_TARGET_DIR="$PWD/$CARGO_TARGET_DIR" ;;
esac
case "${GPUPOOL_PACKAGE_OUTPUT:-}" in
    '' | /*) ;;
    *) GPUPOOL_PACKAGE_OUTPUT=$PWD/$GPUPOOL_PACKAGE_OUTPUT ;;
esac
cd "$(dirname "$0")/.."
root=$PWD
target=${CARGO_TARGET_DIR:-$root/target}
out=${GPUPOOL_PACKAGE_OUTPUT:-$target/package}
stage=$out/stage
glibc=2.28
# Another compiler makes other bytes of the same sources. (No rust-toolchain.toml: whoever builds for himself may have a newer one.)
rust=1.95.0
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
    found=$("${RUSTC:-rustc}" --version) || found="no rustc"
    [[ "$found" = "rustc $rust "* ]] || {
        echo "package.sh: packages are built by rustc $rust, and here is $found; rustup toolchain install $rust, and start" \
            "again with RUSTUP_TOOLCHAIN=$rust (scripts/package.sh --no-build takes what any other has built)" >&2
        exit 1
    }
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
    flags=(
        # The compiler's own libraries may be linked against a newer glibc than the list has; what they need is this machine's affair.
        -C "link-arg=-B$sysroot/" -C "link-arg=-L$sysroot" -C link-arg=-Wl,--allow-shlib-undefined
        # Paths of this machine are in no file.
        "--remap-path-prefix=$root=gpupool" "--remap-path-prefix=$target=gpupool/target"
        "--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}/registry/src=crates"
    )
    # With a target that is named, build scripts and macros are linked for this machine. RUSTFLAGS would be cut at a space in a path.
    CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f' && echo "${flags[*]}")
    export CARGO_ENCODED_RUSTFLAGS CARGO_INCREMENTAL=0
    cargo build --profile dist --locked --target "$triple" "${packages[@]}"
    built=$target/$triple/dist
    expect=(--expect "manylinux_${glibc/./_}")
fi

for file in "${files[@]}"; do
    [ -f "$built/$file" ] || { echo "package.sh: $built/$file is missing; cargo build --release ${packages[*]} makes it" >&2; exit 1; }
    strip --strip-unneeded -o "$stage/$file" "$built/$file"
done
python3 src/package/notices.py --output "$out/notices"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
rm -f "$out"/gpupool[-_]* "$out/SHA256SUMS"
# The command knows its manual and its words.
share=$stage/share
rm -rf "$share"
"$stage/gpupool" manual --to "$share/man/man1"
for shell in bash-completion/completions/gpupool zsh/site-functions/_gpupool fish/vendor_completions.d/gpupool.fish; do
    mkdir -p "$share/${shell%/*}"
    "$stage/gpupool" completions "${shell%%[-/]*}" >"$share/$shell"
done
python3 src/package/wheel.py --stage "$stage" --notices "$out/notices" --output "$out" "${expect[@]}"

# The same files as a tree under /usr. The Python module is the wheel's: a distribution's Python would need a package of its own for it.
tree=$out/tree
rm -rf "$tree"
install -D -m 755 "$stage/gpupool" "$tree/usr/bin/gpupool"
install -D -m 755 -t "$tree/usr/lib/gpupool" "$stage"/lib*.so "$stage/two_arrays"
install -D -m 644 -t "$tree/usr/include" include/gpupool.h
install -D -m 644 -t "$tree/usr/share/doc/gpupool" LICENSE README.md CHANGELOG.md "$out"/notices/*
install -D -m 644 -t "$tree/usr/share/doc/gpupool/examples" include/examples/* src/package/deploy/*
install -D -m 644 LICENSE "$tree/usr/share/doc/gpupool/copyright"
cp -r "$share" "$tree/usr"
gzip --no-name -9 "$tree/usr/share/man/man1"/*
# Debian and Fedora have their own folders for what zsh completes.
install -D -m 644 "$share/zsh/site-functions/_gpupool" "$tree/usr/share/zsh/vendor-completions/_gpupool"
find "$tree" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

name=gpupool-$version-x86_64-linux
tar --create --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --directory="$tree/usr" \
    --transform="s,^\.,$name," . | gzip --no-name >"$out/$name.tar.gz"
echo "$out/$name.tar.gz"

# What the files need of the C library is in the wheel's name.
needs=$(basename "$out"/*.whl)
needs=${needs#*manylinux_} needs=${needs%_x86_64.whl} needs=${needs/_/.}
summary='memory of every GPU, and then of the host, for unmodified CUDA programs'
if command -v dpkg-deb >/dev/null; then
    # In KiB, and by the files' own sizes: what they take on a disk is another number on each file system.
    size=$(find "$tree" -type f -printf '%s\n' | awk '{ total += $1 } END { print int((total + 1023) / 1024) }')
    mkdir -p "$tree/DEBIAN"
    cat >"$tree/DEBIAN/control" <<CONTROL
Package: gpupool
Version: $version
Architecture: amd64
Maintainer: The gpupool contributors
Section: utils
Priority: optional
Installed-Size: $size
Depends: libc6 (>= $needs), libgcc-s1 | libgcc1
Description: $summary
 "gpupool run -- COMMAND" preloads a library that answers the driver's allocation
 calls from one pool over all GPUs and the host.
CONTROL
    deb=$out/gpupool_${version}_amd64.deb
    dpkg-deb --root-owner-group -Zxz -z1 --build "$tree" "$deb" >/dev/null
    rm -r "$tree/DEBIAN"
    echo "$deb"
fi

if command -v rpmbuild >/dev/null; then
    cat >"$out/gpupool.spec" <<SPEC
Name: gpupool
Version: $version
Release: 1
Summary: ${summary^}
License: MIT OR Apache-2.0
AutoReqProv: no
Requires: libc.so.6(GLIBC_$needs)(64bit)
Requires: libgcc_s.so.1()(64bit)
%description
"gpupool run -- COMMAND" preloads a library that answers the driver's allocation calls from one pool over all GPUs and the host.
%install
cp -a "$tree/." "%{buildroot}"
%files
$(cd "$tree" && find usr -type d -path '*/gpupool*' -printf '%%dir /%p\n' | sort)
$(cd "$tree" && find usr -type f -printf '/%p\n' | sort)
SPEC
    # The files are as they are to be: nothing of rpm's strips, compresses or links them. And nothing of this machine is in the result.
    rpmbuild -bb --quiet --target x86_64 --define "_topdir $out/rpm" --define "_dbpath $out/rpm/db" --define '__os_install_post %{nil}' \
        --define '_build_id_links none' --define '_buildhost localhost' --define 'use_source_date_epoch_as_buildtime 1' \
        --define 'clamp_mtime_to_source_date_epoch 1' --define '_binary_payload w1.xzdio' --define "_rpmdir $out" \
        --define '_rpmfilename %%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm' "$out/gpupool.spec" >"$out/rpm.log" 2>&1 || {
        cat "$out/rpm.log" >&2
        exit 1
    }
    rm -r "$out/rpm" "$out/rpm.log" "$out/gpupool.spec"
    echo "$out/gpupool-$version-1.x86_64.rpm"
fi
(cd "$out" && sha256sum gpupool[-_]*) >"$out/SHA256SUMS"
