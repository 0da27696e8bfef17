package tools

// A perftest test, top-down: Perftest checks its configuration (options),
// negotiates over TCP (negotiate), makes buffers and queue pairs (newBench,
// bench.go), exchanges keys and connects (meet), runs the test (run, run.go), and
// ends the exchange (leave). The order of the messages is that of the programs.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// PerftestTest is one of the programs of perftest.
type PerftestTest uint8

const (
	WriteBW   PerftestTest = iota + 1 // ib_write_bw
	WriteLat                          // ib_write_lat
	ReadBW                            // ib_read_bw
	ReadLat                           // ib_read_lat
	SendBW                            // ib_send_bw
	SendLat                           // ib_send_lat
	AtomicBW                          // ib_atomic_bw
	AtomicLat                         // ib_atomic_lat
)

// verb is what a test does.
type verb uint8

const (
	verbWrite verb = iota + 1
	verbRead
	verbSend
	verbAtomic
)

var perftests = [...]struct {
	name  string
	verb  verb
	lat   bool // one message at a time
	size  int  // the defaults
	iters int
	tx    int
}{
	WriteBW:   {"ib_write_bw", verbWrite, false, 65536, 5000, 128},
	WriteLat:  {"ib_write_lat", verbWrite, true, 2, 1000, 1},
	ReadBW:    {"ib_read_bw", verbRead, false, 65536, 1000, 128},
	ReadLat:   {"ib_read_lat", verbRead, true, 2, 1000, 1},
	SendBW:    {"ib_send_bw", verbSend, false, 65536, 1000, 128},
	SendLat:   {"ib_send_lat", verbSend, true, 2, 1000, 1},
	AtomicBW:  {"ib_atomic_bw", verbAtomic, false, 8, 1000, 128},
	AtomicLat: {"ib_atomic_lat", verbAtomic, true, 8, 1000, 1},
}

// String returns the program's name.
func (t PerftestTest) String() string {
	if t.known() {
		return perftests[t].name
	}
	return fmt.Sprintf("PerftestTest(%d)", uint8(t))
}

func (t PerftestTest) known() bool { return t > 0 && int(t) < len(perftests) }

// PerftestConfig configures a test. Fields for which the program has an option must have the
// same value there.
type PerftestConfig struct {
	Peer
	Test PerftestTest

	Type   verbs.QPType // -c. Zero: RC
	Size   int          // -s, bytes of a message; 8 for atomics. Zero: 65536; latency: 2
	Iters  int          // -n, messages of each queue pair, at least 5. Zero: 1000; ib_write_bw: 5000
	QPs    int          // -q, bandwidth tests only. Zero: 1
	MTU    verbs.MTU    // -m. Zero: the device's; the smaller one of both sides is used
	Duplex bool         // -b: both sides initiate. Bandwidth tests only
	CAS    bool         // -A CMP_AND_SWAP of the atomics. False: FETCH_AND_ADD
	Imm    bool         // --write_with_imm of the WRITE tests, which newer programs have

	TxDepth  int    // -t, requests under way for each queue pair. Zero: 128; latency: 1
	RxDepth  int    // -r, receives posted for each queue pair. Zero: up to 512; UC and UD: up to 16000
	OutReads int    // -o, READs and atomics under way for each queue pair. Zero: what the device can do
	GIDIndex int    // of the device's GIDs, which one to use
	PSN      uint32 // the first PSN of the first queue pair, 24 bits. Zero: random
	Timeout  uint8  // -u, acknowledgement timeout, as a code. Zero: 14

	// Gap is a pause before each request of a bandwidth test, since UC and UD do not
	// slow a sender down. Zero: none.
	Gap time.Duration

	// NoVerify leaves contents unchecked: for a program with another C library or
	// clock. Lengths, counts and UD headers are checked all the same.
	NoVerify bool
}

// options returns the configuration with its defaults filled in.
func (c PerftestConfig) options() (PerftestConfig, error) {
	if err := c.check(); err != nil {
		return c, err
	}
	if !c.Test.known() {
		return c, fmt.Errorf("%v: no such test", c.Test)
	}
	t, rx := &perftests[c.Test], c.RxDepth
	if c.Type == 0 {
		c.Type = verbs.RC
	}
	setDefault(&c.Size, t.size)
	setDefault(&c.Iters, t.iters)
	setDefault(&c.QPs, 1)
	setDefault(&c.TxDepth, t.tx)
	c.TxDepth = min(c.TxDepth, c.Iters)
	setDefault(&c.RxDepth, 512)
	if rx == 0 && (c.Type == verbs.UC || c.Type == verbs.UD) {
		c.RxDepth = 16000 // a message that finds no receive is lost
	}
	c.RxDepth = min(c.RxDepth, c.Iters)
	setDefault(&c.PSN, 1+rand.Uint32N(maxPSN))
	if err := c.supported(); err != nil {
		return c, fmt.Errorf("%v: %w", c.Test, err)
	}
	switch {
	case c.Size < 1 || c.Iters < 1 || c.QPs < 1 || c.TxDepth < 1 || c.RxDepth < 1 || c.OutReads < 0 || c.Gap < 0:
		return c, errors.New("sizes, depths and numbers cannot be negative")
	case c.PSN > maxPSN:
		return c, fmt.Errorf("PSN %#x has more than 24 bits", c.PSN)
	case c.MTU != 0 && c.MTU.Bytes() == 0:
		return c, fmt.Errorf("MTU(%d): no such MTU", uint8(c.MTU))
	case c.Size > maxMemory/4/c.QPs:
		return c, fmt.Errorf("buffers of %d bytes for %d queue pairs do not fit the memory this package allows itself", c.Size, c.QPs)
	}
	return c, nil
}

