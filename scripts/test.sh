#!/usr/bin/env bash
# Everything that must hold before a change is kept, cheapest first:
#
#   build     the whole module, with and without cgo, and for arm64; go vet; every test compiled
#   lint      side by side with build (scripts/lint.sh)
#   unit      every package's tests under the race detector, in a random order
#   allocs    what must not allocate, without the race detector, which allocates
#   seeds     the protocol's games with all seeds, without the race detector
#   nocgo     memory on demand in a program without cgo, which the kernel tells nothing
#   interop   several processes, two network namespaces, other people's programs
#
# unit and what follows run alone: tests of time must not share the cores with a
# compiler. Each step keeps its output in .logs; the summary names what failed.
#
#   scripts/test.sh          everything
#   scripts/test.sh full     the long matrices too (VERBENA_FULL=1)
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"
mkdir -p "$BIN" "$LOGS"

STRICT=
if in_ci; then STRICT=-strict; fi
UNIT_TIMEOUT=45m # for each package; a loaded machine is slow, not broken
INTEROP_TIMEOUT=45m
if [ "${1:-}" = full ]; then
  export VERBENA_FULL=1
  UNIT_TIMEOUT=60m
  INTEROP_TIMEOUT=60m
fi

unit_packages() { go list ./... | grep -v /interop; }
# The examples that need modules which nobody who imports ours should have to fetch.
RCONN=examples/rconn
interop_packages() { [ ! -d interop ] || go list ./interop/...; }

step_build() {
  go build -o bin/ ./cmd/...
  go build ./...
  CGO_ENABLED=0 go build ./...
  go vet ./...
  CGO_ENABLED=0 go vet ./...
  CGO_ENABLED=0 GOARCH=arm64 go build ./...
  if [ -n "${VERBENA_FULL:-}" ]; then CGO_ENABLED=0 GOARCH=arm64 go vet ./...; fi
  go vet -C $RCONN ./...
  CGO_ENABLED=0 go build -C $RCONN ./...
  CGO_ENABLED=0 GOARCH=arm64 go build -C $RCONN ./...
  go build -o "$BIN/testsum" ./internal/testsum
  go test -race -c -o /dev/null ./...
}

step_lint() { scripts/lint.sh; }

# summed runs go test with the given arguments and sums up what it says.
summed() { go test -json -count=1 "$@" | "$BIN/testsum" $STRICT; }

step_unit() {
  local rc=0
  # shellcheck disable=SC2046  # a list of packages
  summed -race -shuffle=on -timeout "$UNIT_TIMEOUT" $(unit_packages) || rc=1
  (cd $RCONN && summed -race -shuffle=on -timeout "$UNIT_TIMEOUT" ./...) || rc=1
  return $rc
}

# Without the race detector: the protocol has no goroutines, and many seeds to try.
step_seeds() { summed -timeout "$UNIT_TIMEOUT" -run 'Pair|Arbitrary' ./internal/qp; }

step_allocs() {
  # shellcheck disable=SC2046
  summed -run Alloc -timeout "$UNIT_TIMEOUT" $(unit_packages)
}

# What needs to be told of changes is skipped here, and that is right.
step_nocgo() {
  CI='' CGO_ENABLED=0 STRICT='' summed -timeout "$UNIT_TIMEOUT" \
    -run 'OnDemand(SeesWhatTheCPUSees|Sweep|Huge|BehindEnd|Storm.*|Model|Traffic|Faults.*)$|Prefetch|Paging|Slow|MayBlock|Populate|Means' \
    ./internal/sys ./internal/mem ./internal/device
}

step_interop() {
  local pkgs
  pkgs=$(interop_packages)
  if [ -z "$pkgs" ]; then
    say "no packages under interop"
    return 0
  fi
  # One at a time: each wants the machine to itself.
  # shellcheck disable=SC2086
  summed -p 1 -timeout "$INTEROP_TIMEOUT" $pkgs
}

# begin starts a step in the background, finish waits for it, shows what it said
# and notes how it ended. A step runs in a shell of its own, where set -e holds,
# and in a process group of its own (set -m), so that an interrupt ends all of it.
set -m
declare -A PID STARTED
RESULTS=
FAILED=
begin() {
  STARTED[$1]=$(date +%s%N)
  (set -e; trap "date +%s%N >'$LOGS/$1.end'" EXIT; "step_$1") >"$LOGS/$1.log" 2>&1 &
  PID[$1]=$!
}
finish() {
  local verdict=ok
  if ! wait "${PID[$1]}"; then
    verdict=FAILED
    FAILED="$FAILED $1"
  fi
  say "== $1"
  cat "$LOGS/$1.log"
  RESULTS+=$(printf '%-8s %-7s %6.1f s' "$1" "$verdict" \
    "$(awk -v a="${STARTED[$1]}" -v b="$(cat "$LOGS/$1.end")" 'BEGIN {print (b-a)/1e9}')")$'\n'
}
trap 'for p in "${PID[@]}"; do kill -- "-$p" 2>/dev/null || true; done; exit 130' INT TERM

begin lint
begin build
finish build
finish lint
case $FAILED in
*build*) ;; # there is nothing to run
*)
  for s in unit seeds allocs nocgo interop; do
    begin "$s"
    finish "$s"
  done
  ;;
esac

say "== summary"
printf '%s' "$RESULTS"
if [ -n "$FAILED" ]; then
  say "failed:$FAILED"
  exit 1
fi
say "all passed"
