#!/usr/bin/env bash
# perftest with CUDA, and UCX, for run.py.
#
#   perftest.sh fetch                     where Go, a network and the headers of libibverbs, librdmacm, libibumad and
#                                         libpci are: fetches the source of Debian's perftest into .bin/perftest, and
#                                         builds it there with our own cuda.h, together with the libraries it needs;
#                                         and copies the installed ucx_perftest, with its libraries and modules
#   perftest.sh build OUT INCLUDE LIBCUDA where the GPU is: builds it into OUT with the CUDA header in INCLUDE, if all
#                                         headers are there; else takes what fetch has built
#
# .bin is ignored by git: nothing of perftest is part of this repository.
set -euo pipefail
cd "$(dirname "$0")/../.."
HOME_OF=$PWD/.bin/perftest
TOOLS=(ib_write_bw ib_read_bw ib_send_bw ib_read_lat ib_send_lat)

# compile SOURCE TARGET HEADER LIBCUDA: perftest's tools, by its own configure.
compile() {
  rm -rf "$2"
  mkdir -p "$2"
  cp -r "$1/." "$2"
  (
    cd "$2"
    # In this order: else make would call the autotools, which need not be there.
    for f in aclocal.m4 configure config.h.in Makefile.in; do touch "$f"; sleep 0.05; done
    # What libcuda itself needs is there when the program runs.
    ./configure -q CUDA_H_PATH="$3/cuda.h" LDFLAGS="-L$4 -Wl,--allow-shlib-undefined"
    make -s -j"$(nproc)" "${TOOLS[@]}"
  )
}

# libraries PROGRAM...: those that another machine may lack. libc and the driver are its own, libibverbs is ours.
libraries() {
  ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | grep -vE '/(libc|libm|libdl|libpthread|librt|libresolv|libcuda|libibverbs|libmlx5|libefa)\.so'
}

fetch() {
  source=$(go run ./interop/cuda/source perftest)
  [ -d bin/lib/gpu ] || { echo "perftest: bin/lib/gpu is missing: make clib" >&2; exit 1; }
  rm -rf "$HOME_OF"
  mkdir -p "$HOME_OF/bin" "$HOME_OF/lib"
  cp -r "$source" "$HOME_OF/source"
  compile "$source" "$HOME_OF/build" "$PWD/clib/gpu/include" "$PWD/bin/lib/gpu"
  for t in "${TOOLS[@]}"; do cp "$HOME_OF/build/$t" "$HOME_OF/bin/"; done
  rm -rf "$HOME_OF/build"
  libraries "${TOOLS[@]/#/$HOME_OF/bin/}" | sort -u | while read -r l; do cp -L "$l" "$HOME_OF/lib/"; done
  if command -v ucx_perftest ucx_info >/dev/null; then ucx; fi
  echo "perftest: $(du -sh "$HOME_OF" | cut -f1) in .bin/perftest"
}

# ucx copies UCX: its modules have to lie in a directory of their own.
ucx() {
  tools=("$(command -v ucx_perftest)" "$(command -v ucx_info)")
  modules=("$(dirname "$(ldd "${tools[0]}" | awk '/libucs.so/ {print $3}')")"/ucx/libu*.so.0)
  mkdir -p "$HOME_OF/ucx/bin" "$HOME_OF/ucx/lib/ucx"
  cp "${tools[@]}" "$HOME_OF/ucx/bin/"
  cp -L "${modules[@]}" "$HOME_OF/ucx/lib/ucx/"
  libraries "${tools[@]}" "${modules[@]}" | sort -u | while read -r l; do cp -L "$l" "$HOME_OF/ucx/lib/"; done
}

build() {
  out=$1 missing=()
  for h in infiniband/verbs.h rdma/rdma_cma.h infiniband/umad.h pci/pci.h; do
    echo "#include <$h>" | gcc -E -x c - >/dev/null 2>&1 || missing+=("$h")
  done
  mkdir -p "$out/lib"
  if [ ${#missing[@]} -eq 0 ] && compile "$HOME_OF/source" "$out/build" "$2" "$3"; then
    for t in "${TOOLS[@]}"; do cp "$out/build/$t" "$out/"; done
    echo "perftest: built here, with $2/cuda.h"
    return
  fi
  echo "perftest: not built here${missing[*]:+, for want of ${missing[*]}}: the programs of .bin/perftest/bin"
  for t in "${TOOLS[@]}"; do cp "$HOME_OF/bin/$t" "$out/"; done
  # Only what this machine lacks: its own libraries fit together.
  for l in "$HOME_OF"/lib/*; do
    ldconfig -p | grep -q "$(basename "$l") " || cp "$l" "$out/lib/"
  done
}

case ${1:-} in
  fetch) fetch ;;
  build) [ $# -eq 4 ] || { echo "usage: perftest.sh build OUT INCLUDE LIBCUDA" >&2; exit 2; }; build "$2" "$3" "$4" ;;
  *) echo "usage: perftest.sh fetch | build OUT INCLUDE LIBCUDA" >&2; exit 2 ;;
esac
