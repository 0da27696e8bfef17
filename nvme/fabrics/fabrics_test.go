package fabrics

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

// A host writes and reads a disk by commands of all lengths; what it reads is what an array in memory has.
func TestDisk(t *testing.T) {
	for _, c := range []struct {
		name  string
		link  verbs.LinkMode
		cfg   TargetConfig
		block int
	}{
		{"blocks of 512", verbs.LinkAny, TargetConfig{}, 512},
		{"packets", verbs.LinkUDP, TargetConfig{}, 4096},
		{"no data in capsules", verbs.LinkAny, TargetConfig{InCapsule: -1}, 4096},
		{"much data in capsules", verbs.LinkAny, TargetConfig{InCapsule: 16 << 10}, 512},
		{"short commands", verbs.LinkAny, TargetConfig{MaxTransfer: 8 << 10}, 4096},
		{"workers", verbs.LinkAny, TargetConfig{Workers: 4}, 4096},
		{"short queues", verbs.LinkAny, TargetConfig{QueueSize: 2}, 4096},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const size = 4 << 20
			c.cfg.Subsystems = []*nvme.Subsystem{disk(t, size, c.block)}
			tgt := serve(t, c.cfg, c.link)
			h := dial(t, tgt, HostConfig{Queues: 3}, c.link)
			d := must[*Disk](t)(h.Namespace(longTime(t), 1))
			if d.Size() != size || d.BlockSize() != c.block {
				t.Fatalf("%d bytes in blocks of %d", d.Size(), d.BlockSize())
			}
			const parts = 4 // each goroutine has a part of the disk of its own
			var all sync.WaitGroup
			for g := range parts {
				rnd := seeded(t)
				base := int64(g) * size / parts
				model := make([]byte, size/parts)
				all.Go(func() {
					for range 60 {
						blocks := len(model) / c.block
						at := rnd.IntN(blocks)
						n := 1 + rnd.IntN(min(blocks-at, 1+rnd.IntN(blocks)))
						off, b := int64(at*c.block), make([]byte, n*c.block)
						switch rnd.IntN(5) {
						case 0, 1:
							fill(rnd, b)
							copy(model[off:], b)
							if _, err := d.WriteAt(b, base+off); err != nil {
								t.Error(err)
								return
							}
						case 2:
							clear(model[off : off+int64(len(b))])
							if err := d.Discard(base+off, int64(len(b))); err != nil {
								t.Error(err)
								return
							}
						case 3:
							if err := d.Flush(); err != nil {
								t.Error(err)
								return
							}
						default:
							if _, err := d.ReadAt(b, base+off); err != nil || !bytes.Equal(b, model[off:off+int64(len(b))]) {
								t.Errorf("%d bytes at %d: %v, or other bytes", len(b), base+off, err)
								return
							}
						}
					}
				})
			}
			all.Wait()
			s := tgt.Stats()
			if c.cfg.InCapsule < 0 && s.InCapsule != 0 {
				t.Errorf("%d bytes came in capsules", s.InCapsule)
			}
			if s.Read == 0 || s.Written == 0 || s.Connections != 4 || s.Refused != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// What is not a block of the disk is refused, by the host or by the target.
func TestOutside(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096)}}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	ctx := longTime(t)
	d := must[*Disk](t)(h.Namespace(ctx, 1))
	b := make([]byte, 8192)
	for _, off := range []int64{-4096, 1, 512, 1<<20 - 4096, 1 << 20, 1 << 62} {
		if _, err := d.ReadAt(b, off); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("reading at %d: %v", off, err)
		}
	}
	for _, c := range []struct {
		lba  uint64
		want nvme.Status
	}{{255, nvme.StatusLBAOutOfRange}, {1 << 63, nvme.StatusLBAOutOfRange}, {^uint64(0), nvme.StatusLBAOutOfRange}} {
		cmd := nvme.Command{Opcode: nvme.IORead, NSID: 1}
		cmd.SetLBA(c.lba, 2)
		got, err := h.IO(ctx, cmd, b, nvme.ToHost)
		if err != nil || got.Status&^nvme.StatusDNR != c.want {
			t.Errorf("block %#x: %v, %v", c.lba, got.Status, err)
		}
	}
	if _, err := h.Namespace(ctx, 2); err == nil {
		t.Error("there is a namespace 2")
	}
	if _, err := h.IO(ctx, nvme.Command{Opcode: nvme.IORead, NSID: 1}, make([]byte, 2<<20), nvme.ToHost); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("2 MiB: %v", err)
	}
}

