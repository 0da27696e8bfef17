package interop

import (
	"sync"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// Threads that create queue pairs at the same time all get numbers, and no two the same.
func TestNumbersAtOnce(t *testing.T) {
	dev, err := verbs.Open(loopbacks()[0].addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	}()
	pd, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	cq, err := dev.CreateCQ(16, nil)
	if err != nil {
		t.Fatal(err)
	}
	const threads, each = 16, 40
	all := make([][]*verbs.QP, threads)
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() {
			for range each {
				q, err := pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 1, MaxSendSGE: 1}})
				if err != nil {
					t.Error(err)
					return
				}
				all[i] = append(all[i], q)
			}
		})
	}
	wg.Wait()
	seen := map[uint32]bool{}
	for _, qps := range all {
		for _, q := range qps {
			if seen[q.Number()] {
				t.Errorf("number %#x is given twice", q.Number())
			}
			seen[q.Number()] = true
			if err := q.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	if err := cq.Close(); err != nil {
		t.Error(err)
	}
	if err := pd.Close(); err != nil {
		t.Error(err)
	}
}
