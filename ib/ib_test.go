package ib

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"reflect"
	"strings"
	"syscall"
	"testing"
)

// A name for every value, no name twice, and the zero value is nobody.
func TestEnumNames(t *testing.T) {
	type enum struct {
		typ         string
		first, last int
		str         func(int) string
		want        map[int]string
	}
	for _, e := range []enum{
		{"QPType", 1, NumQPTypes - 1, func(i int) string { return QPType(i).String() }, map[int]string{1: "RC", 2: "UC", 3: "UD", 4: "XRC_SEND"}},
		{"QPState", 1, int(QPErr), func(i int) string { return QPState(i).String() },
			map[int]string{int(QPReset): "RESET", int(QPRTR): "RTR", int(QPSQE): "SQE", int(QPErr): "ERR"}},
		{"Opcode", 1, NumOpcodes - 1, func(i int) string { return Opcode(i).String() },
			map[int]string{int(OpSend): "SEND", int(OpRDMAWriteImm): "RDMA_WRITE_WITH_IMM", int(OpAtomicFetchAdd): "ATOMIC_FETCH_AND_ADD"}},
		{"WCStatus", 0, int(WCGeneralErr), func(i int) string { return WCStatus(i).String() },
			map[int]string{0: "success", 5: "Work Request Flushed Error", 10: "remote access error",
				12: "transport retry counter exceeded", 13: "RNR retry counter exceeded", 21: "general error"}},
		{"WCOpcode", 1, int(WCSignalFence), func(i int) string { return WCOpcode(i).String() },
			map[int]string{int(WCSend): "SEND", int(WCRecv): "RECV"}},
		{"DMClass", 0, int(DMCoherent), func(i int) string { return DMClass(i).String() }, map[int]string{0: "plain"}},
		{"MWType", 1, int(MWType2), func(i int) string { return MWType(i).String() }, map[int]string{1: "type 1"}},
		{"ReregState", 1, int(ReregUnusable), func(i int) string { return ReregState(i).String() }, nil},
		{"AtomicCap", 1, int(AtomicGlob), func(i int) string { return AtomicCap(i).String() }, map[int]string{int(AtomicHCA): "ATOMIC_HCA"}},
		{"LockMode", 0, int(LockStrict), func(i int) string { return LockMode(i).String() }, map[int]string{0: "auto", 1: "off", 2: "strict"}},
		{"PortState", 1, int(PortActive), func(i int) string { return PortState(i).String() }, map[int]string{int(PortActive): "PORT_ACTIVE"}},
		{"EventType", 1, int(EventDeviceFatal), func(i int) string { return EventType(i).String() },
			map[int]string{int(EventSRQLimitReached): "SRQ limit reached", int(EventQPLastWQEReached): "last WQE reached"}},
	} {
		t.Run(e.typ, func(t *testing.T) {
			seen := map[string]int{}
			for i := e.first; i <= e.last; i++ {
				s := e.str(i)
				if s == "" || strings.Contains(s, "(") {
					t.Errorf("%d has no name: %q", i, s)
				}
				if j, ok := seen[s]; ok {
					t.Errorf("%d and %d are both %q", i, j, s)
				}
				seen[s] = i
			}
			for i, want := range e.want {
				if got := e.str(i); got != want {
					t.Errorf("%d is %q, want %q", i, got, want)
				}
			}
			for _, i := range []int{e.first - 1, e.last + 1, 255} {
				if i < 0 {
					continue
				}
				if got, want := e.str(i), fmt.Sprintf("%s(%d)", e.typ, i); got != want {
					t.Errorf("%d is %q, want %q", i, got, want)
				}
			}
		})
	}
}