// An admin command with more data than the first queue has memory for is refused; with so much, it is executed.
func TestLongAdminCommand(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096)}}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	for n, want := range map[int]error{4096: nil, 136 << 10: nil, 136<<10 + 4: syscall.EINVAL, 1 << 20: syscall.EINVAL, 2 << 20: syscall.EINVAL} {
		cmd := nvme.Command{Opcode: nvme.AdminGetLogPage, CDW10: uint32(nvme.LogErrors) | uint32(n/4-1)<<16, CDW11: uint32(n/4-1) >> 16}
		if _, err := h.Admin(longTime(t), cmd, make([]byte, n), nvme.ToHost); !errors.Is(err, want) {
			t.Errorf("%d bytes: %v, want %v", n, err, want)
		}
	}
}

// raw connects a queue as a host does that says something else.
func raw(t *testing.T, tgt *Target, private []byte, size int) (*cm.Conn, error) {
	t.Helper()
	dev := device(t, verbs.LinkAny)
	c, err := cm.Dial(longTime(t), tgt.Addr().String(), &cm.Config{Device: dev, Private: private, Cap: verbs.QPCap{MaxSendWR: size, MaxRecvWR: size, MaxSendSGE: 1, MaxRecvSGE: 1}})
	if err == nil {
		t.Cleanup(func() { check(t, c.Close()) })
	}
	return c, err
}

// A queue that cannot be is refused, with the reason.
func TestRefused(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096)}, Queues: 4}, verbs.LinkAny)
	for _, c := range []struct {
		r    request
		want Refusal
	}{
		{request{format: 1, sendSize: 31, recvSize: 32}, RefusedFormat},
		{request{qid: 5, sendSize: 31, recvSize: 32}, RefusedQueue},
		{request{qid: 0xffff, sendSize: 31, recvSize: 32}, RefusedQueue},
		{request{sendSize: 32, recvSize: 32}, RefusedSendSize},
		{request{sendSize: 0, recvSize: 32}, RefusedSendSize},
		{request{qid: 1, sendSize: 256, recvSize: 32}, RefusedSendSize},
		{request{qid: 1, sendSize: 0xffff, recvSize: 32}, RefusedSendSize},
		{request{qid: 1, sendSize: 31, recvSize: 1}, RefusedRecvSize},
		{request{qid: 1, sendSize: 31}, RefusedRecvSize},
	} {
		_, err := raw(t, tgt, c.r.pack(), 64)
		var no *cm.RejectError
		if !errors.As(err, &no) || no.Reason != cm.ReasonProgram || Refusal(le.Uint16(no.Private[2:])) != c.want {
			t.Errorf("%+v: %v, should be refused for %v", c.r, err, c.want)
		}
	}
	if got := tgt.Stats().Refused; got != 9 {
		t.Errorf("%d were refused", got)
	}
}

