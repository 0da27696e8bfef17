package main

// What is compared with what: the list of groups, and the contenders of some of them. The
// goals are the project's.

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

var groups = []group{
	{"loop-bw-4k", "within a process: 4 KiB", func(b *bench) ([]contender, error) { return b.loopBandwidth(4<<10, nil) }},
	{"loop-bw-64k", "within a process: 64 KiB", func(b *bench) ([]contender, error) { return b.loopBandwidth(64<<10, &goal{"≥", 0.8}) }},
	{"loop-bw-1m", "within a process: 1 MiB", func(b *bench) ([]contender, error) { return b.loopBandwidth(1<<20, nil) }},
	{"loop-latency", "within a process: 8 bytes, from post to completion", (*bench).loopLatency},
	{"udp-bw-64k", "between two processes, packets: 64 KiB", func(b *bench) ([]contender, error) { return b.udpBandwidth("64K", 64<<10, 32) }},
	{"udp-bw-1m", "between two processes, packets: 1 MiB", func(b *bench) ([]contender, error) { return b.udpBandwidth("1M", 1<<20, 8) }},
	{"udp-latency", "between two processes, packets: 8 bytes, half a round trip, all polling", (*bench).udpLatency},
	{"local-bw-64k", "between two processes, shared memory: 64 KiB", func(b *bench) ([]contender, error) { return b.localBandwidth(64<<10, 32, &goal{"≥", 0.8}) }},
	{"local-bw-1m", "between two processes, shared memory: 1 MiB", func(b *bench) ([]contender, error) { return b.localBandwidth(1<<20, 8, nil) }},
	{"local-shared-64k", "between two processes, memory that both can map: 64 KiB", func(b *bench) ([]contender, error) { return b.sharedBandwidth(64<<10, 32) }},
	{"local-latency", "between two processes, shared memory: 8 bytes, half a round trip, all polling", (*bench).localLatency},
	{"udp-second", "packets to the second process of an address: 64 KiB", (*bench).second},
	{"rate", "8-byte WRITEs in lists of 32", (*bench).rate},
	{"qps-loop", "within a process: many queue pairs against one, 64 KiB WRITE", func(b *bench) ([]contender, error) { return b.manyQPs(b.newRig, verbs.LinkLoop) }},
	{"qps-udp", "between two processes, packets: many queue pairs against one, 64 KiB WRITE", func(b *bench) ([]contender, error) { return b.manyQPs(b.newPeerRig, verbs.LinkUDP) }},
	{"threads-loop", "within a process: many threads against one, 8-byte WRITEs in lists of 32", func(b *bench) ([]contender, error) { return b.manyThreads(b.newRig, verbs.LinkLoop, 8) }},
	{"threads-udp", "between two processes, packets: many threads against one, 64 KiB WRITE", func(b *bench) ([]contender, error) { return b.manyThreads(b.newPeerRig, verbs.LinkUDP, 6) }},
	{"threads-local", "between two processes, shared memory: many threads against one, 64 KiB WRITE", func(b *bench) ([]contender, error) { return b.manyThreads(b.newPeerRig, verbs.LinkLocal, 5) }},
	{"connect", "within a process, two devices: making a connection by address and closing it", (*bench).connecting},
	{"connect-many", "within a process, two devices, packets: many connections at once", (*bench).connections},
	{"connect-flood", "packets: 32 connections at once while another process sends forged requests, 100,000 a second", (*bench).flooded},
	{"rconn-latency", "between two processes: a byte there and back, by net.Conn", (*bench).streamLatency},
	{"rconn-bw-64k", "between two processes: a stream in writes of 64 KiB, by net.Conn", (*bench).streamBandwidth},
	{"rconn-http", "between two processes: HTTP requests a second, by net.Conn, eight at a time", (*bench).streamHTTP},
	{"rconn-idle", "package rconn: connections on which nothing moves", (*bench).idleStreams},
	{"kv-get", "between two processes: GETs of examples/kv, a second, one client", func(b *bench) ([]contender, error) { return b.storeGets(1, &goal{"≥", 2}, nil) }},
	{"kv-get-8", "between two processes: GETs of examples/kv, a second, eight clients", func(b *bench) ([]contender, error) { return b.storeGets(8, &goal{"≥", 2}, nil) }},
	{"mw-bind", "giving access to 1 MiB and taking it away", (*bench).windowBind},
	{"mw-bw-64k", "within a process: 64 KiB WRITE through a memory window", (*bench).windowBandwidth},
	{"mw-latency", "within a process: 8-byte WRITE through a memory window, from post to completion", (*bench).windowLatency},
	{"rereg", "changing the rights to 1 MiB", (*bench).reregistration},
	{"umr-64", "within a process: 1,024 scattered elements of 64 bytes", func(b *bench) ([]contender, error) {
		return b.umrWrite(verbs.LinkLoop, 64, &goal{"≥", 5}, nil)
	}},
	{"umr-4k-loop", "within a process: 1,024 scattered elements of 4 KiB", func(b *bench) ([]contender, error) {
		return b.umrWrite(verbs.LinkLoop, 4096, nil, &goal{"≥", 2})
	}},
	{"umr-4k-udp", "packets, to itself: 1,024 scattered elements of 4 KiB", func(b *bench) ([]contender, error) {
		return b.umrWrite(verbs.LinkUDP, 4096, nil, &goal{"≥", 1.2})
	}},
	{"umr-configure", "within a process: configuring an indirect key, post to completion", (*bench).umrConfigure},
	{"dm", "within a process: 8 bytes into device memory, post to completion", (*bench).deviceMemory},
	{"inline-loop", "within a process: 8 bytes, inline receive on and off", func(b *bench) ([]contender, error) { return b.inlineReceive(b.newRig, verbs.LinkLoop) }},
	{"inline-local", "between two processes, shared memory: 8 bytes, inline receive on and off", func(b *bench) ([]contender, error) { return b.inlineReceive(b.newPeerRig, verbs.LinkLocal) }},
	{"inline-udp", "between two processes, packets: 8 bytes, inline receive on and off", func(b *bench) ([]contender, error) { return b.inlineReceive(b.newPeerRig, verbs.LinkUDP) }},
	{"staged-64k", "within a process, memory of a model engine: 64 KiB, 16 at a time", func(b *bench) ([]contender, error) { return b.stagedLoop(64<<10, 16, 0.5) }},
	{"staged-1m", "within a process, memory of a model engine: 1 MiB, 8 at a time", func(b *bench) ([]contender, error) { return b.stagedLoop(1<<20, 8, 0.8) }},
	{"staged-64m", "within a process, memory of a model engine: 64 MiB, 2 at a time", func(b *bench) ([]contender, error) { return b.stagedLoop(64<<20, 2, 0.8) }},
	{"staged-local-64k", "between two processes, shared memory, memory of a model engine: 64 KiB, 16 at a time", func(b *bench) ([]contender, error) { return b.stagedLocal(64<<10, 16, 0.5) }},
	{"staged-local-1m", "between two processes, shared memory, memory of a model engine: 1 MiB, 8 at a time", func(b *bench) ([]contender, error) { return b.stagedLocal(1<<20, 8, 0.8) }},
	{"staged-local-64m", "between two processes, shared memory, memory of a model engine: 64 MiB, 2 at a time", func(b *bench) ([]contender, error) { return b.stagedLocal(64<<20, 2, 0.8) }},
	{"staged-latency", "within a process: 8 bytes, post to completion, while an engine moves 1 MiB WRITEs of another queue pair", (*bench).stagedLatency},
	{"odp-register", "registering on demand, against locking", (*bench).register},
	{"odp-loop", "within a process: 64 KiB WRITE into on-demand memory", func(b *bench) ([]contender, error) { return b.steadyState(b.newRig, verbs.LinkLoop, 16) }},
	{"odp-udp", "between two processes, packets: 64 KiB WRITE into on-demand memory", func(b *bench) ([]contender, error) { return b.steadyState(b.newPeerRig, verbs.LinkUDP, 32) }},
	{"odp-fault", "within a process: 8-byte WRITE, post to completion, pages absent and present", (*bench).faults},
	{"odp-prefetch", "within a process: the first pass over a region, 64 KiB WRITE", (*bench).firstPass},
	{"odp-regions", "many on-demand regions in a process", (*bench).manyRegions},
	{"odp-close", "closing on-demand regions whose pages are present", (*bench).closeRegions},
	{"dmabuf-loop", "within a process: 64 KiB, dma-bufs that stay where they are", func(b *bench) ([]contender, error) { return b.dmabufSteady(b.newRig, verbs.LinkLoop, 16) }},
	{"dmabuf-local", "between two processes, shared memory: 64 KiB, dma-bufs that stay where they are", func(b *bench) ([]contender, error) { return b.dmabufSteady(b.newPeerRig, verbs.LinkLocal, 32) }},
	{"dmabuf-udp", "between two processes, packets: 64 KiB, dma-bufs that stay where they are", func(b *bench) ([]contender, error) { return b.dmabufSteady(b.newPeerRig, verbs.LinkUDP, 32) }},
	{"dmabuf-move", "within a process: a dma-buf of 2 MiB that moves", (*bench).dmabufMove},
	{"dmabuf-register", "registering a dma-buf", (*bench).dmabufRegister},
	{"gpu-loop", "within a process: 64 KiB WRITE into VRAM of a software GPU", func(b *bench) ([]contender, error) { return b.gpuWrite(b.newRig, verbs.LinkLoop, 16) }},
	{"gpu-udp", "between two processes, packets: 64 KiB WRITE into VRAM of a software GPU", func(b *bench) ([]contender, error) { return b.gpuWrite(b.newPeerRig, verbs.LinkUDP, 32) }},
	{"gpu-copy", "the copy engine of a software GPU: 1 MiB, 16 at a time", (*bench).gpuCopy},
	{"gpu-evict", "a software GPU with half the memory that is used: copies of 1 MiB", (*bench).gpuEvict},
	{"nvme-executor", "within a process: NVMe commands of 4 KiB over memory, at random, by one goroutine", (*bench).nvmeExecutor},
	{"nvme-offload", "within a process: 128 KiB from a disk of 1 GB/s through its controller's memory buffer to a host, 16 at a time", (*bench).nvmePaths},
	{"hmm-loop", "within a process: 64 KiB WRITE into memory that CPU and GPU share", func(b *bench) ([]contender, error) { return b.hmmWrite(b.newRig, verbs.LinkLoop, 16) }},
	{"hmm-udp", "between two processes, packets: 64 KiB WRITE into memory that CPU and GPU share", func(b *bench) ([]contender, error) { return b.hmmWrite(b.newPeerRig, verbs.LinkUDP, 32) }},
	{"hmm-migrate", "pages that go to a GPU and come home", (*bench).hmmMigrate},
	{"hmm-fault", "a touch of a page that is in a GPU's memory", (*bench).hmmFault},
	{"gpu-pipeline", "1 MiB from GPU to GPU through host memory, with the costs of an H200 that moves 1/32 of its bytes", (*bench).gpuPipeline},
	{"clib-bw-64k", "programs built for libibverbs: ib_write_bw, 64 KiB, between two processes", (*bench).libraryBandwidth},
	{"clib-latency", "programs built for libibverbs: ib_write_lat, 8 bytes, half a round trip", (*bench).libraryLatency},
	{"clib-calls", "libibverbs in C, within a process: 8 bytes", (*bench).libraryCalls},
	{"allocs", "allocations in 1,000 operations, post and poll", (*bench).allocs},
	{"memory", "memory of idle connected queue pairs", (*bench).memory},
	{"idle", "CPU time of a device where nothing happens", (*bench).idleCPU},
}

