#!/bin/sh
# Runs a command with an unpacked Debian release as its root directory, in a mount namespace of its own:
#
#   unshare --mount --propagation private sh inroot.sh TREE "DIRECTORY..." COMMAND...
#
# The directories are there under their own names. Nothing is written to the tree.
set -e
tree=$1
dirs=$2
shift 2
root=$(mktemp -d)
mount -t tmpfs none "$root"
for d in usr proc sys dev etc tmp $dirs; do mkdir -p "$root/$d"; done
for d in bin sbin lib lib64; do ln -s "usr/$d" "$root/$d"; done
cp -r "$tree/etc/." "$root/etc"
cp /etc/passwd /etc/group /etc/hosts "$root/etc"
mount --bind "$tree/usr" "$root/usr"
for d in $dirs; do mount --bind "$d" "$root/$d"; done
for d in proc sys dev; do mount --rbind "/$d" "$root/$d"; done
exec chroot "$root" "$@"