// The Connect command of a queue is answered with what is wrong in it.
func TestConnect(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096)}}, verbs.LinkAny)
	good := dial(t, tgt, HostConfig{HostNQN: "nqn.2026-01.io.verbena:host", HostID: [16]byte{1}}, verbs.LinkAny)
	ctx := longTime(t)
	for name, c := range map[string]struct {
		qid    uint16
		change func(*nvme.Connect, *nvme.ConnectData)
		want   nvme.Status
		result uint64
	}{
		"no such subsystem":     {0, func(_ *nvme.Connect, d *nvme.ConnectData) { d.SubNQN = "nqn.other" }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(true, nvme.ConnectSubNQNOffset)},
		"a controller's number": {0, func(_ *nvme.Connect, d *nvme.ConnectData) { d.CNTLID = 7 }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(true, nvme.ConnectCNTLIDOffset)},
		"no name":               {0, func(_ *nvme.Connect, d *nvme.ConnectData) { d.HostNQN = "" }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(true, nvme.ConnectHostNQNOffset)},
		"another queue":         {0, func(p *nvme.Connect, _ *nvme.ConnectData) { p.QID = 1 }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(false, nvme.ConnectQIDOffset)},
		"another format":        {0, func(p *nvme.Connect, _ *nvme.ConnectData) { p.RecordFormat = 1 }, nvme.StatusConnectFormat, 0},
		"no commands":           {0, func(p *nvme.Connect, _ *nvme.ConnectData) { p.SQSize = 0 }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(false, nvme.ConnectSQSizeOffset)},
		"too many commands":     {0, func(p *nvme.Connect, _ *nvme.ConnectData) { p.SQSize = 32 }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(false, nvme.ConnectSQSizeOffset)},
		"no such controller":    {2, func(_ *nvme.Connect, d *nvme.ConnectData) { d.CNTLID = good.controller + 1 }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(true, nvme.ConnectCNTLIDOffset)},
		"another host":          {2, func(_ *nvme.Connect, d *nvme.ConnectData) { d.HostNQN = "nqn.other" }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(true, nvme.ConnectHostNQNOffset)},
		"another host's number": {2, func(_ *nvme.Connect, d *nvme.ConnectData) { d.HostID[3] = 9 }, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(true, nvme.ConnectHostIDOffset)},
		"a queue that is there": {1, func(*nvme.Connect, *nvme.ConnectData) {}, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(false, nvme.ConnectQIDOffset)},
		"a queue not granted":   {3, func(*nvme.Connect, *nvme.ConnectData) {}, nvme.StatusConnectInvalidParameter, nvme.ConnectResult(false, nvme.ConnectQIDOffset)},
	} {
		h := &Host{cfg: good.cfg, address: good.address, dev: good.dev, pd: good.pd, transfer: page, controller: good.controller}
		q := must[*hostQueue](t)(h.newQueue(ctx, c.qid, 32, 0))
		d := nvme.ConnectData{HostID: h.cfg.HostID, CNTLID: nvme.CNTLIDDynamic, SubNQN: nqn, HostNQN: h.cfg.HostNQN}
		if c.qid != 0 {
			d.CNTLID = good.controller
		}
		p := nvme.Connect{QID: c.qid, SQSize: 31}
		c.change(&p, &d)
		var b [nvme.ConnectDataSize]byte
		d.Put(&b)
		got, err := q.do(ctx, nvme.ConnectCommand(p), b[:], nvme.FromHost)
		if err != nil || got.Status&^nvme.StatusDNR != c.want || got.Result != c.result {
			t.Errorf("%s: %v, result %#x, %v; should be %v and %#x", name, got.Status, got.Result, err, c.want, c.result)
		}
		// Without an association nothing else is executed.
		if got, err := q.do(ctx, nvme.Command{Opcode: nvme.AdminKeepAlive}, nil, nvme.NoData); err != nil || got.Status&^nvme.StatusDNR != nvme.StatusCommandSequence {
			t.Errorf("%s: a command after that: %v, %v", name, got.Status, err)
		}
		check(t, q.close())
	}
	d := must[*Disk](t)(good.Namespace(ctx, 1))
	if _, err := d.ReadAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("the host that was there: %v", err)
	}
}

