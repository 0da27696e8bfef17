package nvme

import "testing"

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
