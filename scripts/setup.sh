#!/usr/bin/env bash
# Brings a machine to the point where everything in the Makefile runs.
#
#   1. Go and a C compiler are checked: without them nothing can be done here.
#   2. Missing commands become a list of Debian packages. Root installs them;
#      anybody else is told the one line to run, and tests go on without.
#   3. Where documentation is not installed, as in small images of containers, the
#      tests of rdma-core are taken out of the package that has them, into .bin.
#   4. The linter is built once for each version, into .bin.
#
# Step 4 runs beside the others. Nothing is done twice: a second run takes no
# time. With CI=true whatever is still missing at the end is a failure.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$ROOT"

# command, or a file → Debian package, and what is lost without it
NEEDS='
ip                              iproute2          tests in two network namespaces
tc                              iproute2          tests over a shaped path
nft                             nftables          tests over a path that drops packets
tshark                          tshark            the check of our packets by a decoder nobody here wrote
iperf3                          iperf3            the comparison with TCP in make bench
ucx_perftest                    ucx-utils         the comparison with UCX in make bench; UCX on the drop-in libibverbs
ps                              procps            tests with several processes
qemu-system-x86_64              qemu-system-x86   tests against the Linux kernel, in a virtual machine; live migration over RDMA
busybox                         busybox-static    tests against the Linux kernel
depmod                          kmod              tests against the Linux kernel
xz                              xz-utils          tests against the Linux kernel
rdma                            iproute2          tests against the Linux kernel
ib_write_bw                     perftest          tests against the Linux kernel
ibv_rc_pingpong                 ibverbs-utils     tests against the Linux kernel
/etc/libibverbs.d/rxe.driver    ibverbs-providers tests against the Linux kernel
/usr/include/infiniband/verbs.h libibverbs-dev    the drop-in libibverbs; tests against the Linux kernel
/usr/include/rdma/rdma_cma.h    librdmacm-dev     tests of the connection manager of the drop-in libibverbs
/usr/include/infiniband/umad.h  libibumad-dev     perftest with CUDA, built from its source, in make check-full
/usr/lib/x86_64-linux-gnu/libpci.so libpci-dev    perftest with CUDA, built from its source, in make check-full
fio                             fio               tests of the connection manager of the drop-in libibverbs, and of NVMe over RDMA
mkfs.ext4                       e2fsprogs         tests of NVMe over RDMA against the Linux kernel
qperf                           qperf             tests of the connection manager of the drop-in libibverbs
fi_pingpong                     libfabric-bin     tests of the connection manager of the drop-in libibverbs
/usr/include/ucp/api/ucp.h      libucx-dev        tests of the connection manager of the drop-in libibverbs
mpirun.openmpi                  openmpi-bin       Open MPI and OpenSHMEM on the drop-in libibverbs
/usr/lib/x86_64-linux-gnu/openmpi/include/mpi.h libopenmpi-dev Open MPI and OpenSHMEM on the drop-in libibverbs
mpiexec.mpich                   mpich             MPICH on the drop-in libibverbs
/usr/include/x86_64-linux-gnu/mpich/mpi.h libmpich-dev MPICH on the drop-in libibverbs
dtest                           dapl2-utils       uDAPL on the drop-in libibverbs
/usr/lib/x86_64-linux-gnu/libdaploscm.so.2 libdapl2 uDAPL on the drop-in libibverbs
rping                           rdmacm-utils      tests of the connection manager of the drop-in libibverbs
/usr/lib/python3/dist-packages/pyverbs/__init__.py python3-pyverbs the tests of rdma-core on the drop-in libibverbs
mariadbd                        mariadb-server-core the test of a database over rconn
setpriv                         util-linux        tests as an ordinary user
tgtd                            tgt               tests of iSER on the drop-in libibverbs
iscsi-test-cu                   libiscsi-bin      tests of iSER on the drop-in libibverbs
/usr/include/iscsi/iscsi.h      libiscsi-dev      tests of iSER on the drop-in libibverbs
iscsiadm                        open-iscsi        tests of iSER against the Linux kernel, in make check-full
qemu-system-aarch64             qemu-system-arm   tests of the drop-in libibverbs on arm64, in a virtual machine
aarch64-linux-gnu-gcc           gcc-aarch64-linux-gnu tests on arm64
/usr/aarch64-linux-gnu/include/stdio.h libc6-dev-arm64-cross tests on arm64
'