// Data pointers that lie are answered with the status that the specification has for them.
func TestDescriptors(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 4<<20, 4096)}}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	q := h.io[0]
	read, write := nvme.Command{Opcode: nvme.IORead, NSID: 1}, nvme.Command{Opcode: nvme.IOWrite, NSID: 1}
	key := nvme.SGL{Type: nvme.SGLKeyed, Addr: q.memory.mr.Addr(), Key: q.memory.mr.RKey(), Length: 4096}
	with := func(s nvme.SGL, change func(*nvme.SGL)) nvme.SGL {
		change(&s)
		return s
	}
	capsule := nvme.SGL{Type: nvme.SGLData, Sub: nvme.SGLOffset, Length: 4096}
	for name, c := range map[string]struct {
		cmd  nvme.Command
		sgl  nvme.SGL
		data int // bytes behind the command
		want nvme.Status
	}{
		"good":                  {read, key, 0, nvme.StatusSuccess},
		"good, in capsule":      {write, capsule, 4096, nvme.StatusSuccess},
		"good, invalidating":    {read, with(key, func(s *nvme.SGL) { s.Sub = 0 }), 0, nvme.StatusSuccess},
		"too short":             {read, with(key, func(s *nvme.SGL) { s.Length = 4095 }), 0, nvme.StatusDataSGLLength},
		"too long":              {read, with(key, func(s *nvme.SGL) { s.Length = 8192 }), 0, nvme.StatusDataSGLLength},
		"no bytes":              {read, with(key, func(s *nvme.SGL) { s.Length = 0 }), 0, nvme.StatusDataSGLLength},
		"another type":          {read, with(key, func(s *nvme.SGL) { s.Type = nvme.SGLSegment }), 0, nvme.StatusSGLType},
		"another subtype":       {read, with(key, func(s *nvme.SGL) { s.Sub = 3 }), 0, nvme.StatusSGLType},
		"read into capsule":     {read, capsule, 4096, nvme.StatusSGLType},
		"data that is not sent": {write, capsule, 0, nvme.StatusSGLOffset},
		"one byte is missing":   {write, capsule, 4095, nvme.StatusSGLOffset},
		"offset":                {write, with(capsule, func(s *nvme.SGL) { s.Addr = 1 }), 4096, nvme.StatusSGLOffset},
		"offset that wraps":     {write, with(capsule, func(s *nvme.SGL) { s.Addr = ^uint64(0) }), 4096, nvme.StatusSGLOffset},
	} {
		got := send(t, q, c.cmd, c.sgl, nvme.FlagSGL, c.data)
		if got.Status&^nvme.StatusDNR != c.want {
			t.Errorf("%s: %v, should be %v", name, got.Status, c.want)
		}
	}
	if got := send(t, q, read, key, nvme.FlagPRP, 0); got.Status&^nvme.StatusDNR != nvme.StatusInvalidField {
		t.Errorf("page lists: %v", got.Status)
	}
	if tgt.Stats().Connections != 2 {
		t.Errorf("%+v", tgt.Stats())
	}
}

// send sends a command with any data pointer, and returns the answer.
func send(t *testing.T, q *hostQueue, cmd nvme.Command, s nvme.SGL, flags uint8, data int) nvme.Completion {
	t.Helper()
	cid, _, done, err := q.begin(longTime(t), 0)
	check(t, err)
	defer q.users.Done()
	cmd.CID = cid
	cmd.SetSGL(s)
	cmd.Flags = flags
	at := int(cid) * (commandBytes + q.room)
	cmd.Put((*[commandBytes]byte)(q.capsules.Bytes()[at:]))
	if _, err := q.conn.QP().PostSend([]verbs.SendWR{{ID: idReply | uint64(cid), Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{q.capsules.SGE(at, commandBytes+data)}}}); err != nil {
		t.Fatal(err)
	}
	select {
	case c, ok := <-done:
		if !ok {
			t.Fatal("the connection has ended")
		}
		q.finish(cid, true)
		return c
	case <-time.After(time.Minute):
		t.Fatal("no answer")
		panic("not reached")
	}
}

