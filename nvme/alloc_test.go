package nvme

import (
	"bytes"
	"testing"
)

func TestIOAllocatesNothing(t *testing.T) {
	r := newRig(t, memoryNS(t), ControllerConfig{})
	buf := make([]byte, 16384)
	for _, op := range []uint8{IOWrite, IORead} {
		allocs := testing.AllocsPerRun(200, func() {
			var raw [64]byte
			c := ioCmd(op, 1, 4)
			c.Put(&raw)
			cmd := ParseCommand(&raw)
			data := [2][]byte{buf[:4096], buf[4096:]}
			if _, _, st := r.c.Transfer(false, &cmd); st != StatusSuccess {
				t.Fatal(st)
			}
			if done, _ := r.c.Execute(false, &cmd, data[:]); done.Status != StatusSuccess {
				t.Fatal(done.Status)
			}
		})
		if allocs != 0 {
			t.Errorf("%s: %v allocations", CommandName(false, op), allocs)
		}
	}
}

// BenchmarkExecutor: random 4 KiB commands over memory, from 64 bytes to a completion; every other one a write. Each block
// has a stamp, which is new with each write, and a pattern, and all of what is read is compared with them.
func BenchmarkExecutor(b *testing.B) {
	const blocks, patterns = 2048, 16
	r := newRig(b, must(NewMemory(blocks*4096, 4096))(b), ControllerConfig{})
	rnd := seeded(b)
	var out, want [patterns][]byte
	for i := range out {
		out[i] = fill(make([]byte, 4096), rnd)
		want[i] = bytes.Clone(out[i])
	}
	var stamps [blocks]uint64 // what was written last
	in := make([]byte, 4096)
	data := make([][]byte, 1)
	execute := func(op uint8, lba uint64) {
		var raw [64]byte
		c := ioCmd(op, lba, 1)
		c.Put(&raw)
		cmd := ParseCommand(&raw)
		if n, _, st := r.c.Transfer(false, &cmd); st != StatusSuccess || n != 4096 {
			b.Fatal(n, st)
		}
		if done, ok := r.c.Execute(false, &cmd, data); !ok || done.Status != StatusSuccess {
			b.Fatal(done.Status)
		}
	}
	write := func(lba, stamp uint64) {
		stamps[lba] = stamp
		p := out[stamp%patterns]
		le.PutUint64(p, stamp)
		data[0] = p
		execute(IOWrite, lba)
	}
	for lba := range uint64(blocks) {
		write(lba, lba)
	}
	x := uint64(88172645463325252)
	b.SetBytes(4096)
	b.ReportAllocs()
	for i := uint64(blocks); b.Loop(); i++ {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		lba := x % blocks
		if i%2 == 0 {
			write(lba, i)
			continue
		}
		data[0] = in
		execute(IORead, lba)
		stamp := stamps[lba]
		if le.Uint64(in) != stamp || !bytes.Equal(in[8:], want[stamp%patterns][8:]) {
			b.Fatalf("block %d has other bytes", lba)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
}
