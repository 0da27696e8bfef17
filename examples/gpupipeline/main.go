// Command gpupipeline has one GPU produce data, RDMA carry it, and another GPU consume it. All three are put in order by
// fences: the program queues everything, and then waits for the end.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	batches = 8
	size    = 256 << 10 // of a batch
)

func main() {
	producer, consumer := try(gpu.Open("soft:0", nil)), try(gpu.Open("soft:1", nil))
	alice, bob := newSide(), newSide()
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	for i, sum := range run(producer, consumer, alice, bob) {
		fmt.Printf("batch %d: the consumer's sum is %d\n", i, sum)
	}
	alice.close()
	bob.close()
	check(producer.Close())
	check(consumer.Close())
}

// run sends batches from one GPU's memory to the other's. Each GPU has two buffers, so that one batch is produced while
// another one is under way.
func run(producer, consumer *gpu.Device, alice, bob *side) []uint32 {
	produce, consume := try(producer.NewStream()), try(consumer.NewStream())
	var from, to [2]*gpu.Buffer
	var fromMR, toMR [2]*verbs.MR
	for i := range from {
		from[i], to[i] = try(producer.Alloc(size)), try(consumer.Alloc(size))
		fromMR[i] = try(alice.pd.RegGPU(from[i], 0))
		toMR[i] = try(bob.pd.RegGPU(to[i], verbs.AccessLocalWrite|verbs.AccessRemoteWrite))
	}
	result := try(consumer.Alloc(4))
	sums := make([]byte, 4*batches)
	start := gpu.NewFence("start")
	check(produce.Wait(start))
	var consumed [2]*gpu.Event // when the buffers may be written again
	for i := range batches {
		k := i % 2
		arrived := gpu.NewFence(fmt.Sprintf("batch %d has arrived", i))
		if consumed[k] != nil {
			check(produce.Wait(consumed[k]))
		}
		check(produce.Fill(from[k].All(), byte(i+1)))
		try(alice.qp.PostSend([]verbs.SendWR{
			{Op: verbs.OpWaitFence, Fence: try(produce.Record())},
			{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{fromMR[k].SGE(0, size)}, RemoteAddr: toMR[k].Addr(), RKey: toMR[k].RKey()},
			{Op: verbs.OpSignalFence, Fence: arrived},
		}))
		check(consume.Wait(arrived))
		check(consume.Reduce(result.All(), to[k].All(), gpu.Uint32))
		check(consume.Copy(gpu.Host(sums[4*i:][:4]), result.All()))
		consumed[k] = try(consume.Record())
	}
	fmt.Printf("%d batches are queued, %v has not come\n", batches, start)
	start.Signal(nil)
	check(consume.Sync(context.Background()))
	for i := range from {
		check(fromMR[i].Close())
		check(toMR[i].Close())
	}
	var all []uint32
	for i := range batches {
		all = append(all, binary.LittleEndian.Uint32(sums[4*i:]))
	}
	return all
}

// side is a queue pair and what it needs.
type side struct {
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
}

func newSide() *side {
	s := &side{dev: try(verbs.Open("", nil))}
	s.pd, s.cq = try(s.dev.AllocPD()), try(s.dev.CreateCQ(64, nil))
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq, Cap: verbs.QPCap{MaxSendWR: 64, MaxSendSGE: 1}}))
	return s
}

func (s *side) close() {
	check(s.qp.Close())
	check(s.cq.Close())
	check(s.pd.Close())
	check(s.dev.Close())
}

// try returns v, or ends the program if err is not nil.
func try[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