// Capsules that are not commands, and keys that are none, end the connection of the host that sends them, and no other.
func TestNonsense(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 4<<20, 4096)}}, verbs.LinkAny)
	good := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	d := must[*Disk](t)(good.Namespace(longTime(t), 1))
	use := func() {
		t.Helper()
		if _, err := d.WriteAt(make([]byte, 64<<10), 0); err != nil {
			t.Errorf("the other host: %v", err)
		}
	}
	for _, n := range []int{0, 1, 63} {
		bad := dial(t, tgt, HostConfig{}, verbs.LinkAny)
		q := bad.io[0]
		if _, err := q.conn.QP().PostSend([]verbs.SendWR{{ID: idReply, Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{q.capsules.SGE(0, n)}}}); err != nil {
			t.Fatal(err)
		}
		<-q.conn.Done()
		use()
	}
	for _, change := range []func(*nvme.SGL){func(s *nvme.SGL) { s.Key ^= 0x100 }, func(s *nvme.SGL) { s.Addr += 1 << 40 }, func(s *nvme.SGL) { s.Addr = ^uint64(0) - 100 }} {
		for _, cmd := range []nvme.Command{{Opcode: nvme.IORead, NSID: 1}, {Opcode: nvme.IOWrite, NSID: 1}} {
			bad := dial(t, tgt, HostConfig{}, verbs.LinkAny)
			q := bad.io[0]
			s := nvme.SGL{Type: nvme.SGLKeyed, Addr: q.memory.mr.Addr(), Key: q.memory.mr.RKey(), Length: 4096}
			change(&s)
			cid, _, _, err := q.begin(longTime(t), 0)
			check(t, err)
			q.users.Done()
			cmd.CID = cid
			cmd.SetSGL(s)
			at := int(cid) * (commandBytes + q.room)
			cmd.Put((*[commandBytes]byte)(q.capsules.Bytes()[at:]))
			if _, err := q.conn.QP().PostSend([]verbs.SendWR{{ID: idReply | uint64(cid), Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{q.capsules.SGE(at, commandBytes)}}}); err != nil {
				t.Fatal(err)
			}
			<-q.conn.Done()
			use()
		}
	}
}

// A host that does not say that it is there is dropped after twice the time that it has; each command is a sign.
func TestKeepAlive(t *testing.T) {
	sub := disk(t, 1<<20, 4096)
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{sub}}, verbs.LinkAny)
	alive := dial(t, tgt, HostConfig{KeepAlive: time.Minute}, verbs.LinkAny)
	silent := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	ctx := longTime(t)

	a := tgt.association(sub, alive.controller)
	seen := time.Unix(0, a.seen.Load())
	if a.expired(seen.Add(2*time.Minute)) || !a.expired(seen.Add(2*time.Minute+1)) {
		t.Error("it is not dropped after two minutes, or is before")
	}
	if _, err := alive.Admin(ctx, nvme.Command{Opcode: nvme.AdminKeepAlive}, nil, nvme.NoData); err != nil {
		t.Fatal(err)
	}
	if !time.Unix(0, a.seen.Load()).After(seen) {
		t.Error("its sign was not seen")
	}

	// It sets the time, and then says nothing.
	c, err := silent.Admin(ctx, nvme.Command{Opcode: nvme.AdminSetFeatures, CDW10: 0x0f, CDW11: 300}, nil, nvme.NoData)
	if err != nil || c.Status != nvme.StatusSuccess {
		t.Fatalf("%v, %v", c.Status, err)
	}
	<-silent.admin.conn.Done()
	<-silent.io[0].conn.Done()
	if _, err := silent.Admin(ctx, nvme.Command{Opcode: nvme.AdminKeepAlive}, nil, nvme.NoData); !errors.Is(err, ErrEnded) {
		t.Errorf("a command after that: %v", err)
	}
	if s := tgt.Stats(); s.Expired != 1 {
		t.Errorf("%+v", s)
	}
	if _, err := alive.Namespace(ctx, 1); err != nil {
		t.Errorf("the other host: %v", err)
	}
}

// A host says by itself that it is there.
func TestKeepsAlive(t *testing.T) {
	sub := disk(t, 1<<20, 4096)
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{sub}}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{KeepAlive: time.Hour}, verbs.LinkAny) // the target waits long; the host is made to hurry
	a := tgt.association(sub, h.controller)
	h.all.Go(func() { h.keepAlive(time.Millisecond, time.Hour) })
	for range 3 {
		seen := a.seen.Load()
		eventually(t, "there is another sign", func() bool { return a.seen.Load() != seen })
	}
}

