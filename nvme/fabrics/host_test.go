package fabrics

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

// oddTarget is a target as ours is not: it describes itself as a test wants it, and can stop answering while its device
// acknowledges everything.
type oddTarget struct {
	*testing.T
	dev      *verbs.Device
	identity func(b []byte)                      // changes what the controller says of itself; nil: nothing
	status   func(cmd *nvme.Command) nvme.Status // of a command; nil: success

	mute      atomic.Bool
	ignored   atomic.Int64 // commands that came while mute was set
	inCapsule atomic.Int64 // writes with their data in the capsule
	keyed     atomic.Int64 // other writes
}

// dialOdd starts the target, and connects a host, which gives signs of life only if the test makes it.
func dialOdd(t *testing.T, o *oddTarget) *Host {
	t.Helper()
	o.T, o.dev = t, device(t, verbs.LinkAny)
	l := must[*cm.Listener](t)(cm.Listen(longTime(t), netip.AddrPortFrom(o.dev.Addr(), 4420).String(), &cm.Config{Device: o.dev}))
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		for {
			r, err := l.Next(ctx)
			if err != nil {
				return
			}
			all.Go(func() { o.serve(ctx, r) })
		}
	})
	t.Cleanup(func() {
		cancel()
		all.Wait()
		check(t, l.Close())
	})
	h, err := Dial(longTime(t), l.Addr().String(), HostConfig{NQN: nqn, KeepAlive: -1, Config: cm.Config{Device: device(t, verbs.LinkAny)}})
	check(t, err)
	t.Cleanup(func() { check(t, h.Close()) })
	return h
}

// serve answers the commands of a queue, one after the other.
func (o *oddTarget) serve(ctx context.Context, r *cm.Request) {
	want, _ := parseRequest(r.Private())
	size, stride := int(want.recvSize), commandBytes+maxInCapsule
	pd := must[*verbs.PD](o)(o.dev.AllocPD())
	defer func() { check(o, pd.Close()) }()
	cq := must[*verbs.CQ](o)(o.dev.CreateCQ(4*size, nil))
	defer func() { check(o, cq.Close()) }()
	capsules := must[*verbs.MR](o)(pd.AllocMR(size*stride, verbs.AccessLocalWrite))
	defer func() { check(o, capsules.Close()) }()
	answers := must[*verbs.MR](o)(pd.AllocMR(size*answerBytes+page, 0))
	defer func() { check(o, answers.Close()) }()
	receive := func(c *cm.Conn, i int) error {
		_, err := c.QP().PostRecv([]verbs.RecvWR{{ID: uint64(i), SGL: []verbs.SGE{capsules.SGE(i*stride, stride)}}})
		return err
	}
	conn, err := r.Accept(ctx, &cm.Config{Device: o.dev, PD: pd, SendCQ: cq, RecvCQ: cq, Private: accepted(size),
		Cap: verbs.QPCap{MaxSendWR: 2 * size, MaxRecvWR: size, MaxSendSGE: 1, MaxRecvSGE: 1},
		Setup: func(c *cm.Conn) (err error) {
			for i := range size {
				err = errors.Join(err, receive(c, i))
			}
			return err
		}})
	if err != nil {
		return // the test is over
	}
	defer func() { check(o, conn.Close()) }()
	wcs := make([]verbs.WC, 1)
	for ; ctx.Err() == nil; time.Sleep(100 * time.Microsecond) {
		for {
			n, err := cq.Poll(wcs)
			if err != nil || n == 0 {
				break
			}
			if wcs[0].Status != verbs.WCSuccess {
				return
			}
			if i := int(wcs[0].ID); wcs[0].Op == verbs.WCRecv {
				cmd := nvme.ParseCommand((*[commandBytes]byte)(capsules.Bytes()[i*stride:]))
				if receive(conn, i) != nil || !o.answer(conn, answers, size, i, &cmd) {
					return
				}
			}
		}
	}
}

// answer answers a command. The data of identify is behind the answers.
func (o *oddTarget) answer(conn *cm.Conn, answers *verbs.MR, size, i int, cmd *nvme.Command) bool {
	if o.mute.Load() {
		o.ignored.Add(1)
		return true
	}
	data := answers.Bytes()[size*answerBytes:]
	c := nvme.Completion{CID: cmd.CID}
	where := cmd.SGL()
	var wrs []verbs.SendWR
	switch fabrics := cmd.Opcode == nvme.OpcodeFabrics; {
	case fabrics && cmd.FabricsType() == nvme.FabricsConnect:
		c.Result = 1 // the controller
	case fabrics && cmd.FabricsType() == nvme.FabricsPropertyGet && cmd.Property().Offset == nvme.RegCAP:
		c.Result = uint64(nvme.MakeCAP(defaultQueueSize, 15, nvme.CAPContiguous|nvme.CAPNVM))
	case fabrics && cmd.FabricsType() == nvme.FabricsPropertyGet:
		c.Result = uint64(nvme.CSTSReady)
	case fabrics:
	case cmd.Opcode == nvme.AdminIdentify && where.Length == page: // the host has one of them under way
		clear(data)
		if cmd.CDW10 == identifyController {
			le.PutUint32(data[536:], 1|sglsKeyed|sglsOffset)
			le.PutUint32(data[1792:], (commandBytes+page)/16)
			if o.identity != nil {
				o.identity(data)
			}
		} else {
			le.PutUint64(data, 1024)
			data[128+2] = 12
		}
		wrs = append(wrs, verbs.SendWR{Op: verbs.OpRDMAWrite, RemoteAddr: where.Addr, RKey: where.Key, SGL: []verbs.SGE{answers.SGE(size*answerBytes, page)}})
	case cmd.Opcode == nvme.IOWrite && where.Type == nvme.SGLKeyed:
		o.keyed.Add(1)
	case cmd.Opcode == nvme.IOWrite:
		o.inCapsule.Add(1)
	case o.status != nil:
		c.Status = o.status(cmd)
	}
	c.Put((*[answerBytes]byte)(answers.Bytes()[i*answerBytes:]))
	_, err := conn.QP().PostSend(append(wrs, verbs.SendWR{Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{answers.SGE(i*answerBytes, answerBytes)}}))
	return err == nil
}

