package nvme

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

// Random commands on random ranges, right and wrong ones, against an array of bytes.
func TestModel(t *testing.T) {
	const blockSize, blocks = 512, 1500
	both(t, blockSize*blocks, blockSize, func(t *testing.T, ns Namespace) {
		rnd := seeded(t)
		r := newRig(t, ns, ControllerConfig{MDTS: 3})
		oracle := make([]byte, blockSize*blocks)
		rounds := 1000
		if testing.Short() {
			rounds = 300
		}
		for i := range rounds {
			step(t, i, r, rnd, oracle, blockSize)
		}
		got := make([]byte, len(oracle))
		if _, err := ns.ReadAt(got, 0); err != nil || !bytes.Equal(got, oracle) {
			t.Errorf("at the end: %v, or other bytes", err)
		}
	})
}

// cut cuts memory at random places.
func cut(b []byte, rnd *rand.Rand) (list [][]byte) {
	for len(b) > 0 {
		n := 1 + rnd.IntN(len(b))
		if rnd.IntN(2) == 0 {
			n = min(len(b), 512*(1+rnd.IntN(8)))
		}
		list, b = append(list, b[:n:n]), b[n:]
	}
	return list
}

func step(t *testing.T, i int, r *rig, rnd *rand.Rand, oracle []byte, blockSize int) {
	t.Helper()
	size := len(oracle) / blockSize
	lba, n := rnd.IntN(size+4), 1+rnd.IntN(70)
	if rnd.IntN(10) == 0 {
		n = 1 + rnd.IntN(size)
	}
	inRange := lba+n <= size
	opcodes := []uint8{IORead, IOWrite, IOWrite, IOCompare, IOWriteZeroes, IODatasetManagement}
	op := opcodes[rnd.IntN(len(opcodes))]
	cmd := ioCmd(op, uint64(lba), n)
	var part []byte
	if inRange {
		part = oracle[lba*blockSize : (lba+n)*blockSize]
	}
	data := fill(make([]byte, n*blockSize), rnd)
	want := StatusSuccess
	switch {
	case !inRange:
		want = StatusLBAOutOfRange | dnr
	case n*blockSize > r.c.MaxTransfer() && op != IOWriteZeroes && op != IODatasetManagement:
		want = StatusInvalidField | dnr
	}
	switch op {
	case IOCompare:
		if want == StatusSuccess && rnd.IntN(2) == 0 {
			copy(data, part)
		} else if want == StatusSuccess && !bytes.Equal(data, part) {
			want = StatusCompareFailure
		}
	case IODatasetManagement:
		data = make([]byte, 16)
		PutRange((*[16]byte)(data), uint64(lba), uint32(n))
		cmd.CDW10, cmd.CDW11 = 0, CDW11Deallocate
	case IOWriteZeroes:
		if rnd.IntN(2) == 0 {
			cmd.CDW12 |= CDW12Deallocate
		}
	}
	done, ok := r.c.Execute(false, &cmd, cut(data, rnd))
	if !ok || done.Status != want {
		t.Fatalf("command %d, %s of %d blocks at %d: %v, should be %v", i, CommandName(false, op), n, lba, done.Status, want)
	}
	if want != StatusSuccess {
		return
	}
	switch op {
	case IORead:
		if !bytes.Equal(data, part) {
			t.Fatalf("command %d: other bytes in %d blocks at %d", i, n, lba)
		}
	case IOWrite:
		copy(part, data)
	case IOWriteZeroes, IODatasetManagement:
		clear(part)
	}
}

// FuzzCommand: whatever a command's 64 bytes are, Transfer and Execute agree, nothing panics, and data is asked for
// within limits.
func FuzzCommand(f *testing.F) {
	add := func(admin bool, c Command) {
		var b [64]byte
		c.Put(&b)
		f.Add(admin, b[:])
	}
	for op := range ioCommands {
		if ioCommands[op].effects != 0 {
			add(false, ioCmd(uint8(op), 1, 2))
		}
		if adminCommands[op].effects != 0 {
			add(true, Command{Opcode: uint8(op), NSID: 1})
		}
	}
	for cns := range uint32(0x20) {
		add(true, Command{Opcode: AdminIdentify, NSID: 1, CDW10: cns})
	}
	for id := range featureTable {
		if featureTable[id].known {
			add(true, setFeature(uint8(id), 1))
			add(true, getFeature(uint8(id), 0))
		}
	}
	for _, page := range []uint8{LogErrors, LogSMART, LogFirmware, LogChangedNamespaces, LogCommands, LogDiscovery} {
		add(true, LogPageCommand(page, 0, 4096, false))
	}
	f.Fuzz(func(t *testing.T, admin bool, raw []byte) {
		var b [64]byte
		copy(b[:], raw)
		cmd := ParseCommand(&b)
		var back [64]byte
		cmd.Put(&back)
		if back != b {
			t.Fatal("parsed and written, it is another command")
		}
		s := must(NewSubsystem(SubsystemConfig{NQN: testNQN}))(t)
		check(t, s.AddNamespace(1, must(NewMemory(64<<10, 512))(t)))
		for _, transport := range []TransportType{TransportPCIe, TransportRDMA} {
			c := must(s.NewController(ControllerConfig{Transport: transport, MDTS: 2}))(t)
			n, dir, st := c.Transfer(admin, &cmd)
			if n < 0 || n > max(c.MaxTransfer(), 4096) || (n == 0) != (dir == NoData) {
				t.Fatalf("%d bytes, %v", n, dir)
			}
			done, ok := c.Execute(admin, &cmd, [][]byte{make([]byte, n)})
			if ok && st != StatusSuccess && done.Status == StatusSuccess {
				t.Fatalf("Transfer: %v, Execute: %v", st, done.Status)
			}
			if ok && done.Status.Code() == StatusDataSGLLength {
				t.Fatalf("%d bytes are not what Transfer has asked for", n)
			}
			c.Close()
		}
	})
}
