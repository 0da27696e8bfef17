package device

// Limits: what a device offers it can give, one more is refused with the errno
// of the verb's man page, and what is given back can be had again.

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// The numbers of objects.
func TestObjectLimits(t *testing.T) {
	const limit = 3
	d := openDevice(t, provider.Config{Link: linkLoop,
		Limits: provider.Limits{QPs: limit, CQs: limit, MRs: limit, PDs: limit, AHs: limit, SRQs: limit}})
	a := d.Attr()
	for name, n := range map[string]int{"MaxQP": a.MaxQP, "MaxCQ": a.MaxCQ, "MaxMR": a.MaxMR, "MaxPD": a.MaxPD, "MaxAH": a.MaxAH, "MaxSRQ": a.MaxSRQ} {
		if n != limit {
			t.Errorf("%s is %d, want %d", name, n, limit)
		}
	}
	pd := must[provider.PD](t)(d.AllocPD())
	cq := must[provider.CQ](t)(d.CreateCQ(1, nil))
	for _, kind := range []struct {
		name string
		made int // already
		make func() (closer, error)
	}{
		{"alloc_pd", 1, func() (closer, error) { return d.AllocPD() }},
		{"create_cq", 1, func() (closer, error) { return d.CreateCQ(1, nil) }},
		{"create_comp_channel", 0, func() (closer, error) { return d.CreateChannel() }},
		{"reg_mr", 0, func() (closer, error) { return pd.RegMR(make([]byte, 1), 0) }},
		{"create_ah", 0, func() (closer, error) { return pd.CreateAH(ib.AHAttr{DGID: d.GIDs()[0]}) }},
		{"create_srq", 0, func() (closer, error) { return pd.CreateSRQ(provider.SRQConfig{MaxWR: 1}) }},
		{"create_qp", 0, func() (closer, error) {
			return pd.CreateQP(provider.QPConfig{Type: ib.UD, SendCQ: cq, RecvCQ: cq})
		}},
	} {
		t.Run(kind.name, func(t *testing.T) {
			for range 3 { // what is closed can be made again
				var made []closer
				for len(made) < limit-kind.made {
					o, err := kind.make()
					if err != nil {
						t.Fatalf("number %d: %v", len(made), err)
					}
					made = append(made, o)
				}
				for range 2 {
					_, err := kind.make()
					wantErrno(t, "one more", err, syscall.ENOMEM)
				}
				closeAll(t, made...)
			}
		})
	}
	closeAll(t, pd, cq)
}

