package device

// Device memory between devices and between processes.

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strings"
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

// Every operation reaches device memory, as source and as target, on every link.
func TestDeviceMemory(t *testing.T) {
	for _, mode := range allLinks {
		t.Run(mode, func(t *testing.T) {
			const size = 300 << 10
			a, b := connected(t, openFor(t, mode), openFor(t, mode), ib.RC, size, nil)
			src, smr := a.deviceMemory(size)
			dst, dmr := b.deviceMemory(size)
			fill(a.buf, 3)
			if n, err := src.WriteAt(a.buf, 0); n != size || err != nil {
				t.Fatal(n, err)
			}
			local := func(off, n int) []ib.SGE { return []ib.SGE{{Addr: uint64(off), Length: uint32(n), LKey: smr.LKey()}} }
			// Device memory to device memory, staged.
			a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: local(0, size), RKey: dmr.RKey()})
			a.ok()
			if k := firstDifference(fromDM(t, dst, 0, size), a.buf); k >= 0 {
				t.Fatalf("WRITE: byte %d is wrong", k)
			}
			// A receive into it, and a SEND out of it.
			b.recv(ib.RecvWR{ID: 1, SGL: []ib.SGE{{Addr: 100, Length: 5000, LKey: dmr.LKey()}}})
			a.post(ib.SendWR{Op: ib.OpSend, SGL: local(7, 5000)})
			a.ok()
			b.ok()
			if k := firstDifference(fromDM(t, dst, 100, 5000), a.buf[7:5007]); k >= 0 {
				t.Fatalf("SEND: byte %d is wrong", k)
			}
			// READ into it, atomics on it.
			fill(b.buf, 9)
			a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: local(50, 20000), RemoteAddr: b.mr.Addr() + 3, RKey: b.mr.RKey()})
			a.ok()
			if k := firstDifference(fromDM(t, src, 50, 20000), b.buf[3:20003]); k >= 0 {
				t.Fatalf("READ: byte %d is wrong", k)
			}
			var word [8]byte
			if _, err := dst.WriteAt(word[:], 64); err != nil {
				t.Fatal(err)
			}
			for range 3 {
				a.post(ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: local(0, 8), RemoteAddr: 64, RKey: dmr.RKey(), CompareAdd: 5})
				a.ok()
			}
			if got := binary.NativeEndian.Uint64(fromDM(t, dst, 64, 8)); got != 15 {
				t.Errorf("the counter is %d", got)
			}
			a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: local(0, 2), RemoteAddr: size - 1, RKey: dmr.RKey()})
			a.status(ib.WCRemAccessErr)
		})
	}
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
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, "-test.run=^TestDeviceMemoryOfProcesses$", "-test.v")
	cmd.Env = append(os.Environ(), dmChild+"="+d.addrs[0].String())
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = in.Close() })
	lines := bufio.NewScanner(out)
	said := func(what string) bool {
		for lines.Scan() {
			if strings.Contains(lines.Text(), what) {
				return true
			}
		}
		return false
	}
	if !said("HOLDING") {
		t.Fatal("the child has not got its share")
	}
	_, err = d.AllocDM(provider.DMConfig{Length: half + 1})
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
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, out)
	_ = cmd.Wait()
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
	fmt.Println("HOLDING", d.Attr().MaxDMSize)
	_, _ = io.Copy(io.Discard, os.Stdin)
}
