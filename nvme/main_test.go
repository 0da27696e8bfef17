package nvme

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func must[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		check(t, err)
		return v
	}
}

// seeded returns random numbers that repeat from VERBENA_SEED.
func seeded(t testing.TB) *rand.Rand {
	s := rand.Uint64()
	if v, err := strconv.ParseUint(os.Getenv("VERBENA_SEED"), 10, 64); err == nil {
		s = v
	}
	t.Logf("VERBENA_SEED=%d", s)
	return rand.New(rand.NewPCG(s, 1))
}

func fill(b []byte, r *rand.Rand) []byte {
	for rest := b; len(rest) > 0; {
		var word [8]byte
		le.PutUint64(word[:], r.Uint64())
		rest = rest[copy(rest, word[:]):]
	}
	return b
}

const testNQN = "nqn.2026-01.org.verbena:test"

// rig is a subsystem with a namespace of 512-byte blocks, and a controller.
type rig struct {
	t    testing.TB
	sub  *Subsystem
	c    *Controller
	late []Completion // what Complete was called with
}

func newRig(t testing.TB, ns Namespace, cfg ControllerConfig) *rig {
	t.Helper()
	r := &rig{t: t, sub: must(NewSubsystem(SubsystemConfig{NQN: testNQN, Serial: "S1"}))(t)}
	if ns != nil {
		check(t, r.sub.AddNamespace(1, ns))
	}
	cfg.Complete = func(c Completion) { r.late = append(r.late, c) }
	r.c = must(r.sub.NewController(cfg))(t)
	t.Cleanup(r.c.Close)
	return r
}

// do executes a command as a transport does: Transfer, then Execute with that much memory, in pieces of odd sizes.
func (r *rig) do(admin bool, cmd Command, data []byte) Completion {
	r.t.Helper()
	n, dir, st := r.c.Transfer(admin, &cmd)
	if st != StatusSuccess {
		return Completion{CID: cmd.CID, Status: st}
	}
	if n > 0 && dir == NoData || n == 0 && dir != NoData {
		r.t.Fatalf("%s: %d bytes, %v", CommandName(admin, cmd.Opcode), n, dir)
	}
	if len(data) < n {
		r.t.Fatalf("%s: wants %d bytes of data, the test has %d", CommandName(admin, cmd.Opcode), n, len(data))
	}
	done, ok := r.c.Execute(admin, &cmd, split(data[:n]))
	if !ok {
		r.t.Fatalf("%s: no completion", CommandName(admin, cmd.Opcode))
	}
	if done.CID != cmd.CID {
		r.t.Fatalf("%s: completion of command %d, not %d", CommandName(admin, cmd.Opcode), done.CID, cmd.CID)
	}
	return done
}

// split cuts memory into pieces, one of them empty, none but the first of whole blocks.
func split(b []byte) [][]byte {
	if len(b) < 1536 {
		return [][]byte{b}
	}
	return [][]byte{b[:512], nil, b[512:1000], b[1000:]}
}

func (r *rig) want(admin bool, cmd Command, data []byte, st Status) Completion {
	r.t.Helper()
	done := r.do(admin, cmd, data)
	if done.Status != st {
		r.t.Fatalf("%s: %v, should be %v", CommandName(admin, cmd.Opcode), done.Status, st)
	}
	return done
}

func ioCmd(op uint8, lba uint64, blocks int) Command {
	c := Command{Opcode: op, NSID: 1, CID: 77}
	c.SetLBA(lba, blocks)
	return c
}

const dnr = StatusDNR