// The sizes of queues, lists and messages.
func TestSizeLimits(t *testing.T) {
	const deep = 8
	d := openDevice(t, provider.Config{Link: linkLoop, Limits: provider.Limits{QPWR: deep, CQE: 2 * deep, SRQWR: deep}})
	a := d.Attr()
	if a.MaxQPWR != deep || a.MaxCQE != 2*deep || a.MaxSRQWR != deep {
		t.Errorf("%+v", a)
	}
	pd := must[provider.PD](t)(d.AllocPD())
	cq := must[provider.CQ](t)(d.CreateCQ(a.MaxCQE, nil))
	ch := must[provider.Channel](t)(d.CreateChannel())
	other := openDevice(t, provider.Config{Link: linkLoop})
	otherCQ := must[provider.CQ](t)(other.CreateCQ(1, nil))
	otherCh := must[provider.Channel](t)(other.CreateChannel())
	defer closeAll(t, otherCQ, otherCh)

	newCQ := func(n int, ch provider.Channel) error {
		cq, err := d.CreateCQ(n, ch)
		if err == nil {
			closeAll(t, cq)
		}
		return err
	}
	newQP := func(change func(c *provider.QPConfig)) error {
		c := provider.QPConfig{Type: ib.RC, SendCQ: cq, RecvCQ: cq, Cap: ib.QPCap{MaxSendWR: a.MaxQPWR, MaxRecvWR: a.MaxQPWR,
			MaxSendSGE: a.MaxSGE, MaxRecvSGE: a.MaxSGE, MaxInlineData: a.MaxInlineData}}
		change(&c)
		qp, err := pd.CreateQP(c)
		if err == nil {
			closeAll(t, qp)
		}
		return err
	}
	newSRQ := func(c provider.SRQConfig) error {
		s, err := pd.CreateSRQ(c)
		if err == nil {
			closeAll(t, s)
		}
		return err
	}
	tests := []struct {
		name string
		want syscall.Errno // 0: it works
		err  error
	}{
		{"cq of the limit", 0, newCQ(a.MaxCQE, ch)},
		{"cq above the limit", syscall.EINVAL, newCQ(a.MaxCQE+1, nil)},
		{"cq of nothing", syscall.EINVAL, newCQ(0, nil)},
		{"cq negative", syscall.EINVAL, newCQ(-1, nil)},
		{"cq on another device's channel", syscall.EINVAL, newCQ(1, otherCh)},
		{"cq resized to the limit", 0, cq.Resize(a.MaxCQE)},
		{"cq resized above the limit", syscall.EINVAL, cq.Resize(a.MaxCQE + 1)},
		{"cq resized to nothing", syscall.EINVAL, cq.Resize(0)},
		{"qp of the limits", 0, newQP(func(*provider.QPConfig) {})},
		{"qp of nothing", 0, newQP(func(c *provider.QPConfig) { c.Cap = ib.QPCap{} })},
		{"send_wr", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxSendWR++ })},
		{"recv_wr", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxRecvWR++ })},
		{"send_sge", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxSendSGE++ })},
		{"recv_sge", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxRecvSGE++ })},
		{"inline", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxInlineData++ })},
		{"send_wr negative", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxSendWR = -1 })},
		{"recv_sge negative", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxRecvSGE = -1 })},
		{"qp of no type", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Type = 0 })},
		{"qp of an unknown type", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Type = 99 })},
		{"qp without a send queue", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.SendCQ = nil })},
		{"qp on another device's queue", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.RecvCQ = otherCQ })},
		{"srq of the limit", 0, newSRQ(provider.SRQConfig{MaxWR: a.MaxSRQWR, MaxSGE: a.MaxSRQSGE, Limit: a.MaxSRQWR})},
		{"srq above the limit", syscall.EINVAL, newSRQ(provider.SRQConfig{MaxWR: a.MaxSRQWR + 1})},
		{"srq of nothing", syscall.EINVAL, newSRQ(provider.SRQConfig{})},
		{"srq sge", syscall.EINVAL, newSRQ(provider.SRQConfig{MaxWR: 1, MaxSGE: a.MaxSRQSGE + 1})},
		{"srq limit", syscall.EINVAL, newSRQ(provider.SRQConfig{MaxWR: 1, Limit: 2})},
		{"srq limit negative", syscall.EINVAL, newSRQ(provider.SRQConfig{MaxWR: 1, Limit: -1})},
	}
	for _, tt := range tests {
		if tt.want != 0 {
			wantErrno(t, tt.name, tt.err, tt.want)
		} else if tt.err != nil {
			t.Errorf("%s: %v", tt.name, tt.err)
		}
	}
	closeAll(t, cq, ch, pd)
}