// The numbers that C programs, logs and peers know.
func TestNumbers(t *testing.T) {
	for name, c := range map[string]struct{ got, want int }{
		"IBV_ACCESS_LOCAL_WRITE":      {int(AccessLocalWrite), 1},
		"IBV_ACCESS_REMOTE_WRITE":     {int(AccessRemoteWrite), 2},
		"IBV_ACCESS_REMOTE_READ":      {int(AccessRemoteRead), 4},
		"IBV_ACCESS_REMOTE_ATOMIC":    {int(AccessRemoteAtomic), 8},
		"IBV_ACCESS_MW_BIND":          {int(AccessMWBind), 16},
		"IBV_ACCESS_ZERO_BASED":       {int(AccessZeroBased), 32},
		"IBV_ACCESS_ON_DEMAND":        {int(AccessOnDemand), 64},
		"IBV_ACCESS_FLUSH_GLOBAL":     {int(AccessFlushGlobal), 1 << 8},
		"IBV_ACCESS_FLUSH_PERSISTENT": {int(AccessFlushPersistent), 1 << 9},
		"IBV_FLUSH_GLOBAL":            {int(FlushGlobal), 1},
		"IBV_FLUSH_PERSISTENT":        {int(FlushPersistent), 2},
		"IBV_ACCESS_RELAXED_ORDERING": {int(AccessRelaxedOrdering), 1 << 20},
		"IBV_WC_SUCCESS":              {int(WCSuccess), 0},
		"IBV_WC_LOC_PROT_ERR":         {int(WCLocProtErr), 4},
		"IBV_WC_WR_FLUSH_ERR":         {int(WCWRFlushErr), 5},
		"IBV_WC_REM_ACCESS_ERR":       {int(WCRemAccessErr), 10},
		"IBV_WC_RETRY_EXC_ERR":        {int(WCRetryExcErr), 12},
		"IBV_WC_GENERAL_ERR":          {int(WCGeneralErr), 21},
		"IBV_MTU_256":                 {int(MTU256), 1},
		"IBV_MTU_4096":                {int(MTU4096), 5},
		"GRH":                         {GRHLength, 40},
	} {
		if c.got != c.want {
			t.Errorf("%s is %d, want %d", name, c.got, c.want)
		}
	}
	if AccessRemote != AccessRemoteWrite|AccessRemoteRead|AccessRemoteAtomic {
		t.Errorf("AccessRemote is %v", AccessRemote)
	}
}

func TestMTU(t *testing.T) {
	for m, want := range map[MTU]int{0: 0, MTU256: 256, MTU512: 512, MTU1024: 1024, MTU2048: 2048, MTU4096: 4096, 6: 0, 255: 0} {
		if got := m.Bytes(); got != want {
			t.Errorf("MTU %d is %d bytes, want %d", uint8(m), got, want)
		}
		if got := m.String(); got != fmt.Sprint(want) {
			t.Errorf("MTU %d prints %q", uint8(m), got)
		}
	}
}

func TestAccessString(t *testing.T) {
	for _, c := range []struct {
		a    Access
		want string
	}{
		{0, "local-read"},
		{AccessLocalWrite, "local-write"},
		{AccessLocalWrite | AccessRemote, "local-write|remote-write|remote-read|remote-atomic"},
		{AccessRemoteRead | AccessOnDemand | AccessZeroBased, "remote-read|zero-based|on-demand"},
		{1 << 31, "unknown"},
		{AccessLocalWrite | 1<<31, "local-write|unknown"},
	} {
		if got := c.a.String(); got != c.want {
			t.Errorf("%#x prints %q, want %q", uint32(c.a), got, c.want)
		}
	}
	seen := map[string]bool{}
	for _, n := range accessNames {
		if seen[n.name] || n.bit&(n.bit-1) != 0 || n.bit == 0 {
			t.Errorf("%q: name twice, or not one bit: %#x", n.name, uint32(n.bit))
		}
		seen[n.name] = true
	}
}

func TestQPAttrMaskString(t *testing.T) {
	for _, c := range []struct {
		m    QPAttrMask
		want string
	}{
		{0, "none"},
		{QPMaskState, "state"},
		{QPMaskState | QPMaskDestQPN | QPMaskPathMigState, "state, dest_qpn, path_mig_state"},
		{QPMaskQKey | 1<<31, "qkey, bit 31"},
	} {
		if got := c.m.String(); got != c.want {
			t.Errorf("%#x prints %q, want %q", uint32(c.m), got, c.want)
		}
	}
	// Every name stands at its own bit: the table and the constants are two
	// lists that must stay in step.
	for m, want := range map[QPAttrMask]string{
		QPMaskCurState: "cur_state", QPMaskAccess: "access_flags", QPMaskPKeyIndex: "pkey_index", QPMaskPort: "port",
		QPMaskAV: "av", QPMaskPathMTU: "path_mtu", QPMaskTimeout: "timeout", QPMaskRetryCnt: "retry_cnt",
		QPMaskRNRRetry: "rnr_retry", QPMaskRQPSN: "rq_psn", QPMaskMaxRDAtomic: "max_rd_atomic",
		QPMaskMinRNRTimer: "min_rnr_timer", QPMaskSQPSN: "sq_psn", QPMaskMaxDestRDAtomic: "max_dest_rd_atomic",
		QPMaskCap: "cap", QPMaskSQDAsyncNotify: "en_sqd_async_notify", QPMaskAltPath: "alt_path",
	} {
		if got := m.String(); got != want {
			t.Errorf("%#x prints %q, want %q", uint32(m), got, want)
		}
	}
}