// bandwidth is a contender that keeps requests under way (pump.go).
func (r *rig) bandwidth(rw row, op verbs.Opcode, list, depth int, t turn, m mode) contender {
	p := newPump(r.near, op, list, depth, t)
	c := contender{rows: []row{rw}, side: r.near}
	c.rates = func(d time.Duration) ([]rate, error) {
		reads := op == verbs.OpRDMARead
		if reads {
			if err := r.near.forget(); err != nil {
				return nil, err
			}
		}
		if err := r.serve(m, !reads); err != nil {
			return nil, err
		}
		done, err := p.run(time.Now(), d)
		used, stopErr := r.finish()
		if err := errors.Join(err, stopErr); err != nil {
			return nil, err
		}
		if reads {
			if err := r.near.arrived(); err != nil {
				return nil, err
			}
		}
		gb := float64(list) * float64(r.near.Size) / 1e9
		return []rate{{float64(done.lists) * gb / done.elapsed.Seconds(), used.Seconds() / (float64(done.lists+done.late) * gb)}}, nil
	}
	return c
}

// copies is a contender that copies between the rig's buffers with copy().
func (r *rig) copies(name string) contender {
	return contender{
		rows: []row{{name: name, unit: "GB/s"}},
		rates: func(d time.Duration) ([]rate, error) {
			if err := r.far.forget(); err != nil {
				return nil, err
			}
			cpu := sys.CPUTime()
			n, elapsed := copyLoop(r.far, r.near, d)
			cpu = sys.CPUTime() - cpu
			return []rate{rateOf(float64(n)*float64(r.near.Size)/1e9, elapsed, cpu)}, r.far.arrived()
		},
	}
}

