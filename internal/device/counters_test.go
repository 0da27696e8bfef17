package device

import (
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// A queue pair counts for itself, with a counter for each reason to refuse something; its
// device has the sum, also when the queue pair is closed, and reports it by name.
func TestQPCounters(t *testing.T) {
	d := openDevice(t, provider.Config{})
	a, b := connected(t, d, d, ib.RC, 4096, nil)
	c, _ := connected(t, d, d, ib.RC, 4096, nil)
	wr := a.write(b, 0, 8)
	wr.RKey ^= 1 << 20
	a.post(wr)
	a.status(ib.WCRemAccessErr)
	named := func(list []provider.Counter) counts {
		n := counts{}
		for _, c := range list {
			n[c.Name] = c.Value
		}
		return n
	}
	const refused = "resp_remote_access_errors"
	for _, e := range []struct {
		*end
		refused, heard uint64
	}{{a, 0, 1}, {b, 1, 0}, {c, 0, 0}} {
		if n := named(e.qp.Counters()); n[refused] != e.refused || n["naks_received"] != e.heard {
			t.Errorf("%v", n)
		}
	}
	for _, q := range d.status(false).(ib.ProcessResources).QPs {
		if n := q.Counters[refused]; (q.Number == b.qp.Number()) != (n == 1) {
			t.Errorf("others are told %v", q)
		}
	}
	if n := countsOf(d); n[refused] != 1 || n["naks_received"] != 1 {
		t.Errorf("the device has %v", n)
	}
}