// A target has so many queues and no more, and a connection that is not used is ended.
func TestCrowd(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096)}, Connections: 3, ConnectTimeout: 4 * time.Second}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{}, verbs.LinkAny) // two queues
	idle, err := raw(t, tgt, (&request{sendSize: 31, recvSize: 32}).pack(), 64)
	check(t, err)
	var no *cm.RejectError
	if _, err := raw(t, tgt, (&request{sendSize: 31, recvSize: 32}).pack(), 64); !errors.As(err, &no) || Refusal(le.Uint16(no.Private[2:])) != RefusedResources {
		t.Errorf("one more: %v", err)
	}
	<-idle.Done()
	eventually(t, "there is room again", func() bool {
		c, err := raw(t, tgt, (&request{sendSize: 31, recvSize: 32}).pack(), 64)
		return err == nil && c != nil
	})
	if _, err := h.Namespace(longTime(t), 1); err != nil {
		t.Errorf("the host that is connected: %v", err)
	}
}

// The target is closed while hosts use it: their commands end.
func TestTargetCloses(t *testing.T) {
	for _, workers := range []int{0, 3} {
		tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 4<<20, 4096)}, Workers: workers}, verbs.LinkAny)
		h := dial(t, tgt, HostConfig{Queues: 2}, verbs.LinkAny)
		d := must[*Disk](t)(h.Namespace(longTime(t), 1))
		var all sync.WaitGroup
		started := make(chan struct{}, 64)
		for g := range 8 {
			all.Go(func() {
				b := make([]byte, (1+g)<<14)
				for {
					_, err := d.WriteAt(b, int64(g)<<19)
					if err == nil {
						_, err = d.ReadAt(b, int64(g)<<19)
					}
					if err != nil {
						var st *StatusError // the controller may have ended before the connection
						if !errors.Is(err, ErrEnded) && (!errors.As(err, &st) || st.Status != nvme.StatusAbortRequested) {
							t.Error(err)
						}
						return
					}
					select {
					case started <- struct{}{}:
					default:
					}
				}
			})
		}
		for range 16 {
			<-started
		}
		check(t, tgt.Close())
		check(t, tgt.Close())
		all.Wait()
	}
}

// A host is gone in the middle of its commands: the target gives everything back, and serves the next one.
func TestHostGoes(t *testing.T) {
	sub := disk(t, 4<<20, 4096)
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{sub}}, verbs.LinkAny)
	for range 5 {
		h := dial(t, tgt, HostConfig{Queues: 2}, verbs.LinkAny)
		d := must[*Disk](t)(h.Namespace(longTime(t), 1))
		var all sync.WaitGroup
		started := make(chan struct{}, 8)
		for g := range 4 {
			all.Go(func() {
				b := make([]byte, 256<<10)
				for {
					if _, err := d.ReadAt(b, int64(g)<<20); err != nil {
						return
					}
					select {
					case started <- struct{}{}:
					default:
					}
				}
			})
		}
		for range 8 {
			<-started
		}
		check(t, h.Close())
		all.Wait()
	}
	eventually(t, "all hosts are forgotten", func() bool {
		tgt.mu.Lock()
		defer tgt.mu.Unlock()
		return len(tgt.hosts) == 0
	})
}

// A queue pair of the target fails: commands of that queue end, those of the host's other queue and of other hosts do not.
func TestQueueFails(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 4<<20, 4096)}}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{Queues: 2, HostNQN: "nqn.2026-01.io.verbena:host"}, verbs.LinkAny)
	other := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	all := tgt.Queues()
	if len(all) != 5 {
		t.Fatalf("%d queues, should be 5: %+v", len(all), all)
	}
	i := slices.IndexFunc(all, func(q Queue) bool {
		return q.Subsystem == nqn && q.Host == "nqn.2026-01.io.verbena:host" && q.Controller == h.Controller() && q.ID == 2
	})
	if i < 0 {
		t.Fatalf("the host's second queue is not there: %+v", all)
	}
	check(t, all[i].Fail())
	<-h.io[1].conn.Done()
	ctx := longTime(t)
	flush := nvme.Command{Opcode: nvme.IOFlush, NSID: 1}
	if _, err := h.io[1].do(ctx, flush, nil, nvme.NoData); !errors.Is(err, ErrEnded) {
		t.Errorf("the queue that has failed: %v", err)
	}
	for _, q := range []*hostQueue{h.io[0], h.admin, other.io[0]} {
		cmd := flush
		if q.qid == 0 {
			cmd = nvme.Command{Opcode: nvme.AdminKeepAlive}
		}
		if c, err := q.do(ctx, cmd, nil, nvme.NoData); err != nil || c.Status != nvme.StatusSuccess {
			t.Errorf("queue %d: %v, %v", q.qid, c.Status, err)
		}
	}
	eventually(t, "the target forgets the queue", func() bool { return len(tgt.Queues()) == 4 })
	if err := all[i].Fail(); err == nil {
		t.Error("a queue that has ended fails again")
	}
}