func (b *bench) loopBandwidth(size int, g *goal) ([]contender, error) {
	one, err := b.newRig(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: size, Slots: 1, Sends: 16})
	if err != nil {
		return nil, err
	}
	many, err := b.newRig(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: size, Slots: 16, Sends: 16})
	if err != nil {
		return nil, err
	}
	mapped, err := b.newRig(spec{Link: verbs.LinkLoop, Type: verbs.RC, QPs: 1, Size: size, Slots: 1, Sends: 16, Mapped: true})
	if err != nil {
		return nil, err
	}
	const copyOne, copyMany, copyMapped = "copy(), one buffer", "copy(), 16 buffers", "copy(), one mapped buffer"
	return []contender{
		one.copies(copyOne),
		one.bandwidth(row{"WRITE, one at a time", "GB/s", copyOne, g}, verbs.OpRDMAWrite, 1, 1, inTurn, modePassive),
		one.bandwidth(row{"READ, one at a time", "GB/s", copyOne, nil}, verbs.OpRDMARead, 1, 1, inTurn, modePassive),
		many.copies(copyMany),
		many.bandwidth(row{"WRITE, lists of 16", "GB/s", copyMany, g}, verbs.OpRDMAWrite, 16, 1, inTurn, modePassive),
		mapped.copies(copyMapped),
		mapped.bandwidth(row{"WRITE, one at a time, mapped memory", "GB/s", copyMapped, nil}, verbs.OpRDMAWrite, 1, 1, inTurn, modePassive),
	}, nil
}

