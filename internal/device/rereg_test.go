package device

// Re-registration between devices: only the new keys work, on the new memory.
// (TestRevokedUnderLoad shows what happens to requests that are under way.)

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// oldKey tries a key that must not work any more, on a connection of its own,
// which that ends.
func oldKey(t *testing.T, x *Device, to *end, key uint32, addr uint64) {
	t.Helper()
	a, b := newEnd(t, x, ib.RC, 64), newEnd(t, to.dev, ib.RC, 64)
	own := b.pd
	closeAll(t, b.qp)
	b.qp = must[provider.QP](t)(to.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: b.cq, RecvCQ: b.cq,
		Cap: ib.QPCap{MaxSendWR: 1, MaxRecvWR: 1}}))
	a.connect(b)
	b.connect(a)
	a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 8), RemoteAddr: addr, RKey: key})
	a.status(ib.WCRemAccessErr)
	closeAll(t, b.qp, b.mr, b.cq, own)
	a.close()
}

// A region changes its memory and its rights while its queue pair is connected.
func TestReregBetweenDevices(t *testing.T) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			const size = 10_000
			a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, size, nil)
			fill(a.buf, 1)
			a.post(a.write(b, 0, size))
			a.ok()
			was, key, addr := bytes.Clone(b.buf), b.mr.RKey(), b.mr.Addr()
			other := make([]byte, 2*size)
			if err := b.mr.Rereg(provider.MRChange{Buf: other}); err != nil {
				t.Fatal(err)
			}
			if b.mr.RKey() == key || b.mr.LKey() != b.mr.RKey() || b.mr.Length() != 2*size || b.mr.Access() != allRemote {
				t.Errorf("keys %#x, %#x, %d bytes, %v", b.mr.LKey(), b.mr.RKey(), b.mr.Length(), b.mr.Access())
			}
			fill(a.buf, 2)
			a.post(a.write(b, 0, size))
			a.ok()
			if !bytes.Equal(other[:size], a.buf) || !bytes.Equal(b.buf, was) {
				t.Error("a WRITE with the new key went elsewhere")
			}
			oldKey(t, a.dev, b, key, addr)
			if !bytes.Equal(b.buf, was) {
				t.Error("a WRITE with the old key was done")
			}
			readOnly := ib.AccessRemoteRead
			key = b.mr.RKey()
			if err := b.mr.Rereg(provider.MRChange{Access: &readOnly}); err != nil {
				t.Fatal(err)
			}
			oldKey(t, a.dev, b, key, b.mr.Addr())
			oldKey(t, a.dev, b, b.mr.RKey(), b.mr.Addr()) // the new one, for writing
			a.post(a.read(b, 0, size))
			a.ok()
			if !bytes.Equal(other[:size], a.buf) {
				t.Error("a READ read something else")
			}
			// Memory, domain and rights at once, by address.
			m := mapping(t, 4096)
			pd := must[provider.PD](t)(b.dev.AllocPD())
			zeroBased := allRemote | ib.AccessZeroBased
			if err := b.mr.Rereg(provider.MRChange{Range: &provider.MRRange{Addr: addrOf(m), Length: 4096, IOVA: 99}, PD: pd, Access: &zeroBased}); err != nil {
				t.Fatal(err)
			}
			if b.mr.Addr() != 0 || b.mr.Length() != 4096 || b.mr.Access() != zeroBased {
				t.Errorf("at %#x, %d bytes, %v", b.mr.Addr(), b.mr.Length(), b.mr.Access())
			}
			wantErrno(t, "closing a domain that a region has moved to", pd.Close(), syscall.EBUSY)
			own := allRemote
			if err := b.mr.Rereg(provider.MRChange{PD: b.pd, Access: &own}); err != nil {
				t.Fatal(err)
			}
			if b.mr.Addr() != 99 {
				t.Errorf("no longer zero-based, it begins at %#x", b.mr.Addr())
			}
			closeAll(t, pd)
			a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 100), RemoteAddr: 99, RKey: b.mr.RKey()})
			a.ok()
			if !bytes.Equal(m[:100], a.buf[:100]) {
				t.Error("a WRITE after all that went elsewhere")
			}
		})
	}
}