func TestGID(t *testing.T) {
	for _, c := range []struct{ addr, gid string }{
		{"127.77.0.1", "::ffff:127.77.0.1"},
		{"192.0.2.7", "::ffff:192.0.2.7"},
		{"2001:db8::7", "2001:db8::7"},
		{"::1", "::1"},
	} {
		a := netip.MustParseAddr(c.addr)
		g := GIDFromAddr(a)
		if g.String() != c.gid {
			t.Errorf("GID of %s prints %q, want %q", c.addr, g, c.gid)
		}
		if g.Addr() != a {
			t.Errorf("GID of %s is address %s", c.addr, g.Addr())
		}
		if g.IsZero() {
			t.Errorf("GID of %s is zero", c.addr)
		}
		b, err := json.Marshal(g)
		if err != nil || string(b) != `"`+c.gid+`"` {
			t.Errorf("GID of %s marshals to %s, %v", c.addr, b, err)
		}
		var back GID
		if err := json.Unmarshal(b, &back); err != nil || back != g {
			t.Errorf("%s unmarshals to %v, %v", b, back, err)
		}
		if err := back.UnmarshalText([]byte(c.addr)); err != nil || back != g {
			t.Errorf("%s unmarshals to %v, %v", c.addr, back, err)
		}
	}
	if zoned := GIDFromAddr(netip.MustParseAddr("fe80::1%lo")); zoned.Addr() != netip.MustParseAddr("fe80::1") {
		t.Errorf("the zone stays: %v", zoned.Addr())
	}
	if !(GID{}).IsZero() {
		t.Error("the zero GID is not zero")
	}
	for _, bad := range []string{"", "verbena0", "1.2.3", "::g", "1.2.3.4/8"} {
		g := GIDFromAddr(netip.MustParseAddr("192.0.2.7"))
		if err := g.UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q is taken for a GID: %v", bad, g)
		} else if g.Addr() != netip.MustParseAddr("192.0.2.7") {
			t.Errorf("%q was refused and changed the GID to %v", bad, g)
		}
	}
}

func TestOpError(t *testing.T) {
	err := error(Errorf("create_qp", syscall.EINVAL, "send CQ %d", 7))
	if got, want := err.Error(), "create_qp: send CQ 7: invalid argument"; got != want {
		t.Errorf("prints %q, want %q", got, want)
	}
	if !errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EBUSY) {
		t.Error("errors.Is does not find the errno")
	}
	var op *OpError
	if !errors.As(fmt.Errorf("outer: %w", err), &op) || op.Op != "create_qp" {
		t.Error("errors.As does not find the OpError")
	}
	if !errors.Is(Errorf("open_device", syscall.EACCES, ""), fs.ErrPermission) {
		t.Error("the errno's own kinship is lost")
	}
	if got, want := (&OpError{Op: "poll_cq", Errno: syscall.EIO}).Error(), "poll_cq: input/output error"; got != want {
		t.Errorf("prints %q, want %q", got, want)
	}
}

func TestWCErr(t *testing.T) {
	wc := WC{ID: 0x10, QPN: 0x1a2, Status: WCSuccess}
	if err := wc.Err(); err != nil {
		t.Errorf("success is %v", err)
	}
	for s := WCLocLenErr; s <= WCGeneralErr; s++ {
		wc.Status = s
		var se *StatusError
		if err := wc.Err(); !errors.As(err, &se) || *se != (StatusError{ID: 0x10, QPN: 0x1a2, Status: s}) {
			t.Errorf("%v gives %v", s, err)
		}
	}
	wc.Status = WCRemAccessErr
	if got, want := wc.Err().Error(), "work request 0x10 on QP 0x0001a2: remote access error"; got != want {
		t.Errorf("prints %q, want %q", got, want)
	}
}

func TestAH(t *testing.T) {
	attr := AHAttr{DGID: GIDFromAddr(netip.MustParseAddr("192.0.2.7")), SGIDIndex: 1, HopLimit: 3}
	impl, closed := new(int), 0
	ah := NewAH(attr, impl, func() error { closed++; return syscall.EBUSY })
	if ah.Attr() != attr || ah.Impl() != any(impl) {
		t.Errorf("the handle has %v, %v", ah.Attr(), ah.Impl())
	}
	if err := ah.Close(); err != syscall.EBUSY || closed != 1 {
		t.Errorf("Close: %v, called %d times", err, closed)
	}
}

// Work requests and completions are copied by the million: their sizes are part
// of the contract, and completions must have nothing for the collector to scan.
func TestSizes(t *testing.T) {
	if s := reflect.TypeFor[SGE]().Size(); s != 16 {
		t.Errorf("an SGE has %d bytes, want those of ibv_sge, 16", s)
	}
	if s := reflect.TypeFor[WC]().Size(); s > 64 {
		t.Errorf("a WC has %d bytes: more than a cache line", s)
	}
	for i := range reflect.TypeFor[WC]().NumField() {
		switch f := reflect.TypeFor[WC]().Field(i); f.Type.Kind() {
		case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		default:
			t.Errorf("WC.%s is a %v", f.Name, f.Type)
		}
	}
}
