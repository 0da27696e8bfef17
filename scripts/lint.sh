#!/usr/bin/env bash
# Everything that can be said about the code without running it.
#
#   1. go.mod and go.sum are what the imports need.
#   2. golangci-lint: formatting, errors, comments, and which package may import
#      which (.golangci.yml).
#   3. Long files are named; nobody fails for them.
#
# What golangci-lint cannot express (unsafe, cgo and system calls in their places)
# is a Go test, internal/archtest.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

rc=0
# tidy checks the module in the current directory.
tidy() {
  local diff
  if ! diff=$(go mod tidy -diff 2>&1); then
    head -n 20 <<<"$diff" >&2
    warn "lint: $PWD: go.mod and go.sum are not what the imports need: run go mod tidy"
    return 1
  fi
}
for module in . examples/rconn; do
  (cd "$module" && tidy) || rc=1
  if [ -x "$LINT" ]; then
    (cd "$module" && "$LINT" run ./...) || rc=1
  fi
done

if [ -x "$LINT" ]; then
  : # it has looked at the formatting, too
elif in_ci; then
  warn "lint: golangci-lint is not there; run make setup"
  rc=1
else
  warn "lint: golangci-lint is not there, only gofmt is checked; run make setup"
  unformatted=$(gofmt -l .)
  if [ -n "$unformatted" ]; then
    warn "lint: not formatted:" "$unformatted"
    rc=1
  fi
fi

find . -name '*.go' -not -path './.*' -print0 | xargs -0 wc -l | sort -rn |
  awk '$2 != "total" && $1 > 800 {printf "lint: note: %s has %d lines; does a second thing live there?\n", $2, $1}'
exit $rc
