package device

// The lives of objects: what may be closed when, and what closing ends. The
// tests of closing under load are in revoke_test.go.

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// family is one object of every kind, with what each needs.
type family struct {
	dev     *Device
	pd      provider.PD
	channel provider.Channel
	cq      provider.CQ
	mr      provider.MR
	srq     provider.SRQ
	ah      *ib.AH
	qp, qp2 provider.QP // qp2 receives from srq
}

func newFamily(t testing.TB, dev *Device) *family {
	t.Helper()
	cap := ib.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1}
	f := &family{dev: dev}
	f.pd = must[provider.PD](t)(f.dev.AllocPD())
	f.channel = must[provider.Channel](t)(f.dev.CreateChannel())
	f.cq = must[provider.CQ](t)(f.dev.CreateCQ(16, f.channel))
	f.mr = must[provider.MR](t)(f.pd.RegMR(make([]byte, 64), allRemote))
	f.srq = must[provider.SRQ](t)(f.pd.CreateSRQ(provider.SRQConfig{MaxWR: 4, MaxSGE: 1}))
	f.ah = must[*ib.AH](t)(f.pd.CreateAH(ib.AHAttr{DGID: f.dev.GIDs()[0]}))
	f.qp = must[provider.QP](t)(f.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: f.cq, RecvCQ: f.cq, Cap: cap}))
	f.qp2 = must[provider.QP](t)(f.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: f.cq, RecvCQ: f.cq, SRQ: f.srq, Cap: cap}))
	return f
}

// dependents returns all objects, each with those that must be closed before it.
func (f *family) dependents() map[closer][]closer {
	return map[closer][]closer{
		f.dev:     {f.pd, f.channel, f.cq, f.mr, f.srq, f.ah, f.qp, f.qp2},
		f.pd:      {f.mr, f.srq, f.ah, f.qp, f.qp2},
		f.channel: {f.cq},
		f.cq:      {f.qp, f.qp2},
		f.srq:     {f.qp2},
		f.mr:      nil, f.ah: nil, f.qp: nil, f.qp2: nil,
	}
}

// In whatever order objects are closed, one that others use stays, with EBUSY,
// and one that is not used goes; closing again changes nothing.
func TestCloseOrders(t *testing.T) {
	seed := testSeed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range lastingOps(40, 300) {
		f := newFamily(t, openDevice(t, provider.Config{Link: linkLoop}))
		needs := f.dependents()
		var objects []closer
		for o := range needs {
			objects = append(objects, o)
		}
		closed := map[closer]bool{}
		for len(closed) < len(objects) {
			o := objects[rng.IntN(len(objects))]
			busy := false
			for _, n := range needs[o] {
				busy = busy || !closed[n]
			}
			err := o.Close()
			switch {
			case closed[o] && err != nil:
				t.Fatalf("closing %T again: %v", o, err)
			case !closed[o] && busy:
				wantErrno(t, "closing a parent", err, syscall.EBUSY)
			case !closed[o]:
				if err != nil {
					t.Fatalf("closing %T, which no object uses: %v", o, err)
				}
				closed[o] = true
			}
			if t.Failed() {
				t.Fatalf("%T, %d of %d closed", o, len(closed), len(objects))
			}
		}
	}
}

// A parent that refused to close works on.
func TestBusyParentWorksOn(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			a, b := pair(t, mode, ib.RC, 4096)
			for _, c := range []closer{a.dev, a.pd, a.cq, b.dev, b.pd, b.cq} {
				wantErrno(t, "closing a parent", c.Close(), syscall.EBUSY)
			}
			fill(a.buf, 1)
			a.post(a.write(b, 0, 4096))
			a.ok()
			if k := firstDifference(a.buf, b.buf); k >= 0 {
				t.Errorf("wrong from byte %d on", k)
			}
		})
	}
}

