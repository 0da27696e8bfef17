#!/bin/sh
# Builds cudafree.c and its libraries, each of which is in a directory of its own:
#
#   CC=COMPILER sh cudafree.sh OUT
set -e
out=$1
cd "$(dirname "$0")"
flags="-std=gnu11 -Wall -Werror -O1"

# library DIRECTORY SOURCE NAME FLAG...
library() {
  mkdir -p "$out/$1"
  source=$2 to=$out/$1/$3 name=$3
  shift 3
  "${CC:-cc}" $flags -shared -fPIC -Wl,-soname,"$name" -o "$to" "$source" "$@"
}
versions=-Wl,--version-script=cudalib.map
library whole cudalib.c libcuda.so.1 "$versions" -Wl,-Bsymbolic # so is NVIDIA's
library open cudalib.c libcuda.so.1 "$versions"                 # so is that of software GPUs
library lacking cudalib.c libcuda.so.1 "$versions" -Wl,-Bsymbolic -DLACKING
library shim cudalib.c libcuda.so.1 "$versions" -DSHIM
library ears cudaears.c libibverbs.so.1
library next cudanext.c cudanext.so
"${CC:-cc}" $flags -o "$out/linked" cudafree.c "$out/whole/libcuda.so.1" -lpthread
"${CC:-cc}" $flags -DUNLINKED -o "$out/unlinked" cudafree.c -lpthread
