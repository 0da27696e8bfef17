package device

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
)

// The memory of an engine is revoked while a peer READs it. The READ ends in a remote access error, whatever the
// peer's engine was at: also if the responder has refused a later READ before the answer to this one could be moved.
func TestStagedReadRevoked(t *testing.T) {
	const size, rounds, ahead = 200000, 60, 8
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, way := range []string{linkLoop, linkRings, "named"} {
		t.Run(way, func(t *testing.T) {
			for range rounds {
				config := enginetest.Config{Latency: 10 * time.Microsecond, Bandwidth: 20e9, Reaches: r.IntN(2) == 0}
				pause := time.Duration(r.IntN(2000)) * time.Microsecond
				t.Run("", func(t *testing.T) { readRevoked(t, way, config, pause, size, ahead) })
			}
		})
	}
}

func readRevoked(t *testing.T, way string, config enginetest.Config, pause time.Duration, size, ahead int) {
	x, y := openWay(t, way), openWay(t, way)
	g := newEngine(t, way, config)
	target := false
	from, to := connected(t, x, y, ib.RC, size, func(e *end) {
		if target {
			e.onEngine(g)
		}
		target = true
		e.mtu, e.rd = ib.MTU4096, 16
	})
	revoked := make(chan struct{})
	go func() {
		defer close(revoked)
		time.Sleep(pause)
		to.mr.(*MR).region.Revoke()
	}()
	defer func() { <-revoked }()
	wr := from.read(to, 8, size-8)
	wr.Flags = ib.SendSignaled
	for range ahead {
		from.post(wr)
	}
	for {
		wc := from.wait()
		if wc.Status == ib.WCSuccess {
			from.post(wr)
			continue
		}
		if wc.Status != ib.WCRemAccessErr {
			t.Errorf("the READ ends with %v", wc.Status)
		}
		return
	}
}