// eight is the spec of 8-byte messages, one at a time.
func eight(link verbs.LinkMode, typ verbs.QPType) spec {
	return spec{Link: link, Type: typ, QPs: 1, Size: pingPongSize, Slots: 1, Sends: pingPongWRs, Recvs: pingPongWRs}
}

// quantiles is a contender that keeps durations, and its two rows: the median of
// them and the 99th percentile, in nanoseconds divided by unitNS.
func (b *bench) quantiles(name, unit string, unitNS float64, against string, g *goal, run func(time.Duration, *sampler) error) contender {
	keep := newSampler(maxSamples)
	c := contender{rows: []row{{name: name + ", p50", unit: unit, goal: g}, {name: name + ", p99", unit: unit}}}
	if against != "" {
		c.rows[0].against, c.rows[1].against = against+", p50", against+", p99"
	}
	c.run = func(d time.Duration) ([]float64, error) {
		keep.reset()
		if err := run(d, keep); err != nil {
			return nil, err
		}
		q := keep.quantiles(0.5, 0.99)
		return []float64{q[0] / unitNS, q[1] / unitNS}, nil
	}
	return c
}

func (b *bench) loopLatency() ([]contender, error) {
	rc, err := b.newRig(eight(verbs.LinkLoop, verbs.RC))
	if err != nil {
		return nil, err
	}
	ud, err := b.newRig(eight(verbs.LinkLoop, verbs.UD))
	if err != nil {
		return nil, err
	}
	once := func(name string, r *rig, op verbs.Opcode, g *goal) contender {
		f := r.once(op)
		return b.quantiles(name, "ns", 1, "", g, func(d time.Duration, keep *sampler) error { return timeOnce(f, d, keep) })
	}
	return []contender{
		once("WRITE", rc, verbs.OpRDMAWrite, &goal{"<", 1000}),
		once("SEND and RECV", rc, verbs.OpSend, nil),
		once("READ", rc, verbs.OpRDMARead, nil),
		once("FETCH_ADD", rc, verbs.OpAtomicFetchAdd, nil),
		once("UD SEND and RECV", ud, verbs.OpSend, nil),
	}, nil
}