// Posting beyond what a queue pair was made for: the requests before the bad one
// are posted, the bad one is named.
func TestPostLimits(t *testing.T) {
	a, b := pair(t, linkLoop, ib.RC, 4096)
	small := func() (e *end) {
		e = newEnd(t, a.dev, ib.RC, 4096)
		closeAll(t, e.qp)
		e.qp = must[provider.QP](t)(e.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: e.cq, RecvCQ: e.cq,
			Cap: ib.QPCap{MaxSendWR: 3, MaxRecvWR: 2, MaxSendSGE: 2, MaxRecvSGE: 1, MaxInlineData: 16}}))
		t.Cleanup(e.close)
		return e
	}()
	small.connect(b) // not the other way round: its requests stay outstanding
	ok := ib.SendWR{Op: ib.OpSend}
	three := []ib.SGE{{}, {}, {}}
	for _, tt := range []struct {
		name string
		wrs  []ib.SendWR
		n    int
		want syscall.Errno
	}{
		{"SGEs", []ib.SendWR{{Op: ib.OpSend, SGL: three}}, 0, syscall.EINVAL},
		{"inline", []ib.SendWR{{Op: ib.OpSend, Inline: make([]byte, 17)}}, 0, syscall.EINVAL},
		{"inline and list", []ib.SendWR{{Op: ib.OpSend, Inline: make([]byte, 1), SGL: three[:1]}}, 0, syscall.EINVAL},
		{"inline READ", []ib.SendWR{{Op: ib.OpRDMARead, Inline: make([]byte, 1)}}, 0, syscall.EINVAL},
		{"no opcode", []ib.SendWR{{}}, 0, syscall.EINVAL},
		{"unknown opcode", []ib.SendWR{{Op: 200}}, 0, syscall.EINVAL},
		{"short atomic", []ib.SendWR{{Op: ib.OpAtomicFetchAdd, SGL: small.sge(0, 4)}}, 0, syscall.EINVAL},
		{"message", []ib.SendWR{{Op: ib.OpSend, SGL: []ib.SGE{{Length: 1 << 30}, {Length: 1}}}}, 0, syscall.EINVAL},
		{"second of two", []ib.SendWR{ok, {Op: ib.OpSend, SGL: three}}, 1, syscall.EINVAL},
		{"full", []ib.SendWR{ok, ok, ok}, 2, syscall.ENOMEM},
		{"still full", []ib.SendWR{ok}, 0, syscall.ENOMEM},
	} {
		n, err := small.qp.PostSend(tt.wrs)
		wantErrno(t, tt.name, err, tt.want)
		if n != tt.n {
			t.Errorf("%s: %d requests posted, want %d", tt.name, n, tt.n)
		}
	}
	for _, tt := range []struct {
		name string
		wrs  []ib.RecvWR
		n    int
		want syscall.Errno
	}{
		{"SGEs", []ib.RecvWR{{}, {SGL: three[:2]}}, 1, syscall.EINVAL},
		{"full before the bad one", []ib.RecvWR{{}, {}, {SGL: three[:2]}}, 1, syscall.ENOMEM},
		{"full", []ib.RecvWR{{}}, 0, syscall.ENOMEM},
	} {
		n, err := small.qp.PostRecv(tt.wrs)
		wantErrno(t, tt.name, err, tt.want)
		if n != tt.n {
			t.Errorf("%s: %d receives posted, want %d", tt.name, n, tt.n)
		}
	}
	// At a queue pair that is not ready, and for a type that cannot.
	fresh := newEnd(t, a.dev, ib.UD, 64)
	t.Cleanup(fresh.close)
	_, err := fresh.qp.PostSend([]ib.SendWR{ok})
	wantErrno(t, "PostSend in RESET", err, syscall.EINVAL)
	_, err = fresh.qp.PostRecv([]ib.RecvWR{{}})
	wantErrno(t, "PostRecv in RESET", err, syscall.EINVAL)
	fresh.openDatagrams(1)
	_, err = fresh.qp.PostSend([]ib.SendWR{ok})
	wantErrno(t, "datagram without an address", err, syscall.EINVAL)
	_, err = fresh.qp.PostSend([]ib.SendWR{{Op: ib.OpRDMAWrite}})
	wantErrno(t, "WRITE on UD", err, syscall.EINVAL)
}

