package verbs_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/verbs"
)

// A device counts what happens to the dma-bufs of its regions, and keeps the sums when regions
// are closed.
func TestDMABufCounters(t *testing.T) {
	done := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	const size, access = 8192, verbs.AccessLocalWrite | verbs.AccessRemote
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: size})
	done(err)
	defer func() { done(m.Close()) }()
	whole := verbs.DMABuf{Buffer: m.Buffer(), Length: size}

	type counts map[string]uint64
	none := counts{"dmabuf_regions": 0, "dmabuf_mappings": 0, "dmabuf_faults": 0, "dmabuf_invalidations": 0, "dmabuf_pins": 0}
	expect := func(dev *verbs.Device, when string, want counts) {
		t.Helper()
		got, all := counts{}, maps.Clone(none)
		maps.Copy(all, want)
		for _, c := range dev.Counters() {
			if strings.HasPrefix(c.Name, "dmabuf_") {
				got[c.Name] = c.Value
			}
		}
		if !maps.Equal(got, all) {
			t.Errorf("%s: %v, want %v", when, got, all)
		}
	}
	open := func(pins bool) (*verbs.Device, *verbs.PD) {
		dev, err := verbs.Open("", &verbs.Config{Link: verbs.LinkLoop, PinDMABuf: pins})
		done(err)
		t.Cleanup(func() { done(dev.Close()) })
		pd, err := dev.AllocPD()
		done(err)
		t.Cleanup(func() { done(pd.Close()) })
		return dev, pd
	}
	dev, pd := open(false)
	expect(dev, "at first", none)

	mr, err := pd.RegDMABufMR(whole, access)
	done(err)
	expect(dev, "registered", counts{"dmabuf_regions": 1, "dmabuf_mappings": 1})
	done(m.Move(t.Context()))
	expect(dev, "moved", counts{"dmabuf_regions": 1, "dmabuf_mappings": 1, "dmabuf_invalidations": 1})
	writeSelf(t, dev, pd, mr)
	after := counts{"dmabuf_regions": 1, "dmabuf_mappings": 2, "dmabuf_faults": 1, "dmabuf_invalidations": 1}
	expect(dev, "written to", after)
	writeSelf(t, dev, pd, mr)
	expect(dev, "written to again", after)

	// Re-registration with a dma-buf counts as registration; what is refused does not.
	done(mr.Rereg(verbs.MRChange{DMABuf: &whole}))
	after["dmabuf_regions"], after["dmabuf_mappings"] = 2, 3
	expect(dev, "registered again", after)
	if _, err := pd.RegDMABufMR(verbs.DMABuf{Buffer: m.Buffer(), Length: size + 1}, access); err == nil {
		t.Error("a part that is not inside the buffer is registered")
	}
	done(mr.Close())
	expect(dev, "closed", after)

	pinning, other := open(true)
	if a, b := dev.Attr().DMABuf, pinning.Attr().DMABuf; a != "dynamic" || b != "pinned" {
		t.Errorf("the devices' attributes are %q and %q", a, b)
	}
	held, err := other.RegDMABufMR(whole, access)
	done(err)
	want := counts{"dmabuf_regions": 1, "dmabuf_mappings": 1, "dmabuf_pins": 1}
	expect(pinning, "pinned", want)
	done(m.Revoke(t.Context()))
	want["dmabuf_invalidations"] = 1
	expect(pinning, "revoked", want)
	if _, err := other.RegDMABufMR(whole, access); err == nil {
		t.Error("a revoked buffer is registered")
	}
	expect(pinning, "refused", want)
	done(held.Close())
	expect(dev, "another device's buffers", after)
}

// writeSelf has a device write 8 bytes to a region of its own.
func writeSelf(t *testing.T, dev *verbs.Device, pd *verbs.PD, mr *verbs.MR) {
	t.Helper()
	var closers []func() error
	done := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		for i := len(closers) - 1; i >= 0; i-- {
			done(closers[i]())
		}
	}()
	source, err := pd.RegMR(make([]byte, 8), 0)
	done(err)
	closers = append(closers, source.Close)
	cq, err := dev.CreateCQ(4, nil)
	done(err)
	closers = append(closers, cq.Close)
	var qps [2]*verbs.QP
	for i := range qps {
		qps[i], err = pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 1, MaxSendSGE: 1}})
		done(err)
		closers = append(closers, qps[i].Close)
	}
	done(qps[0].Connect(qps[1].Endpoint(), nil))
	done(qps[1].Connect(qps[0].Endpoint(), nil))
	_, err = qps[0].PostSend([]verbs.SendWR{{Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGL: []verbs.SGE{source.SGE(0, 8)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()}})
	done(err)
	var wc [1]verbs.WC
	for n := 0; n == 0; {
		n, err = cq.Poll(wc[:])
		done(err)
	}
	done(wc[0].Err())
}
