// Command allreduce adds up the gradients of four processes, each with a GPU of its own, as training on several machines does:
// a ring. In three steps every process passes a quarter on, and the next one adds it to its own; in three more steps the
// quarters that are complete go round. Data moves from GPU to GPU by RDMA WRITE.
package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"time"

	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	ranks  = 4
	floats = 1 << 18            // of a gradient
	part   = floats * 4 / ranks // bytes of a quarter
	steps  = 2 * (ranks - 1)
)

// offer is what a process tells its neighbours.
type offer struct {
	Send, Recv verbs.Endpoint // the queue pair to the next process, and that from the previous one
	Addr       uint64         // where the previous process writes: a place for each step
	RKey       uint32
}

func main() {
	if len(os.Args) == 2 {
		rank(try(strconv.Atoi(os.Args[1])))
		return
	}
	var all [ranks]*process
	for i := range all {
		all[i] = start(i)
	}
	var offers [ranks]offer
	for i, p := range all {
		check(p.out.Decode(&offers[i]))
	}
	for i, p := range all {
		check(p.in.Encode([2]offer{offers[(i+1)%ranks], offers[(i+ranks-1)%ranks]}))
	}
	for _, p := range all { // all queue pairs are connected before the first WRITE
		check(p.out.Decode(new(bool)))
	}
	for _, p := range all {
		check(p.in.Encode(true))
	}
	fmt.Printf("%d processes, gradients of %d numbers\n", ranks, floats)
	for i, p := range all {
		var wrong int
		check(p.out.Decode(&wrong))
		fmt.Printf("rank %d: %d of %d sums are wrong\n", i, wrong, floats)
	}
	for _, p := range all {
		check(p.in.Encode(true)) // nobody leaves before all are done
		check(p.cmd.Wait())
	}
}

// process is a rank, as the first process sees it.
type process struct {
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder
}

func start(i int) *process {
	cmd := exec.Command(try(os.Executable()), strconv.Itoa(i))
	cmd.Stderr = os.Stderr
	in, out := try(cmd.StdinPipe()), try(cmd.StdoutPipe())
	check(cmd.Start())
	return &process{cmd, json.NewEncoder(in), json.NewDecoder(bufio.NewReader(out))}
}

// rank is what one of the four processes does.
func rank(me int) {
	in, out := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	dev := try(gpu.Open("soft:0", nil))
	stream := try(dev.NewStream())
	gradient, inbox := try(dev.Alloc(floats*4)), try(dev.Alloc(steps*part))
	check(stream.Copy(gradient.All(), gpu.Host(mine(me))))

	nic := try(verbs.Open("", nil))
	pd, cq := try(nic.AllocPD()), try(nic.CreateCQ(64, nil))
	send, recv := newQP(pd, cq), newQP(pd, cq)
	from := try(pd.RegGPU(gradient, 0))
	box := try(pd.RegGPU(inbox, verbs.AccessLocalWrite|verbs.AccessRemoteWrite))
	check(out.Encode(offer{send.Endpoint(), recv.Endpoint(), box.Addr(), box.RKey()}))
	var neighbours [2]offer // the next one and the previous one
	check(in.Decode(&neighbours))
	check(send.Connect(neighbours[0].Recv, nil))
	check(recv.Connect(neighbours[1].Send, nil))
	for range steps {
		try(recv.PostRecv([]verbs.RecvWR{{}})) // a WRITE with immediate data consumes one
	}
	check(out.Encode(true))
	check(in.Decode(new(bool)))

	ready := try(stream.Record()) // when what the next step sends is computed
	for step := range steps {
		// Step by step the quarters go round: first sums that grow, then sums that are complete.
		mineNow, theirs := (me-step+2*ranks)%ranks, (me-step-1+2*ranks)%ranks
		try(send.PostSend([]verbs.SendWR{
			{Op: verbs.OpWaitFence, Fence: ready},
			{Op: verbs.OpRDMAWriteImm, Imm: uint32(step), SGL: []verbs.SGE{from.SGE(mineNow*part, part)},
				RemoteAddr: neighbours[0].Addr + uint64(step*part), RKey: neighbours[0].RKey},
		}))
		arrival(cq)
		own, got := gradient.At(uint64(theirs*part), part), inbox.At(uint64(step*part), part)
		if step < ranks-1 {
			check(stream.Add(own, own, got, gpu.Float32))
		} else {
			check(stream.Copy(own, got))
		}
		ready = try(stream.Record())
	}
	check(stream.Sync(context.Background()))
	check(out.Encode(wrong(gradient)))
	check(in.Decode(new(bool)))
	for _, c := range []io.Closer{send, recv, from, box, cq, pd, nic, dev} {
		check(c.Close())
	}
}

// mine returns the gradient of a rank.
func mine(rank int) []byte {
	b := make([]byte, 0, floats*4)
	for i := range floats {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32((rank+1)*(i%1000))))
	}
	return b
}

// wrong returns how many sums are not what they should be: 1 + 2 + 3 + 4 times the number of the first rank.
func wrong(gradient *gpu.Buffer) (n int) {
	b := make([]byte, floats*4)
	try(gradient.ReadAt(b, 0))
	for i := range floats {
		if math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])) != float32(10*(i%1000)) {
			n++
		}
	}
	return n
}

func newQP(pd *verbs.PD, cq *verbs.CQ) *verbs.QP {
	return try(pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq,
		Cap: verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1}}))
}

// arrival waits until the previous process's WRITE has arrived.
func arrival(cq *verbs.CQ) {
	wcs := make([]verbs.WC, 1)
	for end := time.Now().Add(time.Minute); ; runtime.Gosched() {
		if try(cq.Poll(wcs)) == 1 {
			check(wcs[0].Err())
			return
		}
		if time.Now().After(end) {
			log.Fatal("the previous process sends nothing")
		}
	}
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