// A target that acknowledges and never answers: the host waits for the answer to its keep-alive for a limited time. Then
// all commands end, those under way and later ones.
func TestTargetThatNeverAnswers(t *testing.T) {
	o := &oddTarget{}
	h := dialOdd(t, o)
	d := must[*Disk](t)(h.Namespace(longTime(t), 1))
	_, err := d.WriteAt(make([]byte, page), 0)
	check(t, err)
	o.mute.Store(true)
	ended := make(chan error)
	for _, call := range []func() error{
		func() error { _, err := d.ReadAt(make([]byte, page), 0); return err },
		func() error { _, err := d.WriteAt(make([]byte, page), 0); return err },
		d.Flush,
		func() error { return d.Discard(0, page) },
		func() error { _, err := h.Namespace(context.Background(), 1); return err },
	} {
		go func() { ended <- call() }()
	}
	eventually(t, "the commands are at the target", func() bool { return o.ignored.Load() == 5 })
	h.all.Go(func() { h.keepAlive(time.Millisecond, 50*time.Millisecond) })
	for range 5 {
		select {
		case err := <-ended:
			if !errors.Is(err, ErrEnded) {
				t.Error(err)
			}
		case <-longTime(t).Done():
			t.Fatal("a command waits for ever")
		}
	}
	eventually(t, "the keep-alive is at the target", func() bool { return o.ignored.Load() == 6 })
	if err := d.Flush(); !errors.Is(err, ErrEnded) {
		t.Errorf("a command after the end: %v", err)
	}
}

// Close ends the wait for a keep-alive's answer, and shuts the controller down all the same.
func TestCloseDuringKeepAlive(t *testing.T) {
	o := &oddTarget{}
	h := dialOdd(t, o)
	o.mute.Store(true)
	h.all.Go(func() { h.keepAlive(time.Millisecond, time.Hour) })
	eventually(t, "a keep-alive is at the target", func() bool { return o.ignored.Load() == 1 })
	check(t, h.Close())
	eventually(t, "the shutdown is at the target", func() bool { return o.ignored.Load() == 2 })
}

// A target that does not like keep-alives is told again, and the host goes on.
func TestKeepAliveRefused(t *testing.T) {
	var came atomic.Int64
	o := &oddTarget{status: func(cmd *nvme.Command) nvme.Status {
		if cmd.Opcode != nvme.AdminKeepAlive {
			return nvme.StatusSuccess
		}
		came.Add(1)
		return nvme.StatusInvalidOpcode | nvme.StatusDNR
	}}
	h := dialOdd(t, o)
	h.all.Go(func() { h.keepAlive(time.Millisecond, time.Hour) })
	eventually(t, "three keep-alives", func() bool { return came.Load() >= 3 })
	d := must[*Disk](t)(h.Namespace(longTime(t), 1))
	check(t, d.Flush())
}

// Data goes in capsules only to a controller that says that it takes it there, at the place where the host puts it; and
// not more than is of use.
func TestRoomInCapsules(t *testing.T) {
	const both = 1 | sglsKeyed | sglsOffset
	for _, c := range []struct {
		name      string
		sgls      uint32
		capsule   uint32
		offset    uint16
		room      int
		inCapsule bool // a write of a page
	}{
		{"a page", both, (commandBytes + page) / 16, 0, page, true},
		{"less than a page", both, (commandBytes + 512) / 16, 0, 512, false},
		{"no descriptor for it", 1 | sglsKeyed, (commandBytes + page) / 16, 0, 0, false},
		{"data elsewhere", both, (commandBytes + page) / 16, 1, 0, false},
		{"nothing but the command", both, commandBytes / 16, 0, 0, false},
		{"not even that", both, 0, 0, 0, false},
		{"64 GiB", both, ^uint32(0), 0, maxInCapsule, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := &oddTarget{identity: func(b []byte) {
				le.PutUint32(b[536:], c.sgls)
				le.PutUint32(b[1792:], c.capsule)
				le.PutUint16(b[1800:], c.offset)
			}}
			h := dialOdd(t, o)
			if got := h.io[0].room; got != c.room {
				t.Errorf("room for %d bytes, want %d", got, c.room)
			}
			d := must[*Disk](t)(h.Namespace(longTime(t), 1))
			_, err := d.WriteAt(make([]byte, page), 0)
			check(t, err)
			if in, keyed := o.inCapsule.Load(), o.keyed.Load(); (in == 1) != c.inCapsule || in+keyed != 1 {
				t.Errorf("%d writes in capsules, %d by key", in, keyed)
			}
		})
	}
}
