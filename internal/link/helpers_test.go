package link

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newRand returns a generator whose seed is printed when the test fails, and can
// be given as SEED.
func newRand(t testing.TB) (*rand.Rand, uint64) {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("SEED"); s != "" {
		if _, err := fmt.Sscan(s, &seed); err != nil {
			t.Fatalf("SEED: %v", err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("run again with SEED=%d", seed)
		}
	})
	return rand.New(rand.NewPCG(seed, 1)), seed
}

// openUDP opens a link on the given addresses, or on a random loopback address.
func openUDP(t testing.TB, cfg UDPConfig) *UDP {
	t.Helper()
	for try := 0; ; try++ {
		c := cfg
		if c.Addrs == nil {
			c.Addrs = []netip.Addr{netip.AddrFrom4([4]byte{127, 77, byte(rand.N(256)), byte(rand.N(255))})}
		}
		u, err := OpenUDP(&c)
		if errors.Is(err, syscall.EADDRINUSE) && try < 100 {
			time.Sleep(20 * time.Millisecond) // another test may have ::1, which all share
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := t.(*testing.T); ok {
			if err := u.WantHeaders(); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() {
			if err := u.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
		})
		return u
	}
}

// flow prepares a flow.
func flow(t testing.TB, l Link, dst netip.Addr, f train.Flow) *train.Flow {
	t.Helper()
	f.Src, f.Dst = l.Addrs()[0], dst
	if err := l.Prepare(&f); err != nil {
		t.Fatal(err)
	}
	return &f
}

// mustSend sends all trains. It may be called by any goroutine.
func mustSend(t testing.TB, l Link, ts []*train.Train) {
	if n, err := l.Send(ts); n != len(ts) || err != nil {
		t.Errorf("sent %d of %d trains: %v", n, len(ts), err)
	}
}

// recorder is a sink that keeps copies.
type recorder struct {
	got   []received
	drops [NumReasons]int
}

type received struct {
	train.Train
	payload []byte
}

func (r *recorder) Deliver(t *train.Train) {
	// Field by field would miss one; the storage that is not exported is unused.
	c := received{Train: *t, payload: bytes.Join(t.Payload.Raw, nil)}
	if len(c.payload) != t.Len {
		panic(fmt.Sprintf("train of %d bytes with %d bytes of payload", t.Len, len(c.payload)))
	}
	c.Payload = mem.List{}
	r.got = append(r.got, c)
}

func (r *recorder) Drop(reason Reason) { r.drops[reason]++ }

func (r *recorder) dropped() (n int) {
	for _, d := range r.drops {
		n += d
	}
	return n
}

func (r *recorder) packets() (n int) {
	for i := range r.got {
		n += r.got[i].N
	}
	return n
}

// pollUntil polls until so many packets have come, dropped ones included.
func pollUntil(t testing.TB, l Link, r *recorder, packets int) {
	t.Helper()
	end := time.Now().Add(10 * time.Second)
	for n := 0; n < packets; {
		k := l.Poll(r, 1<<20)
		n += k
		if k == 0 {
			if time.Now().After(end) {
				t.Fatalf("%d of %d packets came", n, packets)
			}
			l.Wait(10 * time.Millisecond)
		}
	}
}

// merge joins trains that belong together, whatever the boundaries at which a
// link delivered them, checking that they do.
func merge(t testing.TB, got []received) []received {
	t.Helper()
	var out []received
	for _, g := range got {
		if len(out) > 0 {
			p := &out[len(out)-1]
			if !p.End && !g.Start && p.DestQP == g.DestQP && p.Kind == g.Kind && p.Transport == g.Transport &&
				g.PSN == p.PSN.Add(p.N) && p.From == g.From {
				if g.MTU != p.MTU && (g.N > 1 || !g.End) {
					t.Fatalf("packets of %d and %d bytes in one message", p.MTU, g.MTU)
				}
				p.N += g.N
				p.Len += g.Len
				p.payload = append(p.payload, g.payload...)
				p.End, p.Extra, p.Imm, p.Solicited = g.End, g.Extra, g.Imm, g.Solicited
				p.AckReq = p.AckReq || g.AckReq
				if g.Kind == wire.KindReadResponse && g.End {
					p.AETH = g.AETH
				}
				continue
			}
		}
		g.payload = bytes.Clone(g.payload)
		out = append(out, g)
	}
	return out
}

// packets returns how many packets n bytes take.
func packets(n, mtu int) int { return max(1, (n+mtu-1)/mtu) }

// expect returns how a train that was sent should arrive.
func expect(sent *train.Train, payload []byte) received {
	r := received{payload: payload}
	t := &r.Train
	t.From, t.To = sent.Flow.Src, sent.Flow.Dst
	t.TClass, t.HopLimit = sent.Flow.TClass, sent.Flow.HopLimit
	if t.HopLimit == 0 {
		t.HopLimit = 64
	}
	t.Transport, t.Kind, t.Start, t.End = sent.Transport, sent.Kind, sent.Start, sent.End
	t.DestQP, t.PSN, t.N, t.Len, t.MTU = sent.DestQP, sent.PSN, sent.N, sent.Len, sent.MTU
	if t.N == 1 {
		t.MTU = t.Len
	}
	t.AckReq = sent.AckReq
	op, _ := wire.Op(t.Transport, t.Kind, firstPos(sent), firstExtra(sent))
	has := op.Info().Headers
	if has&wire.HasRETH != 0 {
		t.RETH = sent.RETH
	}
	if has&wire.HasAtomicETH != 0 {
		t.Atomic = sent.Atomic
	}
	if has&wire.HasAtomicAckETH != 0 {
		t.Orig = sent.Orig
	}
	if has&wire.HasDETH != 0 {
		t.DETH = sent.DETH
	}
	if has&wire.HasAETH != 0 || sent.Kind == wire.KindReadResponse && sent.End {
		t.AETH = sent.AETH
	}
	if sent.End {
		t.Extra, t.Solicited = sent.Extra, sent.Solicited
		if sent.Extra != wire.NoExtra {
			t.Imm = sent.Imm
		}
	}
	return r
}

func firstPos(t *train.Train) wire.Pos {
	switch {
	case t.Start && t.End && t.N == 1:
		return wire.Only
	case t.Start:
		return wire.First
	case t.End && t.N == 1:
		return wire.Last
	}
	return wire.Middle
}

func firstExtra(t *train.Train) wire.Extra {
	if t.N == 1 && t.End {
		return t.Extra
	}
	return wire.NoExtra
}

// diff describes the first difference of two lists of trains.
func diff(got, want []received) error {
	for i := range max(len(got), len(want)) {
		if i >= len(got) {
			return fmt.Errorf("train %d is missing: %s", i, describe(&want[i]))
		}
		if i >= len(want) {
			return fmt.Errorf("train %d too many: %s", i, describe(&got[i]))
		}
		if g, w := describe(&got[i]), describe(&want[i]); g != w {
			return fmt.Errorf("train %d:\n got  %s\n want %s", i, g, w)
		}
		if !bytes.Equal(got[i].payload, want[i].payload) {
			return fmt.Errorf("train %d: payload differs", i)
		}
	}
	return nil
}

func describe(r *received) string {
	t := &r.Train
	return fmt.Sprintf("%v→%v class %#x hops %d %v kind %d extra %d start %v end %v qp %#x psn %#x n %d mtu %d "+
		"ack %v se %v reth %+v atomic %+v aeth %+v orig %#x imm %#x deth %+v len %d",
		t.From, t.To, t.TClass, t.HopLimit, t.Transport, t.Kind, t.Extra, t.Start, t.End, t.DestQP, t.PSN, t.N, t.MTU,
		t.AckReq, t.Solicited, t.RETH, t.Atomic, t.AETH, t.Orig, t.Imm, t.DETH, t.Len)
}

// backing is memory that comes in runs of at most so many bytes.
type backing struct {
	b   []byte
	run int
}

func (m backing) Kind() mem.Kind { return mem.KindPinned }
func (m backing) Len() uint64    { return uint64(len(m.b)) }
func (m backing) Close() error   { return nil }
func (m backing) Run(off, n uint64, _ ib.Access) ([]byte, mem.FaultKind) {
	return m.b[off:][:min(n, uint64(m.run))], mem.FaultNone
}

// iova is where test regions begin.
const iova = 0x100000

// region registers a buffer in a new table. Its bytes come in runs of at most
// run bytes.
func region(t testing.TB, buf []byte, run int) (*mem.Table, uint32) {
	t.Helper()
	table := mem.NewTable(mem.TableConfig{})
	r, err := table.Register(mem.RegionConfig{
		Backing: backing{buf, run}, PD: actor.PD, Access: ib.AccessLocalWrite, IOVA: iova, Length: uint64(len(buf)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return table, r.Key()
}

var actor = mem.Actor{PD: 1, QPN: 7}

// newPair makes a network with two ends, at 10.77.0.1 and 10.77.0.2.
func newPair(cfg FaultyConfig) (a, b *Faulty) {
	f := NewFabric(cfg)
	return f.Attach(netip.AddrFrom4([4]byte{10, 77, 0, 1})), f.Attach(netip.AddrFrom4([4]byte{10, 77, 0, 2}))
}