func (b *bench) udpBandwidth(length string, size, depth int) ([]contender, error) {
	// One buffer on each side, as iperf3 has it.
	sp := spec{Link: verbs.LinkUDP, Type: verbs.RC, QPs: 1, Size: size, Slots: 1, Sends: depth}
	quiet, err := b.newPeerRig(sp)
	if err != nil {
		return nil, err
	}
	reads, err := b.newPeerRig(sp)
	if err != nil {
		return nil, err
	}
	sp.Recvs = 4 * depth
	sends, err := b.newPeerRig(sp)
	if err != nil {
		return nil, err
	}
	const tcpName = "TCP (iperf3)"
	tcp := contender{rows: []row{{name: tcpName, unit: "GB/s"}}}
	server, err := b.newIperf()
	switch {
	case err != nil:
		return nil, err
	case server == nil:
		tcp.notRun = iperfMissing
	default:
		tcp.rates = func(d time.Duration) ([]rate, error) { return server.run(length, d) }
	}
	g := &goal{"≥", 0.6}
	return []contender{
		tcp,
		quiet.bandwidth(row{"WRITE", "GB/s", tcpName, g}, verbs.OpRDMAWrite, 1, depth, inTurn, modePassive),
		quiet.bandwidth(row{"WRITE, the target polls", "GB/s", tcpName, nil}, verbs.OpRDMAWrite, 1, depth, inTurn, modePoll),
		reads.bandwidth(row{"READ", "GB/s", tcpName, nil}, verbs.OpRDMARead, 1, depth, inTurn, modePassive),
		sends.bandwidth(row{"SEND", "GB/s", tcpName, nil}, verbs.OpSend, 1, depth, inTurn, modeSink),
	}, nil
}

func (b *bench) udpLatency() ([]contender, error) {
	inline := func(typ verbs.QPType) (*rig, error) {
		sp := eight(verbs.LinkUDP, typ)
		sp.Inline = true
		return b.newPeerRig(sp)
	}
	rc, err := inline(verbs.RC)
	if err != nil {
		return nil, err
	}
	ud, err := inline(verbs.UD)
	if err != nil {
		return nil, err
	}
	far, conn, err := b.newTCP()
	if err != nil {
		return nil, err
	}
	if err := b.apart(rc.peer, ud.peer, far); err != nil {
		return nil, err
	}
	const tcp = "TCP"
	tcpRig := &rig{b: b, peer: far}
	write, send, udSend := newPinger(rc.near, verbs.OpRDMAWrite), newPinger(rc.near, verbs.OpSend), newPinger(ud.near, verbs.OpSend)
	return []contender{
		tcpRig.served(tcp, modePongTCP, "", nil, func(d time.Duration, keep *sampler) error { return pingTCP(conn, d, keep) }),
		rc.served("WRITE", modePongWrite, tcp, &goal{"≤", 1.1}, func(d time.Duration, keep *sampler) error { return pingWrite(write, d, keep) }),
		rc.served("SEND", modePongSend, tcp, nil, func(d time.Duration, keep *sampler) error { return pingSend(send, d, keep) }),
		ud.served("UD SEND", modePongSend, tcp, nil, func(d time.Duration, keep *sampler) error { return pingSend(udSend, d, keep) }),
	}, nil
}

func (b *bench) rate() ([]contender, error) {
	const list, depth = 32, 4
	sp := spec{Type: verbs.RC, QPs: 1, Size: 8, Slots: list, Sends: list * depth}
	var cs []contender
	for _, l := range []struct {
		name string
		link verbs.LinkMode
		rig  func(spec) (*rig, error)
	}{{"within a process", verbs.LinkLoop, b.newRig}, {"between two processes, packets", verbs.LinkUDP, b.newPeerRig}} {
		sp.Link = l.link
		r, err := l.rig(sp)
		if err != nil {
			return nil, err
		}
		c := r.bandwidth(row{name: l.name, unit: "million/s"}, verbs.OpRDMAWrite, list, depth, inTurn, modePassive)
		cs = append(cs, c.inMessages(sp.Size))
	}
	return cs, nil
}