// A context that ends leaves its command to the target; what it used comes back.
func TestCanceled(t *testing.T) {
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 4<<20, 4096)}}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{QueueSize: 4}, verbs.LinkAny)
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	read := nvme.Command{Opcode: nvme.IORead, NSID: 1}
	read.SetLBA(0, 64)
	for range 50 {
		if _, err := h.IO(gone, read, make([]byte, 64*4096), nvme.ToHost); err != nil && !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	ctx := longTime(t)
	for range 50 {
		short, cancel := context.WithTimeout(ctx, 20*time.Microsecond)
		if _, err := h.IO(short, read, make([]byte, 64*4096), nvme.ToHost); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		cancel()
	}
	if c, err := h.IO(ctx, read, make([]byte, 64*4096), nvme.ToHost); err != nil || c.Status != nvme.StatusSuccess {
		t.Errorf("%v, %v", c.Status, err)
	}
	q := h.io[0]
	eventually(t, "all slots and all memory are free", func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return len(q.unused) == 4 && q.memory.pool.Available() == q.memory.pool.Size()
	})
}

// The data of commands passes through the memory that the target was given; when there is none left, through its own.
func TestBuffers(t *testing.T) {
	b := &counted{left: 3 << 20}
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 4<<20, 4096)}, MaxTransfer: 64 << 10, QueueSize: 32, Buffers: b}, verbs.LinkAny)
	func() {
		h := dial(t, tgt, HostConfig{Queues: 20, QueueSize: 32}, verbs.LinkAny)
		d := must[*Disk](t)(h.Namespace(longTime(t), 1))
		r := seeded(t)
		want, got := make([]byte, 1<<20), make([]byte, 1<<20)
		fill(r, want)
		must[int](t)(d.WriteAt(want, 0))
		must[int](t)(d.ReadAt(got, 0))
		if !bytes.Equal(got, want) {
			t.Error("other bytes")
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if s := tgt.Stats(); s.OwnBuffers == 0 || b.given == 0 || s.OwnBuffers+uint64(b.given) != s.Connections-1 { // all but the first
			t.Errorf("%d queues have their own memory, %d that of Buffers, of %d", s.OwnBuffers, b.given, s.Connections)
		}
	}()
}

// Whoever connects queues and sends no Connect command has none of the memory that the target was given: a host that does
// send one still gets it.
func TestBuffersAfterConnect(t *testing.T) {
	b := &counted{left: 1 << 20}
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 4<<20, 4096)}, MaxTransfer: 64 << 10, QueueSize: 32, Buffers: b}, verbs.LinkAny)
	for i := range 8 {
		_, err := raw(t, tgt, (&request{qid: uint16(i + 1), sendSize: 31, recvSize: 32}).pack(), 64)
		check(t, err)
	}
	dial(t, tgt, HostConfig{Queues: 2, QueueSize: 32}, verbs.LinkAny)
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := tgt.Stats().OwnBuffers; b.given != 2 || n != 0 {
		t.Errorf("%d queues have memory of Buffers and %d their own, should be 2 and none", b.given, n)
	}
}

// counted is memory that runs out.
type counted struct {
	mu    sync.Mutex // guards what follows
	left  int
	given int
}

