#!/usr/bin/env bash
# Builds the C library into bin/lib:
#
#   libibverbs.so.1          the C front, clib/front; librdmacm.so.1, libmlx5.so.1
#                            and libefa.so.1 are other names of the same file
#   libverbena-engine.so     the Go engine, clib/engine, which the front loads
#   libverbena-files.so      files that a kernel driver would have, and a look at calls
#                            that map over memory; clib/files, which "verbena exec"
#                            preloads
#   include/verbena/verbs.h  names that the usual header has not
#
# What is newer than its sources is left alone.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

OUT=bin/lib
CC=${CC:-$(go env CC)}
if ! [ -f /usr/include/infiniband/verbs.h ]; then
  warn "clib: infiniband/verbs.h is missing: apt-get install libibverbs-dev"
  exit 1
fi
mkdir -p "$OUT" "$OUT/include/verbena"
exec 9>"$OUT/.lock" # tests of several packages build it, at the same time
if have flock; then flock 9; fi

front=$OUT/libibverbs.so.1
if [ -z "$(find "$front" -newer scripts/clib.sh 2>/dev/null)" ] || [ -n "$(find clib/front -newer "$front")" ]; then
  # nodelete: what fork handlers point to must stay. now: no surprises later.
  "$CC" -std=gnu11 -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -Werror \
    -shared -o "$front.new" clib/front/*.c \
    -Wl,-soname,libibverbs.so.1 -Wl,--version-script=clib/front/libibverbs.map \
    -Wl,-z,nodelete -Wl,-z,now -Wl,--no-undefined -lpthread -ldl
  mv "$front.new" "$front"
fi
files=$OUT/libverbena-files.so
if [ -z "$(find "$files" -newer scripts/clib.sh 2>/dev/null)" ] || [ -n "$(find clib/files internal/sys/notifier_hook.h -newer "$files")" ]; then
  "$CC" -std=gnu11 -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -Werror \
    -shared -o "$files.new" clib/files/*.c -Wl,-z,now -Wl,--no-undefined -ldl
  mv "$files.new" "$files"
fi
for name in libibverbs.so librdmacm.so.1 librdmacm.so libmlx5.so.1 libmlx5.so libefa.so.1 libefa.so; do
  ln -sf libibverbs.so.1 "$OUT/$name"
done
if [ -f clib/include/verbena/verbs.h ]; then cp -u clib/include/verbena/verbs.h "$OUT/include/verbena/"; fi

# The runtime does not interrupt threads (SIGURG) to take turns: one that has just gone
# back to the program would have its system calls fail with EINTR, and programs that know
# of no signals do not expect that.
#
# The engine moves the descriptors of the runtime's poller out of the program's way, and
# needs two variables of the runtime for that (internal/sys/poller_unsafe.go). It names
# its threads (clib/engine/thread.c).
go build -buildmode=c-shared -tags verbena_engine -pgo=cmd/verbena/default.pgo \
  -ldflags '-X=runtime.godebugDefault=asyncpreemptoff=1 -checklinkname=0 -extldflags=-Wl,--wrap=pthread_create' -o "$OUT/libverbena-engine.so" ./clib/engine
rm -f "$OUT/libverbena-engine.h" # the front has a header of its own