// inMessages converts a contender's rates from GB/s to million messages a second.
func (c contender) inMessages(size int) contender {
	inGB := c.rates
	c.rates = func(d time.Duration) ([]rate, error) {
		v, err := inGB(d)
		for i := range v {
			v[i].value *= 1e9 / float64(size) / 1e6
		}
		return v, err
	}
	return c
}

// manyQPs compares many queue pairs with one. All contenders use the same 16 slots, so
// that only the number of queue pairs differs.
func (b *bench) manyQPs(newRig func(spec) (*rig, error), link verbs.LinkMode) ([]contender, error) {
	const depth = 16
	sp := spec{Link: link, Type: verbs.RC, QPs: 1, Size: 64 << 10, Slots: depth, Sends: depth}
	one, err := newRig(sp)
	if err != nil {
		return nil, err
	}
	sp.QPs = b.activeQPs
	many, err := newRig(sp)
	if err != nil {
		return nil, err
	}
	ref := fmt.Sprintf("1 queue pair, %d under way", depth)
	g := &goal{"≥", 0.8}
	return []contender{
		one.bandwidth(row{name: ref, unit: "GB/s"}, verbs.OpRDMAWrite, 1, depth, inTurn, modePassive),
		many.bandwidth(row{fmt.Sprintf("%d in turn, %d under way", b.activeQPs, depth), "GB/s", ref, g},
			verbs.OpRDMAWrite, 1, depth, inTurn, modePassive),
		many.bandwidth(row{fmt.Sprintf("%d, each with one under way", b.activeQPs), "GB/s", ref, g},
			verbs.OpRDMAWrite, 1, b.activeQPs, whoComplete, modePassive),
	}, nil
}

func (b *bench) allocs() ([]contender, error) {
	const operations = 1000
	var cs []contender
	for _, l := range []struct {
		name string
		link verbs.LinkMode
	}{{"within a process", verbs.LinkLoop}, {"packets, to itself", verbs.LinkUDP}} {
		r, err := b.newRig(eight(l.link, verbs.RC))
		if err != nil {
			return nil, err
		}
		for _, o := range []struct {
			name string
			op   verbs.Opcode
		}{{"WRITE", verbs.OpRDMAWrite}, {"SEND and RECV", verbs.OpSend}, {"READ", verbs.OpRDMARead}, {"FETCH_ADD", verbs.OpAtomicFetchAdd}} {
			once := r.once(o.op)
			cs = append(cs, contender{
				rows: []row{{name: o.name + ", " + l.name, goal: &goal{"≤", 0}}},
				run: func(time.Duration) ([]float64, error) {
					var failed error
					// AllocsPerRun rounds down the allocations of a run, so one run
					// is many operations.
					n := testing.AllocsPerRun(1, func() {
						for i := 0; i < operations && failed == nil; i++ {
							failed = once()
						}
					})
					return []float64{n}, failed
				},
			})
		}
	}
	return cs, nil
}

// inPeer is a contender that a fresh process measures, once.
func (b *bench) inPeer(q request, rows ...row) contender {
	return contender{
		rows: rows,
		once: true,
		run: func(time.Duration) ([]float64, error) {
			p, err := b.newPeer()
			if err != nil {
				return nil, err
			}
			r, err := p.call(q)
			return r.Values, errors.Join(err, p.Stop())
		},
	}
}

func (b *bench) memory() ([]contender, error) {
	name := fmt.Sprintf("%d RC, queues of 64 and 64", b.idleQPs)
	return []contender{b.inPeer(request{Op: opMemory, QPs: b.idleQPs},
		row{name: name, unit: "MB", goal: &goal{"<", 200}},
		row{name: "the same, queues filled once", unit: "MB"})}, nil
}

func (b *bench) idleCPU() ([]contender, error) {
	g := &goal{"<", 0.1}
	return []contender{
		b.inPeer(request{Op: opIdle, For: b.idle},
			row{name: "open device", unit: "% of core", goal: g}),
		b.inPeer(request{Op: opIdle, QPs: b.activeQPs, For: b.idle},
			row{name: fmt.Sprintf("with %d connected queue pairs", b.activeQPs), unit: "% of core", goal: g}),
	}, nil
}
