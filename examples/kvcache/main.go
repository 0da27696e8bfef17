// Command kvcache moves blocks of a KV cache from one GPU to another, as inference does between the machine that has read the
// prompt and the one that answers: many small blocks, scattered in both GPUs, by one RDMA WRITE.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"runtime"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	cacheBlocks = 1024
	blockSize   = 4 << 10
	moved       = 96 // blocks of one request
)

func main() {
	prefill, decode := try(gpu.Open("soft:0", nil)), try(gpu.Open("soft:1", nil))
	alice, bob := newSide(), newSide()
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	from, to := newCache(prefill, alice.pd, 0), newCache(decode, bob.pd, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)

	// The blocks of the request lie anywhere in the prefill GPU, and the free blocks anywhere in the decode GPU.
	var source, target [moved]int
	for i := range source {
		source[i], target[i] = i*37%cacheBlocks, (i*101+5)%cacheBlocks
		check(from.stream.Fill(from.block(source[i]), byte(i+1)))
	}
	check(from.stream.Sync(context.Background()))

	local := alice.key(from.pieces(source[:]), 0)
	remote := bob.key(to.pieces(target[:]), verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	wc := alice.do(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{{Length: moved * blockSize, LKey: local.LKey()}}, RKey: remote.RKey()})
	fmt.Printf("%d blocks of %d bytes by one %v: %v\n", moved, blockSize, wc.Op, wc.Status)

	good := 0
	for i := range source {
		if from.checksum(source[i]) == to.checksum(target[i]) {
			good++
		}
	}
	fmt.Printf("%d blocks have the same checksum on both GPUs\n", good)
	check(local.Close())
	check(remote.Close())
	from.close()
	to.close()
	alice.close()
	bob.close()
}

// cache is a KV cache in the memory of a GPU, registered as a whole.
type cache struct {
	dev    *gpu.Device
	stream *gpu.Stream
	memory *gpu.Buffer
	sum    *gpu.Buffer
	mr     *verbs.MR
}

func newCache(dev *gpu.Device, pd *verbs.PD, access verbs.Access) *cache {
	c := &cache{dev: dev, stream: try(dev.NewStream()), memory: try(dev.Alloc(cacheBlocks * blockSize)), sum: try(dev.Alloc(4))}
	c.mr = try(pd.RegGPU(c.memory, access))
	return c
}

func (c *cache) block(i int) gpu.Mem { return c.memory.At(uint64(i)*blockSize, blockSize) }

// pieces returns the blocks as parts of the region.
func (c *cache) pieces(blocks []int) (pieces []verbs.SGE) {
	for _, i := range blocks {
		pieces = append(pieces, c.mr.SGE(i*blockSize, blockSize))
	}
	return pieces
}

// checksum has the GPU compute a block's checksum.
func (c *cache) checksum(block int) uint32 {
	b := make([]byte, 4)
	check(c.stream.Checksum(c.sum.All(), c.block(block)))
	check(c.stream.Copy(gpu.Host(b), c.sum.All()))
	check(c.stream.Sync(context.Background()))
	return binary.LittleEndian.Uint32(b)
}

func (c *cache) close() {
	check(c.mr.Close())
	check(c.dev.Close())
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
	s.pd, s.cq = try(s.dev.AllocPD()), try(s.dev.CreateCQ(16, nil))
	s.qp = try(s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq, Cap: verbs.QPCap{MaxSendWR: 16, MaxSendSGE: 1}}))
	return s
}

// key makes one key of many pieces.
func (s *side) key(pieces []verbs.SGE, access verbs.Access) *verbs.MKey {
	k := try(s.pd.CreateMKey(len(pieces)))
	s.do(verbs.SendWR{Op: verbs.OpConfigureMKey, Configure: k.List(access, pieces...)})
	return k
}

// do executes a request, and waits for it.
func (s *side) do(wr verbs.SendWR) verbs.WC {
	wr.Flags |= verbs.SendSignaled
	try(s.qp.PostSend([]verbs.SendWR{wr}))
	wcs := make([]verbs.WC, 1)
	for try(s.cq.Poll(wcs)) == 0 {
		runtime.Gosched()
	}
	check(wcs[0].Err())
	return wcs[0]
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
