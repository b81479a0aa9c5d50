#!/usr/bin/env bash
# Every check of the project: format, lints, build, tests. Needs cc, python3 and Rust; the rest it fetches.
set -euo pipefail
# A relative target folder means the caller's, as it does for cargo.
case "${CARGO_TARGET_DIR:-}" in
    '' | /*) ;;
    *) export CARGO_TARGET_DIR="$PWD/$CARGO_TARGET_DIR" ;;
esac
cd "$(dirname "$0")/.."

missing=()
for tool in cc python3 cargo; do
    command -v "$tool" >/dev/null || missing+=("$tool")
done
if ((${#missing[@]})); then
    echo "test.sh: missing: ${missing[*]}; install them and start again" >&2
    exit 1
fi

step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --all --check
# With the tests: what they add to the features of shared dependencies would have half of it built again for them.
step cargo build --release --workspace --lib --bins --tests

# The Python clients. Made anew when the list of packages changes; a half-made one has no mark and is made again.
requirements=tests/clients/requirements.txt
if [ -f "$requirements" ] && ! cmp -s "$requirements" .venv/installed.txt; then
    if step python3 -m venv --clear .venv &&
        step .venv/bin/pip install --quiet --disable-pip-version-check --requirement "$requirements"; then
        cp "$requirements" .venv/installed.txt
    else
        echo "test.sh: the Python packages could not be installed; the tests that need them will fail" >&2
    fi
fi

said=$(mktemp --directory)
trap 'rm -rf "$said"' EXIT
# A line for each step that fails.
touch "$said/failures"

# Tests that start programs wait for these half of the time, so three parts of all run side by side, parted by their first letter: all of them end sooner than one after
# the other. All packages are named in each, since others have other features and would be built again.
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$(getconf _NPROCESSORS_ONLN)}"
part() {
    local name=$1
    shift
    step cargo test --release --workspace --no-fail-fast "$@" 2>&1 || echo "cargo test, the $name part" >>"$said/failures"
    touch "$said/$name.over"
}
# What the tests leave of the processors goes to three things that wait for nothing, one after the other and behind the tests. What they say is shown at the end.
beside() {
    # The lints come once the tests have seen that everything is built, since only one at a time may look at that.
    local begun
    for begun in first second third; do
        until [ -e "$said/$begun.over" ] || grep -qs '^ *Running ' "$said/$begun"; do sleep 1; done
    done
    step nice cargo clippy --workspace --all-targets --release -- -D warnings || echo 'the lints' >>"$said/failures"
    # The pool's locks and clocks and the page's under every interleaving, five models under those with few interruptions: loom
    # replaces the atomics.
    step env RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/loom" \
        nice cargo test --release --package gpupool-pool --package gpupool-metrics --lib loom ||
        echo 'the models under loom' >>"$said/failures"
    # What needs no driver, under Miri: bytes that came from elsewhere are read, and atomics are shared. Miri has no sockets that
    # carry descriptors and no shared mappings; tests of those say so themselves. Only a nightly toolchain has it, and none is
    # installed for this alone.
    if RUSTUP_AUTO_INSTALL=0 cargo +nightly miri setup >/dev/null 2>&1 </dev/null; then
        step env MIRIFLAGS=-Zmiri-strict-provenance CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/miri" nice cargo +nightly miri test \
            --package gpupool-wire --package gpupool-metrics --package gpupool-python || echo 'the tests under Miri' >>"$said/failures"
    else
        echo 'Miri: skipped, no nightly toolchain has it (rustup toolchain install nightly --component miri,rust-src)' >"$said/skipped"
    fi
}
part second --test '[f-o]*' >"$said/second" &
part third --test '[s-z]*' >"$said/third" &
beside >"$said/beside" 2>&1 &
part first --lib --bins --test '[a-ep-r]*' | tee "$said/first"
wait
cat "$said/second" "$said/third" "$said/beside"
step cargo test --release --workspace --no-fail-fast --doc 2>&1 | tee "$said/doc" || echo 'cargo test, the examples in the documentation' >>"$said/failures"

printf '\n== tests\n'
awk '/^ +(Running|Doc-tests)/ { sub(/ \(.*/, ""); sub(/^ +(Running )?/, ""); name = $0 }
     /^test result:/ { if ($4 + $6) print name ": " $0; passed += $4; failed += $6 }
     END { printf "%d passed, %d failed\n", passed, failed }' "$said"/{first,second,third,doc,beside}
cat "$said/skipped" 2>/dev/null || true
# Last of all, since often no more than the end of a log is kept: what each test that failed said, and its name.
awk '/^---- .* stdout ----$/ { print "\n" $0 }
     /^(failures:|test result:)/ { lines = 0 }
     / panicked at / { lines = 8 }
     lines > 0 { print substr($0, 1, 240); lines-- }' "$said"/{first,second,third,doc,beside}
sed -n 's/^test \(.*\) \.\.\. FAILED$/FAILED: \1/p' "$said"/{first,second,third,doc,beside}
# A step may fail without a test that did: by an abort, or because it cannot be built.
sed 's/^/FAILED: /' "$said/failures"
[ ! -s "$said/failures" ]