// Registration: rights, bounds and what is not memory.
func TestRegistrationLimits(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	pd := must[provider.PD](t)(d.AllocPD())
	buf := make([]byte, 4096)
	reg := func(b []byte, acc ib.Access) error {
		mr, err := pd.RegMR(b, acc)
		if err == nil {
			closeAll(t, mr)
		}
		return err
	}
	raw := func(addr uintptr, n, iova uint64) error {
		mr, err := pd.RegMRAddr(addr, n, iova, 0)
		if err == nil {
			closeAll(t, mr)
		}
		return err
	}
	for _, tt := range []struct {
		name string
		err  error
		want syscall.Errno
	}{
		{"nothing", reg(nil, allRemote), syscall.EINVAL},
		{"remote write without local", reg(buf, ib.AccessRemoteWrite), syscall.EINVAL},
		{"remote atomic without local", reg(buf, ib.AccessRemoteAtomic), syscall.EINVAL},
		{"unknown right", reg(buf, 1<<15), syscall.EINVAL},
		{"on demand, nothing", reg(nil, ib.AccessOnDemand), syscall.EINVAL},
		{"page 1", raw(4096, 4096, 0), syscall.EFAULT},
		{"kernel memory", raw(1<<63, 4096, 0), syscall.EFAULT},
		{"wrapping", raw(^uintptr(0)-10, 4096, 0), syscall.EFAULT},
		{"too long", raw(4096, ^uint64(0), 0), syscall.EFAULT},
	} {
		wantErrno(t, tt.name, tt.err, tt.want)
	}
	closeAll(t, pd)
}

// Addresses that cannot be: of devices and of peers.
func TestAddressLimits(t *testing.T) {
	taken := nextAddr()
	d := openDevice(t, provider.Config{Addrs: []netip.Addr{taken}})
	try := func(cfg provider.Config) error {
		fds := descriptors(t)
		d, err := Open("", &cfg)
		if err == nil {
			closeAll(t, d)
		}
		// The device that is there closes its end of the connection a little later.
		eventually(t, "no descriptor is left open", func() bool { return descriptors(t) == fds })
		return err
	}
	foreign := nextAddr() // where another program has the port
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(foreign, wire.RoCEPort)))
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(t, conn)
	addr := func(s string) provider.Config { return provider.Config{Addrs: []netip.Addr{netip.MustParseAddr(s)}} }
	for _, tt := range []struct {
		name string
		err  error
		want syscall.Errno
	}{
		{"address in use", try(provider.Config{Addrs: []netip.Addr{taken}}), syscall.EADDRINUSE},
		{"address in use, loop", try(provider.Config{Link: linkLoop, Addrs: []netip.Addr{taken}}), syscall.EADDRINUSE},
		{"port in use", try(provider.Config{Addrs: []netip.Addr{foreign}}), syscall.EADDRINUSE},
		{"not of this host", try(addr("192.0.2.1")), syscall.EADDRNOTAVAIL},
		{"unspecified", try(addr("0.0.0.0")), syscall.EINVAL},
		{"multicast", try(addr("224.0.0.1")), syscall.EINVAL},
		{"unknown link", try(provider.Config{Link: "carrier-pigeon"}), syscall.EINVAL},
	} {
		wantErrno(t, tt.name, tt.err, tt.want)
	}
	if _, err := Open("no-such-device", nil); !isErrno(err, syscall.ENODEV) {
		t.Errorf("unknown name: %v", err)
	}
	pd := must[provider.PD](t)(d.AllocPD())
	self := d.GIDs()[0]
	for name, a := range map[string]ib.AHAttr{
		"unset":        {},
		"other family": {DGID: ib.GIDFromAddr(netip.MustParseAddr("::1"))},
		"GID index":    {DGID: self, SGIDIndex: 1},
		"negative":     {DGID: self, SGIDIndex: -1},
		"port":         {DGID: self, PortNum: 2},
	} {
		_, err := pd.CreateAH(a)
		wantErrno(t, name, err, syscall.EINVAL)
	}
	closeAll(t, pd)
}

// What a child process reports of locking memory.
type lockReport struct {
	UID       int
	Strict    string // the error, if any
	StrictNo  int    // its errno
	Auto      string
	AutoLock  bool
	AutoNote  string
	Delivered bool // traffic to the region works
	Small     bool // a small region is locked
}

const lockChild = "VERBENA_TEST_LOCK_CHILD"

