package gpu

import (
	"bytes"
	"errors"
	"runtime"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// TestStorm: a storm of dma-bufs moves and evicts memory of a GPU under a peer that reads and writes it, and no
// byte is lost.
func TestStorm(t *testing.T) {
	t.Setenv("VERBENA_DMABUF_STORM", "11,5000")
	d := open(t, "soft:0", Config{VRAM: 4 * mib})
	alice, bob := peers(t, nil)
	const n = 64 << 10
	b := alloc(t, d, n)
	mr := bob.reg(b)
	host := make([]byte, 2*n)
	local := must[*verbs.MR](t)(alice.pd.RegMR(host, all))
	for round := 0; ; round++ {
		if round == 200_000 {
			t.Fatalf("the storm does not move the memory: %+v", d.Stats())
		}
		for i := range host[:n] {
			host[i] = byte(i*7 + round)
		}
		alice.wantDone("WRITE", alice.do(verbs.OpRDMAWrite, local, 0, n, mr, 0), verbs.WCSuccess)
		alice.wantDone("READ", alice.do(verbs.OpRDMARead, local, n, n, mr, 0), verbs.WCSuccess)
		if !bytes.Equal(host[:n], host[n:]) {
			t.Fatalf("round %d: what was read is not what was written", round)
		}
		// Evictions are moves, too: some were within the VRAM, or back to it.
		if s := d.Stats(); round > 50 && s.Evictions > 3 && s.Moves > 3*s.Evictions/2 {
			break
		}
		runtime.Gosched()
	}
	if s := mr.PagingStats(); s.Invalidations == 0 || s.FailedResolutions != 0 {
		t.Errorf("the region has counted %+v", s)
	}
	check(t, mr.Close())
	check(t, local.Close())
}

// TestStormRevokes: a storm takes memory of a GPU away from peers, and the GPU keeps it.
func TestStormRevokes(t *testing.T) {
	t.Setenv("VERBENA_DMABUF_STORM", "12,5000,5")
	d := open(t, "soft:0", Config{VRAM: 4 * mib})
	const n = 64 << 10
	b := alloc(t, d, n)
	data := random(n, 12)
	_, err := b.WriteAt(data, 0)
	check(t, err)
	for range 3 {
		alice, bob := peers(t, nil)
		mr, err := bob.pd.RegGPU(b, all)
		for errors.Is(err, syscall.ENODEV) { // the storm was faster
			mr, err = bob.pd.RegGPU(b, all)
		}
		check(t, err)
		local := must[*verbs.MR](t)(alice.pd.RegMR(make([]byte, n), all))
		status := verbs.WCSuccess
		for round := 0; status == verbs.WCSuccess; round++ {
			if round == 200_000 {
				t.Fatal("the storm does not revoke the memory")
			}
			status = alice.do(verbs.OpRDMARead, local, 0, n, mr, 0)
			runtime.Gosched()
		}
		if status != verbs.WCRemAccessErr {
			t.Errorf("after the memory was revoked a READ ends with %v", status)
		}
		check(t, mr.Close())
		check(t, local.Close())
	}
	holds(t, "the GPU's own", b, data)
}
