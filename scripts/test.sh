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
step cargo clippy --workspace --all-targets --release -- -D warnings
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

counts=$(mktemp)
said_by_second=$(mktemp)
said_by_miri=$(mktemp)
trap 'rm -f "$counts" "$said_by_second" "$said_by_miri"' EXIT
failures=()
fail() { failures+=("$1"); }
# Tests that start programs wait for these half of the time, so half of all runs beside the other half, parted by their first letter: all of them end sooner than one
# after the other. What the second half says is shown when it has ended. All packages are named in either, since others have other features and would be built again.
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$(getconf _NPROCESSORS_ONLN)}"
tests() { cargo test --release --workspace --no-fail-fast "$@" 2>&1; }
printf '\n== cargo test --release --workspace --lib --bins --test [!a-m]* (beside the next)\n'
tests --lib --bins --test '[!a-m]*' >"$said_by_second" &
second=$!
step tests --test '[a-m]*' | tee "$counts" || fail 'cargo test, the first half'
wait "$second" || fail 'cargo test, the second half'
tee -a "$counts" <"$said_by_second"
step tests --doc | tee -a "$counts" || fail 'cargo test, the examples in the documentation'
# Two builds of their own, which work on one processor each for most of the time, and so side by side.
#
# The pool's locks and clocks and the page's under every interleaving, five models under those with few interruptions: loom
# replaces the atomics.
loom() {
    step env RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/loom" \
        cargo test --release --package gpupool-pool --package gpupool-metrics --lib loom
}
# What needs no driver, under Miri: bytes that came from elsewhere are read, and atomics are shared. Miri has no sockets that
# carry descriptors and no shared mappings; tests of those say so themselves. Only a nightly toolchain has it, and none is
# installed for this alone.
miri() {
    step env MIRIFLAGS=-Zmiri-strict-provenance CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/miri" cargo +nightly miri test \
        --package gpupool-wire --package gpupool-metrics --package gpupool-python
}
under_miri=
if RUSTUP_AUTO_INSTALL=0 cargo +nightly miri setup >/dev/null 2>&1 </dev/null; then
    miri >"$said_by_miri" 2>&1 &
    under_miri=$!
else
    skipped='Miri: skipped, no nightly toolchain has it (rustup toolchain install nightly --component miri,rust-src)'
fi
loom 2>&1 | tee -a "$counts" || fail 'the models under loom'
if [ -n "$under_miri" ]; then
    wait "$under_miri" || fail 'the tests under Miri'
    tee -a "$counts" <"$said_by_miri"
fi

printf '\n== tests\n'
awk '/^ +(Running|Doc-tests)/ { sub(/ \(.*/, ""); sub(/^ +(Running )?/, ""); name = $0 }
     /^test result:/ { print name ": " $0; passed += $4; failed += $6 }
     END { printf "%d passed, %d failed\n", passed, failed }' "$counts"
[ -z "${skipped:-}" ] || echo "$skipped"
# A step may fail without a test that did: by an abort, or because it cannot be built.
for failure in "${failures[@]}"; do
    echo "FAILED: $failure"
done
((${#failures[@]} == 0))