// A call with an object that is closed fails.
func TestUseAfterClose(t *testing.T) {
	f := newFamily(t, openDevice(t, provider.Config{Link: linkLoop}))
	in := provider.QPConfig{Type: ib.RC, SendCQ: f.cq, RecvCQ: f.cq}
	closeAll(t, f.qp, f.qp2)
	_, err := f.qp.PostSend([]ib.SendWR{{Op: ib.OpSend}})
	wantErrno(t, "PostSend on a closed queue pair", err, syscall.EINVAL)
	_, err = f.qp.PostRecv([]ib.RecvWR{{}})
	wantErrno(t, "PostRecv on a closed queue pair", err, syscall.EINVAL)
	wantErrno(t, "Modify of a closed queue pair", f.qp.Modify(&ib.QPAttr{State: ib.QPErr}, ib.QPMaskState), syscall.EINVAL)
	_, err = f.qp.Query()
	wantErrno(t, "Query of a closed queue pair", err, syscall.EINVAL)

	closeAll(t, f.srq)
	with := in
	with.SRQ = f.srq
	_, err = f.pd.CreateQP(with)
	wantErrno(t, "CreateQP on a closed shared receive queue", err, syscall.EINVAL)
	closeAll(t, f.cq)
	_, err = f.pd.CreateQP(in)
	wantErrno(t, "CreateQP on a closed completion queue", err, syscall.EINVAL)
	closeAll(t, f.channel)
	_, err = f.dev.CreateCQ(1, f.channel)
	wantErrno(t, "CreateCQ on a closed channel", err, syscall.EINVAL)
	_, err = f.channel.Next(t.Context())
	wantErrno(t, "Next on a closed channel", err, syscall.EBADF)

	closeAll(t, f.mr, f.ah, f.pd)
	_, err = f.pd.RegMR(make([]byte, 1), 0)
	wantErrno(t, "RegMR in a closed domain", err, syscall.EINVAL)
	_, err = f.pd.CreateSRQ(provider.SRQConfig{MaxWR: 1})
	wantErrno(t, "CreateSRQ in a closed domain", err, syscall.EINVAL)
	_, err = f.pd.CreateAH(ib.AHAttr{DGID: f.dev.GIDs()[0]})
	wantErrno(t, "CreateAH in a closed domain", err, syscall.EINVAL)
	closeAll(t, f.dev)
	_, err = f.dev.AllocPD()
	wantErrno(t, "AllocPD on a closed device", err, syscall.ENODEV)
	_, err = f.dev.CreateCQ(1, nil)
	wantErrno(t, "CreateCQ on a closed device", err, syscall.ENODEV)
	_, err = f.dev.CreateChannel()
	wantErrno(t, "CreateChannel on a closed device", err, syscall.ENODEV)
	_, err = f.dev.NextEvent(t.Context())
	wantErrno(t, "NextEvent on a closed device", err, syscall.ENODEV)
}

// Creations that fail count nowhere: the parents can be closed, and the limits are
// not used up.
func TestFailedCreationsLeaveNothing(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop, Limits: provider.Limits{QPs: 2, MRs: 2, AHs: 2, SRQs: 2}})
	pd := must[provider.PD](t)(d.AllocPD())
	cq := must[provider.CQ](t)(d.CreateCQ(1, nil))
	mr := func(_ provider.MR, err error) error { return err }
	for range 3 { // more than the limits
		_, ah := pd.CreateAH(ib.AHAttr{})
		_, srq := pd.CreateSRQ(provider.SRQConfig{})
		_, qp := pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: cq, RecvCQ: cq, Cap: ib.QPCap{MaxSendWR: -1}})
		for _, tt := range []struct {
			name string
			err  error
			want syscall.Errno
		}{
			{"a region of nothing", mr(pd.RegMR(nil, allRemote)), syscall.EINVAL},
			{"an on-demand region of nothing", mr(pd.RegMR(nil, ib.AccessOnDemand)), syscall.EINVAL},
			{"remote write without local", mr(pd.RegMR(make([]byte, 8), ib.AccessRemoteWrite)), syscall.EINVAL},
			{"an unknown right", mr(pd.RegMR(make([]byte, 8), 1<<15)), syscall.EINVAL},
			{"unmapped memory", mr(pd.RegMRAddr(4096, 4096, 0, 0)), syscall.EFAULT},
			{"memory around the end of the address space", mr(pd.RegMRAddr(^uintptr(0)-10, 4096, 0, 0)), syscall.EFAULT},
			{"an address handle to nowhere", ah, syscall.EINVAL},
			{"a shared receive queue of nothing", srq, syscall.EINVAL},
			{"a negative send queue", qp, syscall.EINVAL},
		} {
			wantErrno(t, tt.name, tt.err, tt.want)
		}
	}
	var keep []closer
	for range 2 {
		keep = append(keep,
			must[provider.MR](t)(pd.RegMR(make([]byte, 8), allRemote)),
			must[*ib.AH](t)(pd.CreateAH(ib.AHAttr{DGID: d.GIDs()[0]})),
			must[provider.SRQ](t)(pd.CreateSRQ(provider.SRQConfig{MaxWR: 1})),
			must[provider.QP](t)(pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: cq, RecvCQ: cq})))
	}
	closeAll(t, keep...)
	closeAll(t, pd, cq)
}

