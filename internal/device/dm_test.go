package device

// Device memory between devices and between processes.

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// deviceMemory takes a buffer and registers all of it in the end's domain; both are
// gone before the end is.
func (e *end) deviceMemory(n uint64) (provider.DM, provider.MR) {
	e.t.Helper()
	dm := must[provider.DM](e.t)(e.dev.AllocDM(provider.DMConfig{Length: n, LogAlign: 3}))
	mr := must[provider.MR](e.t)(e.pd.RegDMMR(dm, 0, n, allRemote|ib.AccessZeroBased))
	e.t.Cleanup(func() { closeAll(e.t, mr, dm) })
	return dm, mr
}

func fromDM(t testing.TB, dm provider.DM, off int64, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := dm.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	return b
}

// What is refused, with the errnos of the man pages; several regions on a buffer.
func TestDeviceMemoryRules(t *testing.T) {
	d, other := openDevice(t, provider.Config{Link: linkLoop, DMSize: 1 << 20}), openDevice(t, provider.Config{Link: linkLoop, DMSize: -1})
	pd, opd := must[provider.PD](t)(d.AllocPD()), must[provider.PD](t)(other.AllocPD())
	if a, b := d.Attr().MaxDMSize, other.Attr().MaxDMSize; a != 1<<20 || b != 0 {
		t.Errorf("MaxDMSize: %d and %d", a, b)
	}
	_, err := other.AllocDM(provider.DMConfig{Length: 1})
	wantErrno(t, "a device without device memory", err, syscall.ENOMEM)
	dm := must[provider.DM](t)(d.AllocDM(provider.DMConfig{Length: 1<<20 - 1}))
	last := must[provider.DM](t)(d.AllocDM(provider.DMConfig{Length: 1}))
	for _, c := range []provider.DMConfig{{Length: 1}, {Length: 1 << 63}} {
		_, err = d.AllocDM(c)
		wantErrno(t, "an empty pool", err, syscall.ENOMEM)
	}
	for _, c := range []provider.DMConfig{{}, {Length: 1, LogAlign: -1}, {Length: 1, LogAlign: 64}, {Length: 1, Class: 9}} {
		_, err = d.AllocDM(c)
		wantErrno(t, fmt.Sprintf("%+v", c), err, syscall.EINVAL)
	}
	const zero = ib.AccessZeroBased
	for _, c := range []struct {
		name   string
		pd     provider.PD
		off, n uint64
		access ib.Access
	}{
		{"not zero-based", pd, 0, 64, allRemote}, {"on demand", pd, 0, 64, zero | ib.AccessOnDemand},
		{"persistent", pd, 0, 64, zero | ib.AccessFlushPersistent}, {"no local write", pd, 0, 64, zero | ib.AccessRemoteWrite},
		{"beyond the end", pd, 1<<20 - 64, 64, zero}, {"another device", opd, 0, 64, zero},
	} {
		_, err := c.pd.RegDMMR(dm, c.off, c.n, c.access)
		wantErrno(t, c.name, err, syscall.EINVAL)
	}
	empty, err := pd.RegDMMR(dm, 0, 0, zero)
	if err != nil || empty.Length() != 0 {
		t.Fatalf("a region of no bytes: %v", err)
	}
	if err := empty.Close(); err != nil {
		t.Error(err)
	}
	var mrs []provider.MR
	for i := range uint64(4) {
		mr := must[provider.MR](t)(pd.RegDMMR(dm, 100*i, 1000, zero|ib.AccessLocalWrite))
		if mr.Addr() != 0 || mr.Length() != 1000 {
			t.Errorf("the region is of %d bytes at %#x", mr.Length(), mr.Addr())
		}
		mrs = append(mrs, mr)
		wantErrno(t, "freed with regions", dm.Close(), syscall.EBUSY)
	}
	bad := ib.AccessLocalWrite
	wantErrno(t, "registered again without zero-based", mrs[0].Rereg(provider.MRChange{Access: &bad}), syscall.EINVAL)
	onDemand := zero | ib.AccessOnDemand
	wantErrno(t, "registered again on demand", mrs[0].Rereg(provider.MRChange{Access: &onDemand}), syscall.EINVAL)
	good := zero
	if err := mrs[0].Rereg(provider.MRChange{Access: &good}); err != nil {
		t.Error(err)
	}
	if err := mrs[1].Rereg(provider.MRChange{Buf: make([]byte, 64)}); err != nil { // leaves the buffer
		t.Error(err)
	}
	closeAll(t, mrs[0], mrs[2], mrs[3], dm, dm, mrs[1])
	wantErrno(t, "closing the device", d.Close(), syscall.EBUSY)
	closeAll(t, last, pd, opd)
}

