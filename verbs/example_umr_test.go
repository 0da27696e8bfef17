package verbs_test

import (
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// configure makes an indirect key of what c says, and waits until that is done.
func (s *side) configure(c *verbs.MKeyConfig) {
	_, err := s.qp.PostSend([]verbs.SendWR{{Op: verbs.OpConfigureMKey, Flags: verbs.SendSignaled, Configure: c}})
	check(err)
	check(s.waitErr())
}

func (s *side) waitErr() error {
	wc := s.wait()
	return wc.Err()
}

// A matrix is transposed by one WRITE: the peer's key shows its memory column by
// column, so that rows which arrive one behind the other become columns.
func ExampleMKey() {
	const rows, cols = 3, 4
	alice, bob := connected()
	matrix := []byte("abcd" + "efgh" + "ijkl")
	transposed := make([]byte, rows*cols)
	source, target := alice.register(matrix), bob.register(transposed)

	// Element (r, c) is to lie at c*rows + r. In each of rows rounds, one byte goes
	// to each of the target's cols rows; the next round goes one byte farther on.
	columns, err := bob.pd.CreateMKey(cols)
	check(err)
	var sources []verbs.Stride
	for c := range cols {
		sources = append(sources, target.Stride(c*rows, 1, 0))
	}
	bob.configure(columns.Interleaved(verbs.AccessLocalWrite|verbs.AccessRemoteWrite, rows, sources...))

	_, err = alice.qp.PostSend([]verbs.SendWR{{
		Op:    verbs.OpRDMAWrite,
		Flags: verbs.SendSignaled,
		SGL:   []verbs.SGE{source.SGE(0, len(matrix))},
		RKey:  columns.RKey(), // from its address 0 on
	}})
	check(err)
	check(alice.waitErr())
	for c := range cols {
		fmt.Printf("%s\n", transposed[c*rows:][:rows])
	}
	check(columns.Close())
	alice.close(source)
	bob.close(target)
	// Output:
	// aei
	// bfj
	// cgk
	// dhl
}

// Two halves of a three-dimensional grid exchange their faces, each by one WRITE
// and without packing: a strided key on either side gathers and scatters them.
func ExampleMKey_Interleaved() {
	const n = 8 // points in each direction, of which the outermost are the neighbour's
	alice, bob := connected()
	mine, theirs := make([]byte, n*n*n), make([]byte, n*n*n)
	at := func(x, y, z int) int { return (z*n+y)*n + x }
	for i := range mine {
		mine[i] = byte(i)
	}
	source, target := alice.register(mine), bob.register(theirs)

	// A face across x is n*n single points, n apart; one across y is n rows, n*n
	// apart; one across z lies in one piece.
	type face struct {
		name        string
		from, to    int
		bytes, skip int
		repeat      uint64
	}
	for _, f := range []face{
		{"x", at(n-2, 0, 0), at(0, 0, 0), 1, n - 1, n * n},
		{"y", at(0, n-2, 0), at(0, 0, 0), n, n*n - n, n},
		{"z", at(0, 0, n-2), at(0, 0, 0), n * n, 0, 1},
	} {
		gather, err := alice.pd.CreateMKey(1)
		check(err)
		scatter, err := bob.pd.CreateMKey(1)
		check(err)
		alice.configure(gather.Interleaved(0, f.repeat, source.Stride(f.from, f.bytes, f.skip)))
		bob.configure(scatter.Interleaved(verbs.AccessLocalWrite|verbs.AccessRemoteWrite, f.repeat, target.Stride(f.to, f.bytes, f.skip)))
		clear(theirs)
		_, err = alice.qp.PostSend([]verbs.SendWR{{
			Op:    verbs.OpRDMAWrite,
			Flags: verbs.SendSignaled,
			SGL:   []verbs.SGE{{Length: n * n, LKey: gather.LKey()}},
			RKey:  scatter.RKey(),
		}})
		check(err)
		check(alice.waitErr())
		right, others := 0, 0
		for i := range theirs {
			on := map[string]bool{"x": i%n == 0, "y": i/n%n == 0, "z": i/n/n == 0}[f.name]
			switch {
			case on && theirs[i] == mine[i-f.to+f.from]:
				right++
			case theirs[i] != 0:
				others++
			}
		}
		fmt.Printf("face across %s: %d points right, %d others touched\n", f.name, right, others)
		check(gather.Close())
		check(scatter.Close())
	}
	alice.close(source)
	bob.close(target)
	// Output:
	// face across x: 64 points right, 0 others touched
	// face across y: 64 points right, 0 others touched
	// face across z: 64 points right, 0 others touched
}

// Device memory serves as a counter that peers add to: it has an address of 0, and
// the program reads it by copying.
func ExampleDevice_AllocDM() {
	alice, bob := connected()
	dm, err := bob.dev.AllocDM(8, 3)
	check(err)
	counter, err := bob.pd.RegDMMR(dm, 0, 8, verbs.AccessZeroBased|verbs.AccessLocalWrite|verbs.AccessRemoteAtomic)
	check(err)
	before := alice.register(make([]byte, 8))
	for range 3 {
		_, err = alice.qp.PostSend([]verbs.SendWR{{
			Op:         verbs.OpAtomicFetchAdd,
			Flags:      verbs.SendSignaled,
			SGL:        []verbs.SGE{before.SGE(0, 8)},
			RKey:       counter.RKey(),
			CompareAdd: 14,
		}})
		check(err)
		check(alice.waitErr())
	}
	var now [8]byte
	_, err = dm.ReadAt(now[:], 0)
	check(err)
	fmt.Println("the counter is", now[0])
	fmt.Println(dm.Close() != nil) // a region stands on it
	check(counter.Close())
	check(dm.Close())
	alice.close(before)
	bob.close()
	// Output:
	// the counter is 42
	// true
}
