#!/usr/bin/env bash
# Builds the C library into bin/lib:
#
#   libibverbs.so.1          the C front, clib/front; libmlx5.so.1 and libefa.so.1
#                            are other names of the same file
#   libverbena-backend.so    the Go backend, clib/backend, which the front loads
#   libverbena-files.so      files that a kernel driver would have, and functions that
#                            intercept calls which map over memory, or free memory of
#                            CUDA: clib/files, which "verbena exec" preloads
#   verbena-watcher          clib/watcher, which "verbena exec" leaves beside a program
#   gpu                      libraries with the interfaces of GPUs' drivers, clib/gpu, which
#                            "verbena exec --gpu" shows to programs
#   include/verbena          verbs that the usual header does not have (verbs.h), the
#                            interface of PeerDirect clients (peer_mem.h), and software
#                            GPUs (gpu.h)
#
# GOARCH=arm64 on another processor builds it for arm64, into bin/arm64/lib, with Debian's compiler
# for that (gcc-aarch64-linux-gnu, libc6-dev-arm64-cross) and the host's headers of libibverbs, which
# are the same on all processors.
#
# Files that are newer than their sources are not built again.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

OUT=bin/lib
CFLAGS=()
arch=$(go env GOARCH)
if [ "$arch" != "$(go env GOHOSTARCH)" ]; then
  OUT=bin/$arch/lib
  CFLAGS=(-idirafter /usr/include)
  export CGO_ENABLED=1
  if [ "$arch" = arm64 ]; then
    export CC=${CC:-aarch64-linux-gnu-gcc}
  elif [ -z "${CC:-}" ]; then
    warn "clib: no compiler for $arch: set CC"
    exit 1
  fi
fi
CC=${CC:-$(go env CC)}
if ! have "$CC"; then
  warn "clib: the compiler $CC is missing"
  exit 1
fi
if ! [ -f /usr/include/infiniband/verbs.h ]; then
  warn "clib: infiniband/verbs.h is missing: apt-get install libibverbs-dev"
  exit 1
fi
mkdir -p "$OUT" "$OUT/include/verbena"
exec 9>"$OUT/.lock" # tests of several packages may build it at the same time
if have flock; then flock 9; fi

front=$OUT/libibverbs.so.1
if [ -z "$(find "$front" -newer scripts/clib.sh 2>/dev/null)" ] || [ -n "$(find clib/front clib/include clib/files/*.h -newer "$front")" ]; then
  # nodelete: fork handlers point into it. now: a missing symbol fails at load.
  "$CC" "${CFLAGS[@]}" -std=gnu11 -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -Werror \
    -shared -o "$front.new" clib/front/*.c \
    -Wl,-soname,libibverbs.so.1 -Wl,--version-script=clib/front/libibverbs.map \
    -Wl,-z,nodelete -Wl,-z,now -Wl,--no-undefined -lpthread -ldl
  mv "$front.new" "$front"
fi
files=$OUT/libverbena-files.so
if [ -z "$(find "$files" -newer scripts/clib.sh 2>/dev/null)" ] || [ -n "$(find clib/files internal/sys/notifier_hook.h -newer "$files")" ]; then
  "$CC" "${CFLAGS[@]}" -std=gnu11 -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -Werror \
    -shared -o "$files.new" clib/files/*.c -Wl,-z,now -Wl,--no-undefined -ldl
  mv "$files.new" "$files"
fi
# A librdmacm.so.1 here would hide the distribution's own, which programs are to get.
rm -f "$OUT/librdmacm.so.1" "$OUT/librdmacm.so"
for name in libibverbs.so libmlx5.so.1 libmlx5.so libefa.so.1 libefa.so; do
  ln -sf libibverbs.so.1 "$OUT/$name"
done
# Libraries of GPUs: the source, the name by which programs know it, the name by which they are linked, and another one
# of them that it needs.
mkdir -p "$OUT/gpu"
while read -r source soname link needs; do
  [ -f "clib/gpu/$source.c" ] || continue
  gpu=$OUT/gpu/$soname
  if [ -z "$(find "$gpu" -newer scripts/clib.sh 2>/dev/null)" ] || [ -n "$(find clib/gpu clib/include -newer "$gpu")" ]; then
    "$CC" "${CFLAGS[@]}" -std=gnu11 -O2 -g -fPIC -fvisibility=hidden -Wall -Wextra -Werror \
      -shared -o "$gpu.new" clib/gpu/"$source"*.c -L"$OUT" -L"$OUT/gpu" ${needs:+"$needs"} -libverbs \
      -Wl,-soname,"$soname" -Wl,--version-script="clib/gpu/$source.map" -Wl,-rpath,'$ORIGIN:$ORIGIN/..' \
      -Wl,-z,nodelete -Wl,-z,now -Wl,--no-undefined -lpthread
    mv "$gpu.new" "$gpu"
  fi
  ln -sf "$soname" "$OUT/gpu/$link"
done <<'LIBRARIES'
hsa  libhsa-runtime64.so.1 libhsa-runtime64.so
hip  libamdhip64.so.5      libamdhip64.so -lhsa-runtime64
cuda libcuda.so.1          libcuda.so
LIBRARIES
cp -u clib/include/verbena/*.h "$OUT/include/verbena/"

# The runtime does not preempt threads by SIGURG: in a thread that has just returned to the
# program, system calls would fail with EINTR, which programs without signals do not expect.
#
# The backend moves the descriptors of the runtime's poller out of the program's way, and
# needs two variables of the runtime for that (internal/sys/poller_unsafe.go). It names
# its threads (clib/backend/thread.c). PGO=off builds faster what runs slower.
go build -buildmode=c-shared -tags verbena_backend "-pgo=${PGO:-cmd/verbena/default.pgo}" \
  -ldflags '-X=runtime.godebugDefault=asyncpreemptoff=1 -checklinkname=0 -extldflags=-Wl,--wrap=pthread_create' -o "$OUT/libverbena-backend.so" ./clib/backend
rm -f "$OUT/libverbena-backend.h" # the front has a header of its own
CGO_ENABLED=0 go build -ldflags '-s -w' -o "$OUT/verbena-watcher" ./clib/watcher
