#!/usr/bin/env bash
# Runs every fuzz target in the tree, each for FUZZTIME (default 30s). Go fuzzes
# one target at a time, so they are found by name. A failing input is kept by Go
# under testdata/fuzz of its package, where plain `go test` runs it from then on.
# An input that is new is made smaller in a thousand tries at most: Go would spend a
# minute on each, and try no other meanwhile.
#
#   scripts/fuzz.sh            all of them
#   scripts/fuzz.sh FuzzBTH    those whose name contains the word
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

targets=$(grep -rhoE --include='*_test.go' --exclude-dir='.?*' --with-filename '^func Fuzz[A-Za-z0-9_]+' . |
  sed -E 's/:func / /' | sort -u | awk -v word="${1:-}" 'word == "" || index($2, word)')
if [ -z "$targets" ]; then
  warn "fuzz: no target${1:+ whose name contains $1}"
  exit 1
fi

failed=
while read -r file name; do
  dir=$(dirname "$file")
  say "== $name in $dir, ${FUZZTIME:=30s}"
  if ! go test -run '^$' -fuzz "^$name\$" -fuzztime "$FUZZTIME" -fuzzminimizetime 1000x "$dir" </dev/null; then
    failed="$failed $name"
  fi
done <<<"$targets"

if [ -n "$failed" ]; then
  warn "fuzz: failed:$failed"
  exit 1
fi
say "fuzz: $(wc -l <<<"$targets") targets, no failure"