check_toolchain() {
  if ! have go; then
    warn "setup: Go is missing: install the version that go.mod names, or a later one"
    exit 1
  fi
  # An older Go either fetches the right one or says which one it wants.
  if ! go list -m >/dev/null; then
    warn "setup: $(go version) cannot build this module"
    exit 1
  fi
  if ! have "$(go env CC)"; then
    warn "setup: a C compiler is missing (the race detector needs one): apt-get install gcc libc6-dev"
    exit 1
  fi
}

# missing_lines prints the lines of NEEDS whose command or file is not there.
missing_lines() {
  local cmd pkg why
  while read -r cmd pkg why; do
    if [ -n "$cmd" ] && ! have "$cmd" && ! [ -f "$cmd" ]; then printf '%-8s %-12s %s\n' "$cmd" "$pkg" "$why"; fi
  done <<<"$NEEDS"
}

install_packages() {
  local lines pkgs log=$LOGS/apt.log
  lines=$(missing_lines)
  [ -n "$lines" ] || return 0
  pkgs=$(awk '{print $2}' <<<"$lines" | sort -u | tr '\n' ' ')
  if [ "$(id -u)" = 0 ] && have apt-get; then
    say "setup: installing $pkgs(log: ${log#"$ROOT"/})"
    # tshark asks whether ordinary users may capture; they need not, here.
    export DEBIAN_FRONTEND=noninteractive
    if have debconf-set-selections; then
      echo 'wireshark-common wireshark-common/install-setuid boolean false' | debconf-set-selections
    fi
    # shellcheck disable=SC2086  # a list of package names
    if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $pkgs; } >"$log" 2>&1 </dev/null; then
      warn "setup: apt-get failed:"
      tail -n 5 "$log" >&2
    fi
    hash -r
    lines=$(missing_lines)
    [ -n "$lines" ] || return 0
  fi
  warn "setup: missing, and what is left out without it:"
  awk '{cmd=$1; $1=$2=""; printf "  %-8s%s\n", cmd, $0}' <<<"$lines" >&2
  warn "  to install, as root:  apt-get install --no-install-recommends $(awk '{print $2}' <<<"$lines" | sort -u | tr '\n' ' ')"
  ! in_ci
}

# unpack_tests sees to it that rdma-core's tests are there: the package has them with
# its documentation.
unpack_tests() {
  local pkg=python3-pyverbs tests=usr/share/doc/rdma-core/tests log=$LOGS/pyverbs.log tmp version
  [ -f "/$tests/run_tests.py" ] && return 0
  [ -f "$BIN/rdma-core-tests/run_tests.py" ] && return 0
  version=$(dpkg-query -W -f '${Version}' $pkg 2>/dev/null) || return 0 # it was said that it is missing
  say "setup: unpacking rdma-core's tests, which the installed $pkg is without"
  tmp=$(mktemp -d "$BIN/tmp.XXXXXX")
  if (cd "$tmp" && download "$pkg=$version" && dpkg-deb -x ./*.deb .) >"$log" 2>&1 && [ -f "$tmp/$tests/run_tests.py" ]; then
    mv "$tmp/$tests" "$BIN/rdma-core-tests"
    rm -rf "$tmp"
    return 0
  fi
  rm -rf "$tmp"
  warn "setup: the tests could not be had from $pkg:"
  tail -n 5 "$log" >&2
  warn "  they are left out"
  ! in_ci
}

# download gets a package into the current directory; the lists of packages may have
# been removed to make an image smaller.
download() {
  apt-get download -qq "$1" || { [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get download -qq "$1"; }
}

install_linter() {
  [ -x "$LINT" ] && return 0
  local log=$LOGS/golangci-lint.log tmp
  say "setup: building golangci-lint $LINT_VERSION, once (two to three minutes)"
  tmp=$(mktemp -d "$BIN/tmp.XXXXXX")
  # The module's checksum is verified against Go's checksum database.
  if GOBIN=$tmp GOFLAGS='' go install -ldflags='-s -w' "$LINT_MODULE@$LINT_VERSION" >"$log" 2>&1; then
    mv "$tmp/golangci-lint" "$LINT"
    rm -rf "$tmp"
    return 0
  fi
  rm -rf "$tmp"
  warn "setup: golangci-lint $LINT_VERSION could not be built:"
  grep -v '^go: downloading' "$log" | tail -n 5 >&2
  warn "  linting is left out until it can be"
  ! in_ci
}

check_toolchain
mkdir -p "$BIN" "$LOGS"
rc=0
install_linter &
linter=$!
install_packages || rc=1
unpack_tests || rc=1
wait "$linter" || rc=1
if [ $rc != 0 ]; then warn "setup: something is missing, and CI=true makes that a failure"; fi
exit $rc
