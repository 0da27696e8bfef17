package nvme

import (
	"encoding/binary"
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

// BenchmarkExecutor: random 4 KiB commands over memory, from 64 bytes to a completion; every other one a write of new
// data, each read compared whole with what was written.
func BenchmarkExecutor(b *testing.B) {
	const blocks = 4096
	r := newRig(b, must(NewMemory(blocks*4096, 4096))(b), ControllerConfig{})
	var written [blocks]uint64
	buf := make([]byte, 4096)
	data := [][]byte{buf}
	x := uint64(88172645463325252)
	b.SetBytes(4096)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		lba := x % blocks
		op := IORead
		if i&1 == 0 {
			op = IOWrite
			written[lba] = x
			for j := 0; j < 4096; j += 8 {
				binary.LittleEndian.PutUint64(buf[j:], x+uint64(j))
			}
		}
		var raw [64]byte
		c := ioCmd(op, lba, 1)
		c.Put(&raw)
		cmd := ParseCommand(&raw)
		n, _, st := r.c.Transfer(false, &cmd)
		if st != StatusSuccess || n != 4096 {
			b.Fatal(n, st)
		}
		done, ok := r.c.Execute(false, &cmd, data)
		if !ok || done.Status != StatusSuccess {
			b.Fatal(done.Status)
		}
		if op == IORead {
			want, step := written[lba], uint64(1)
			if want == 0 {
				step = 0
			}
			for j := uint64(0); j < 4096; j += 8 {
				if binary.LittleEndian.Uint64(buf[j:]) != want+j*step {
					b.Fatalf("block %d: other bytes at %d", lba, j)
				}
			}
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "IOPS")
}