// Closing wakes all goroutines that wait. A goroutine also stops waiting when its context ends,
// and takes no event with it.
func TestWaitersAreWoken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, devs := simulated(t, 1, link.FaultyConfig{}, nil)
		f := newFamily(t, devs[0])
		wait := func(ctx context.Context, device, channel func(err error)) (done func()) {
			var wg sync.WaitGroup
			wg.Go(func() { _, err := f.dev.NextEvent(ctx); device(err) })
			wg.Go(func() { _, err := f.channel.Next(ctx); channel(err) })
			synctest.Wait() // both wait
			return wg.Wait
		}
		ctx, cancel := context.WithCancel(t.Context())
		canceled := func(err error) {
			if !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		}
		done := wait(ctx, canceled, canceled)
		cancel()
		done()
		f.dev.events.push(ib.AsyncEvent{Type: ib.EventCommEst, QPN: 9})
		wantEvent(t, f.dev, ib.AsyncEvent{Type: ib.EventCommEst, QPN: 9})

		for range 3 {
			defer wait(context.Background(), func(err error) { wantErrno(t, "NextEvent", err, syscall.ENODEV) },
				func(err error) { wantErrno(t, "Next", err, syscall.EBADF) })()
		}
		closeAll(t, f.qp, f.qp2, f.ah, f.srq, f.mr, f.cq, f.channel, f.pd, f.dev)
	})
}

// A device that is closed leaves neither descriptors nor goroutines, also after
// traffic has opened more sockets, and its address is free at once.
func TestCloseLeavesNothing(t *testing.T) {
	warm := openDevice(t, provider.Config{}) // what the runtime opens once
	closeAll(t, warm)
	fds, routines := descriptors(t), runtime.NumGoroutine()
	for _, mode := range []string{linkUDP, linkLoop, ""} {
		addrs := [2]provider.Config{{Link: mode}, {Link: mode}}
		for i := range addrs {
			addrs[i].Addrs = append(addrs[i].Addrs, nextAddr())
		}
		for range 5 {
			a := newEnd(t, openDevice(t, addrs[0]), ib.RC, 4096)
			b := newEnd(t, openDevice(t, addrs[1]), ib.RC, 4096)
			a.connect(b)
			b.connect(a)
			a.post(a.write(b, 0, 4096))
			b.post(b.read(a, 0, 4096))
			a.ok()
			b.ok()
			if n := descriptors(t); mode != linkLoop && n <= fds {
				t.Errorf("%q: a device without a descriptor, which cannot be", mode)
			}
			a.close()
			b.close()
			closeAll(t, a.dev, b.dev)
			if n := descriptors(t); n > fds {
				t.Fatalf("%q: %d descriptors are open, %d were before", mode, n, fds)
			}
		}
	}
	eventually(t, "as many goroutines as before", func() bool { return runtime.NumGoroutine() <= routines })
}