func (c *counted) Alloc(n int) ([]byte, func(), error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > c.left {
		return nil, nil, fmt.Errorf("%d bytes are left: %w", c.left, syscall.ENOMEM)
	}
	c.left -= n
	c.given++
	return make([]byte, n), func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.left += n
	}, nil
}

// A host learns of a namespace that appears.
func TestEvent(t *testing.T) {
	sub := disk(t, 1<<20, 4096)
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{sub}}, verbs.LinkAny)
	h := dial(t, tgt, HostConfig{}, verbs.LinkAny)
	ctx := longTime(t)
	if c, err := h.Admin(ctx, nvme.Command{Opcode: nvme.AdminSetFeatures, CDW10: 0x0b, CDW11: 1 << 8}, nil, nvme.NoData); err != nil || c.Status != nvme.StatusSuccess {
		t.Fatalf("%v, %v", c.Status, err)
	}
	done := make(chan nvme.Completion, 1)
	var all sync.WaitGroup
	all.Go(func() {
		c, err := h.Admin(ctx, nvme.Command{Opcode: nvme.AdminAsyncEventRequest}, nil, nvme.NoData)
		if err != nil {
			t.Error(err)
		}
		done <- c
	})
	m, err := nvme.NewMemory(1<<20, 512)
	check(t, err)
	time.Sleep(10 * time.Millisecond) // the request has usually come; if not, the event waits for it
	check(t, sub.AddNamespace(2, m))
	all.Wait()
	if c := <-done; c.Status != nvme.StatusSuccess || c.Result&7 != 2 { // a notice
		t.Errorf("%v, result %#x", c.Status, c.Result)
	}
	if d, err := h.Namespace(ctx, 2); err != nil || d.BlockSize() != 512 {
		t.Errorf("the new namespace: %v", err)
	}
}

// A host is told which subsystems there are.
func TestDiscover(t *testing.T) {
	other := must[*nvme.Subsystem](t)(nvme.NewSubsystem(nvme.SubsystemConfig{NQN: nqn + "2"}))
	tgt := serve(t, TargetConfig{Subsystems: []*nvme.Subsystem{disk(t, 1<<20, 4096), other}}, verbs.LinkAny)
	got, err := Discover(longTime(t), tgt.Addr().String(), HostConfig{Config: cm.Config{Device: device(t, verbs.LinkAny)}})
	check(t, err)
	want := []nvme.DiscoveryEntry{
		{Transport: nvme.TransportRDMA, Family: nvme.AddressIPv4, PortID: 1, Address: tgt.Addr().Addr().String(), Service: "4420", NQN: nqn},
		{Transport: nvme.TransportRDMA, Family: nvme.AddressIPv4, PortID: 1, Address: tgt.Addr().Addr().String(), Service: "4420", NQN: nqn + "2"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, should be %+v", got, want)
	}
}

func TestConfigs(t *testing.T) {
	sub := []*nvme.Subsystem{disk(t, 1<<20, 4096)}
	for _, cfg := range []TargetConfig{
		{}, {Subsystems: sub, QueueSize: 1}, {Subsystems: sub, QueueSize: 257}, {Subsystems: sub, Queues: -1}, {Subsystems: sub, InCapsule: 17},
		{Subsystems: sub, InCapsule: 32 << 10}, {Subsystems: sub, MaxTransfer: 4096}, {Subsystems: sub, MaxTransfer: 12288}, {Subsystems: sub, MaxTransfer: 16 << 20},
		{Subsystems: sub, Workers: -1},
	} {
		if tgt, err := Listen(longTime(t), "127.0.0.1:4420", cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", cfg, err)
			_ = tgt.Close()
		}
	}
	for _, cfg := range []HostConfig{{}, {NQN: nqn, Queues: -1}, {NQN: nqn, QueueSize: 1}, {NQN: nqn, QueueSize: 300}, {NQN: nqn, KeepAlive: time.Millisecond}} {
		if h, err := Dial(longTime(t), "127.0.0.1:4420", cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", cfg, err)
			_ = h.Close()
		}
	}
}