// Locking memory is limited for all users but root. A strict device refuses a region
// that cannot be locked; by default the region works all the same, and reports why
// it is not locked.
// A child process tries, as an unprivileged user with a small limit.
func TestMemlockLimit(t *testing.T) {
	if os.Getenv(lockChild) != "" {
		reportLocks(t)
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var as *syscall.SysProcAttr
	if os.Getuid() == 0 {
		exe = copyForAll(t, exe)
		as = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	for _, tt := range []struct {
		name  string
		limit string // in KiB
		errno syscall.Errno
	}{{"small", "256", syscall.ENOMEM}, {"zero", "0", syscall.EPERM}} {
		t.Run(tt.name, func(t *testing.T) {
			// The shell sets the limit, which Go cannot do for a child alone.
			cmd := exec.Command("/bin/sh", "-c", `ulimit -l "$1" && shift && exec "$@"`, "sh", tt.limit,
				exe, "-test.run=^TestMemlockLimit$")
			cmd.Env = append(os.Environ(), lockChild+"=1")
			cmd.Dir, cmd.SysProcAttr = "/", as
			out, err := cmd.CombinedOutput()
			_, line, found := strings.Cut(string(out), "REPORT ")
			if err != nil || !found {
				t.Fatalf("child: %v\n%s", err, out)
			}
			line, _, _ = strings.Cut(line, "\n")
			var r lockReport
			if err := json.Unmarshal([]byte(line), &r); err != nil {
				t.Fatalf("%v: %s", err, line)
			}
			if r.UID == 0 {
				t.Fatal("the child ran as root, for whom there is no limit")
			}
			if r.StrictNo != int(tt.errno) {
				t.Errorf("strict: errno %d (%s), want %v", r.StrictNo, r.Strict, tt.errno)
			}
			if r.Auto != "" || r.AutoLock || !strings.Contains(r.AutoNote, "RLIMIT_MEMLOCK") || !r.Delivered {
				t.Errorf("auto: %+v", r)
			}
			if r.Small != (tt.limit != "0") {
				t.Errorf("a region below the limit is locked: %v", r.Small)
			}
		})
	}
}

// reportLocks is the child of TestMemlockLimit.
func reportLocks(t *testing.T) {
	r := lockReport{UID: os.Getuid()}
	auto := newEnd(t, openDevice(t, provider.Config{Link: linkLoop}), ib.RC, 64)
	t.Cleanup(auto.close)
	big, small := mapping(t, 1<<20), mapping(t, 64<<10)
	if mr, err := auto.pd.RegMR(small, allRemote); err == nil {
		r.Small, _ = mr.Locked()
		closeAll(t, mr)
	}
	mr, err := auto.pd.RegMR(big, allRemote)
	if err != nil {
		r.Auto = err.Error()
	} else {
		r.AutoLock, r.AutoNote = mr.Locked()
		peer := newEnd(t, openDevice(t, provider.Config{Link: linkLoop}), ib.RC, len(big))
		t.Cleanup(peer.close)
		peer.connect(auto)
		auto.connect(peer)
		fill(peer.buf, 5)
		peer.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: peer.sge(0, len(big)), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
		peer.ok()
		r.Delivered = firstDifference(big, peer.buf) < 0
		closeAll(t, mr)
	}

	strict := openDevice(t, provider.Config{Link: linkLoop, Lock: ib.LockStrict})
	pd := must[provider.PD](t)(strict.AllocPD())
	if mr, err := pd.RegMR(big, allRemote); err == nil {
		closeAll(t, mr)
	} else {
		r.Strict = err.Error()
		var errno syscall.Errno
		errors.As(err, &errno)
		r.StrictNo = int(errno)
	}
	closeAll(t, pd)
	line, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println("REPORT " + string(line))
}

// mapping returns memory outside the Go heap.
func mapping(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// copyForAll copies this program to where any user can run it.
func copyForAll(t testing.TB, exe string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "verbena-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "child")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return path
}