// A buffer that can be exported counts for the pages that it takes.
func TestDeviceMemoryExportCounts(t *testing.T) {
	page := uint64(os.Getpagesize())
	d := openDevice(t, provider.Config{Link: linkLoop, DMSize: int64(2 * page)})
	var dms []closer
	for range 2 {
		dms = append(dms, must[provider.DM](t)(d.AllocDM(provider.DMConfig{Length: 1, Export: true})))
	}
	for _, export := range []bool{true, false} {
		_, err := d.AllocDM(provider.DMConfig{Length: 1, Export: export})
		wantErrno(t, "an empty pool", err, syscall.ENOMEM)
	}
	closeAll(t, dms...)
	closeAll(t, must[provider.DM](t)(d.AllocDM(provider.DMConfig{Length: 2 * page})))
}

func TestParseSize(t *testing.T) {
	for _, c := range []struct {
		s    string
		want int
		ok   bool
	}{
		{"0", 0, true}, {"77", 77, true}, {"4K", 4 << 10, true}, {"3M", 3 << 20, true}, {"2G", 2 << 30, true},
		{"", 0, false}, {"M", 0, false}, {"-1", 0, false}, {"9999999999999G", 0, false}, {"1T", 0, false}, {"1 M", 0, false},
	} {
		if n, ok := parseSize(c.s); n != c.want || ok != c.ok {
			t.Errorf("%q: %d, %v", c.s, n, ok)
		}
	}
	t.Setenv(dmSizeVar, "3M")
	if d := openDevice(t, provider.Config{Link: linkLoop}); d.Attr().MaxDMSize != 3<<20 {
		t.Errorf("%d bytes", d.Attr().MaxDMSize)
	}
}

const dmChild = "VERBENA_TEST_DM_CHILD"

// One pool serves all processes of a device: what one has the others cannot have,
// and what a killed one had can be had again.
func TestDeviceMemoryOfProcesses(t *testing.T) {
	if at := os.Getenv(dmChild); at != "" {
		holdDeviceMemory(t, netip.MustParseAddr(at))
		return
	}
	const half = 1 << 20
	d := openDevice(t, provider.Config{DMSize: 2 * half, Limits: provider.Limits{MWs: 2}})
	c := startChild(t, dmChild, d.addrs[0].String(), nil)
	c.hear() // it has its share
	_, err := d.AllocDM(provider.DMConfig{Length: half + 1})
	wantErrno(t, "more than the other has left", err, syscall.ENOMEM)
	rest := must[provider.DM](t)(d.AllocDM(provider.DMConfig{Length: half}))
	if b := fromDM(t, rest, 0, half); firstDifference(b, make([]byte, half)) >= 0 {
		t.Error("the other's bytes are in the buffer")
	}
	// Windows are counted in the same way.
	pd := must[provider.PD](t)(d.AllocPD())
	mw := must[provider.MW](t)(pd.AllocMW(ib.MWType1))
	_, err = pd.AllocMW(ib.MWType2)
	wantErrno(t, "one window more than the other has left", err, syscall.ENOMEM)
	must0(t, c.cmd.Process.Kill())
	_ = c.wait() // it was killed
	var again provider.DM
	eventually(t, "what the killed process had is free", func() bool {
		again, err = d.AllocDM(provider.DMConfig{Length: half})
		return err == nil
	})
	last := must[provider.MW](t)(pd.AllocMW(ib.MWType2))
	closeAll(t, rest, again, mw, last, pd)
}

// holdDeviceMemory is the child: it takes half of the pool and a window, and waits to
// be killed.
func holdDeviceMemory(t *testing.T, at netip.Addr) {
	d, err := Open("", &provider.Config{Addrs: []netip.Addr{at}, DMSize: 1 << 40}) // the first process has decided
	if err != nil {
		t.Fatal(err)
	}
	dm := must[provider.DM](t)(d.AllocDM(provider.DMConfig{Length: 1 << 20}))
	b := make([]byte, 1<<20)
	fill(b, 1)
	if _, err := dm.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	must[provider.MW](t)(must[provider.PD](t)(d.AllocPD()).AllocMW(ib.MWType2))
	tellParent("holds its share")
	_, _ = io.Copy(io.Discard, os.Stdin)
}
