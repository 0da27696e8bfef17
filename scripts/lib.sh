# Shared by the scripts here: where things are, which versions, how to speak.
# Sourced, never run.

# The one place where the linter's version is written.
LINT_VERSION=v2.14.0
LINT_MODULE=github.com/golangci/golangci-lint/v2/cmd/golangci-lint

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BIN=$ROOT/.bin
LOGS=$ROOT/.logs
LINT=$BIN/golangci-lint-$LINT_VERSION

# ip, tc and nft live where a normal user's PATH does not look.
export PATH=$PATH:/usr/sbin:/sbin

# Version control information is stamped into binaries where git can read it. It
# cannot in an unpacked archive, nor in a checkout that belongs to somebody else;
# there the build would stop.
if ! git -C "$ROOT" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  export GOFLAGS="${GOFLAGS:-} -buildvcs=false"
fi

say() { printf '%s\n' "$*"; }
warn() { printf '%s\n' "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

# in_ci tells whether a missing part is a failure rather than a note.
in_ci() { [ "${CI:-}" = true ] || [ "${CI:-}" = 1 ]; }