// minIters is the smallest number that the programs accept.
const minIters = 5

// supported refuses what the programs do not support.
func (c *PerftestConfig) supported() error {
	t := &perftests[c.Test]
	switch {
	case c.Type == verbs.UC && t.verb != verbWrite && t.verb != verbSend,
		c.Type == verbs.UD && t.verb != verbSend,
		c.Type != verbs.RC && c.Type != verbs.UC && c.Type != verbs.UD:
		return fmt.Errorf("over %v: %w", c.Type, ErrUnsupported)
	case 0 <= c.Iters && c.Iters < minIters:
		return fmt.Errorf("%d iterations: %w, %d is the least", c.Iters, ErrUnsupported, minIters)
	case t.verb == verbAtomic && c.Size != 8:
		return fmt.Errorf("%d bytes: %w", c.Size, ErrUnsupported)
	case t.lat && c.QPs > 1:
		return fmt.Errorf("%d queue pairs: %w", c.QPs, ErrUnsupported)
	case t.lat && c.Duplex:
		return fmt.Errorf("in both directions: %w", ErrUnsupported)
	case c.Imm && t.verb != verbWrite:
		return fmt.Errorf("with immediate data: %w", ErrUnsupported)
	case c.CAS && t.verb != verbAtomic:
		return fmt.Errorf("compare-and-swap: %w", ErrUnsupported)
	}
	return nil
}

// Perftest plays one side of a perftest program.
func Perftest(ctx context.Context, dev *verbs.Device, cfg PerftestConfig) (res Result, err error) {
	cfg, err = cfg.options()
	if err != nil {
		return res, err
	}
	res = Result{Program: cfg.Test.String(), Role: cfg.Role}
	c, err := cfg.open(ctx)
	if err != nil {
		return res, fmt.Errorf("%v: %w", cfg.Test, err)
	}
	defer c.close()
	x := &exchange{conn: c, role: cfg.Role, connected: time.Now()}
	terms, err := x.negotiate(dev, &cfg, &res)
	if err != nil {
		return res, fmt.Errorf("%v: negotiation: %w", cfg.Test, err)
	}
	b, err := newBench(dev, cfg, terms, &res)
	if err != nil {
		return res, fmt.Errorf("%v: %w", cfg.Test, err)
	}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.meet(x); err != nil {
		return res, fmt.Errorf("%v: exchange of keys: %w", cfg.Test, err)
	}
	if err := b.run(ctx, x); err != nil {
		return res, fmt.Errorf("%v: after %d sent and %d received: %w", cfg.Test, res.Sent, res.Received, err)
	}
	if err := b.leave(x); err != nil {
		return res, fmt.Errorf("%v: at the end: %w", cfg.Test, err)
	}
	return res, nil
}

// exchange is the TCP connection with perftest's rule: in every step the client
// sends first.
type exchange struct {
	*conn
	role      Role
	connected time.Time // the peer fills its buffers after this
	keyed     time.Time // and before this
}

func (x *exchange) swap(mine, theirs []byte) error {
	if x.role == Client {
		if err := x.write(mine); err != nil {
			return err
		}
		return x.read(theirs)
	}
	if err := x.read(theirs); err != nil {
		return err
	}
	return x.write(mine)
}

// terms are what the sides agree on.
type terms struct {
	mtu   verbs.MTU
	cycle int // bytes of a buffer that small messages use in turn: the page size
	line  int // their distance is a multiple of this: the cache line
}

const (
	ourCycle = 4096
	ourLine  = 64
)