// A change that cannot be leaves the region as it was, and its memory in use.
func TestReregRefused(t *testing.T) {
	a, b := pair(t, linkLoop, ib.RC, 4096)
	other := openDevice(t, provider.Config{Link: linkLoop})
	elsewhere, closed := must[provider.PD](t)(other.AllocPD()), must[provider.PD](t)(b.dev.AllocPD())
	closeAll(t, closed)
	access := func(a ib.Access) *ib.Access { return &a }
	gone := mapping(t, 4096)
	b.allowWindows()
	w := b.window(ib.MWType2)
	rights := b.mr.Access() | ib.AccessRemote
	if err := b.mr.Rereg(provider.MRChange{Access: &rights}); err != nil {
		t.Fatal(err)
	}
	refused := func(name string, c provider.MRChange, errno syscall.Errno) {
		t.Helper()
		key := b.mr.RKey()
		err := b.mr.Rereg(c)
		var failed *ib.ReregError
		var op *ib.OpError
		if !errors.As(err, &failed) || failed.State != ib.ReregOldValid || !errors.Is(err, errno) || !errors.As(err, &op) || op.Op != "rereg_mr" {
			t.Errorf("%s: %v", name, err)
		}
		if b.mr.RKey() != key {
			t.Errorf("%s: the key has changed", name)
		}
		a.post(a.write(b, 0, 8))
		a.ok()
	}
	refused("no bytes", provider.MRChange{Buf: []byte{}}, syscall.EINVAL)
	refused("remote write alone", provider.MRChange{Access: access(ib.AccessRemoteWrite)}, syscall.EINVAL)
	refused("unknown rights", provider.MRChange{Access: access(1 << 7)}, syscall.EINVAL)
	refused("persistence", provider.MRChange{Access: access(ib.AccessFlushPersistent)}, syscall.EINVAL)
	refused("a domain of another device", provider.MRChange{PD: elsewhere}, syscall.EINVAL)
	refused("a closed domain", provider.MRChange{PD: closed}, syscall.EINVAL)
	refused("memory that is not there", provider.MRChange{Range: &provider.MRRange{Addr: 4096, Length: 4096}}, syscall.EFAULT)
	refused("an address that wraps", provider.MRChange{Range: &provider.MRRange{Addr: addrOf(gone), Length: 4096, IOVA: ^uint64(0) - 100}}, syscall.EINVAL)
	b.bind(w, 0, 8, ib.AccessRemoteRead)
	refused("a window", provider.MRChange{}, syscall.EBUSY)
	closeAll(t, w)
	if err := b.mr.Rereg(provider.MRChange{}); err != nil {
		t.Error(err)
	}
	closeAll(t, b.mr, elsewhere)
	var failed *ib.ReregError
	if err := b.mr.Rereg(provider.MRChange{}); !errors.As(err, &failed) || failed.State != ib.ReregUnusable {
		t.Errorf("a closed region: %v", err)
	}
}

// Locks go with the memory: what is no longer registered is not locked.
func TestReregLocks(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	e := newEnd(t, d, ib.RC, 64)
	defer e.close()
	before := lockedKiB(t)
	first, second := mapping(t, 8192), mapping(t, 8192)
	mr := must[provider.MR](t)(e.pd.RegMRAddr(addrOf(first), 8192, 0, ib.AccessLocalWrite))
	defer func() { closeAll(t, mr) }()
	for _, b := range [][]byte{first, second, first} {
		if err := mr.Rereg(provider.MRChange{Range: &provider.MRRange{Addr: addrOf(b), Length: 8192}}); err != nil {
			t.Fatal(err)
		}
		want := before
		if ok, _ := mr.Locked(); ok { // as far as the limit allows it
			want += 8
		}
		if got := lockedKiB(t); got != want {
			t.Errorf("%d KiB are locked, should be %d", got, want)
		}
	}
	closeAll(t, mr)
	if got := lockedKiB(t); got != before {
		t.Errorf("%d KiB are locked in the end, %d before", got, before)
	}
}

// lockedKiB returns how much memory of this process is locked.
func lockedKiB(t *testing.T) (n int) {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "VmLck:")
	if _, err := fmt.Sscan(rest, &n); err != nil {
		t.Fatal(err)
	}
	return n
}