// negotiate exchanges versions, machine parameters and MTUs.
func (x *exchange) negotiate(dev *verbs.Device, cfg *PerftestConfig, res *Result) (t terms, err error) {
	theirs := make([]byte, versionLen)
	if err := x.swap(appendVersion(nil, ourVersion), theirs); err != nil {
		return t, err
	}
	if res.PeerVersion, err = parseVersion(theirs); err != nil {
		return t, err
	}
	if t.cycle, err = x.swapParam(ourCycle); err != nil {
		return t, err
	}
	if t.line, err = x.swapParam(ourLine); err != nil {
		return t, err
	}
	if t.line > t.cycle {
		return t, fmt.Errorf("a cache line of %d bytes in a page of %d", t.line, t.cycle)
	}
	port, err := dev.Port(1)
	if err != nil {
		return t, err
	}
	t.mtu = port.ActiveMTU
	if cfg.MTU != 0 {
		t.mtu = min(t.mtu, cfg.MTU)
	}
	var mtu [mtuLen]byte
	if err := x.swap(appendMTU(nil, t.mtu), mtu[:]); err != nil {
		return t, err
	}
	theirMTU, err := parseMTU(mtu[:])
	if err != nil {
		return t, err
	}
	t.mtu = min(t.mtu, theirMTU)
	res.MTU = t.mtu
	if cfg.Type == verbs.UD && cfg.Size > t.mtu.Bytes() {
		return t, fmt.Errorf("UD messages of %d bytes with an MTU of %v: %w", cfg.Size, t.mtu, ErrUnsupported)
	}
	return t, nil
}

// swapParam exchanges a machine parameter and returns the larger one.
func (x *exchange) swapParam(ours int) (int, error) {
	theirs := make([]byte, 4)
	if err := x.swap(binary.BigEndian.AppendUint32(nil, uint32(ours)), theirs); err != nil {
		return 0, err
	}
	v, err := parseParam(theirs)
	return max(v, ours), err
}

// swapKeys exchanges the keys of a queue pair. The programs also use it to wait for each
// other.
func (x *exchange) swapKeys(mine Keys) (Keys, error) {
	line := make([]byte, keysLen)
	if err := x.swap(mine.Append(nil), line); err != nil {
		return Keys{}, err
	}
	return ParseKeys(line)
}

// swapReports exchanges reports, field by field.
func (x *exchange) swapReports(mine *Report) (*Report, error) {
	var theirs Report
	field := make([]byte, 8)
	for i := range reportFields {
		if err := x.swap(binary.BigEndian.AppendUint64(nil, mine.field(i)), field); err != nil {
			return nil, err
		}
		theirs.setField(i, binary.BigEndian.Uint64(field))
	}
	return &theirs, nil
}

// meet exchanges the keys of all queue pairs and connects them. The order of the steps
// depends on the test.
func (b *bench) meet(x *exchange) error {
	t := &perftests[b.cfg.Test]
	if t.lat && t.verb != verbSend {
		if err := b.sync(x); err != nil {
			return err
		}
	}
	for _, f := range b.flows {
		theirs, err := x.swapKeys(f.mine)
		if err != nil {
			return err
		}
		if err := b.acceptKeys(f, theirs); err != nil {
			return err
		}
	}
	x.keyed = time.Now()
	b.expect = newExpectation(&b.cfg, x.connected, x.keyed)
	if err := b.connectAll(); err != nil {
		return err
	}
	if t.verb == verbSend {
		if err := b.sync(x); err != nil {
			return err
		}
	}
	for _, f := range b.flows {
		if _, err := x.swapKeys(f.mine); err != nil {
			return err
		}
	}
	if t.verb != verbSend {
		return b.sync(x)
	}
	return nil
}

// sync waits until the peer has come to the same point.
func (b *bench) sync(x *exchange) error {
	_, err := x.swapKeys(b.flows[0].mine)
	return err
}

// acceptKeys checks and keeps the peer's keys of a queue pair.
func (b *bench) acceptKeys(f *flow, k Keys) error {
	switch {
	case k.GID.IsZero() || k.QPN == 0:
		return errors.New("the peer's queue pair has no GID or no number")
	case k.GID.Addr().Is4() != b.gid.Addr().Is4():
		return fmt.Errorf("the peer's address is %v, ours %v: one IPv4, one not", k.GID, b.gid)
	case b.cfg.Type == verbs.RC && k.OutReads == 0:
		return errors.New("the peer serves no READs")
	}
	f.peer = k
	return nil
}

func (b *bench) connectAll() error {
	limit := b.dev.Attr().MaxQPInitRDAtom
	for _, f := range b.flows {
		var err error
		f.ah, err = b.connect(f.qp, &link{
			mtu: b.terms.mtu, gidIndex: b.cfg.GIDIndex, localPSN: f.mine.PSN, timeout: b.cfg.Timeout,
			peer:  Address{QPN: f.peer.QPN, PSN: f.peer.PSN, GID: f.peer.GID},
			reads: uint8(min(int(f.peer.OutReads), limit, 255)), serves: uint8(f.mine.OutReads),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// leave ends the exchange. When the peer has come to this point it has no more requests under
// way, and what it has left in memory can be checked. The sides of ib_write_lat have seen all
// messages, and just close.
func (b *bench) leave(x *exchange) error {
	farewell := b.cfg.Test != WriteLat
	if farewell {
		if err := b.sync(x); err != nil {
			return err
		}
	}
	if err := b.verifyMemory(); err != nil {
		return err
	}
	if farewell {
		// Older programs send this and do not wait for it: the peer may have closed
		// the connection already.
		if err := x.write(done); err != nil && !gone(err) {
			return err
		}
	}
	return x.finish()
}
