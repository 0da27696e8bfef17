// Command twohosts is two programs: with -listen a server that lends 64 bytes of its
// memory, with -connect a client that writes there. They may run on two hosts. A TCP
// connection carries what each must know of the other, and nothing else.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net"
	"runtime"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// offer is what one side tells the other: its queue pair (GID, QPN and PSN), and,
// from the server, an address and a key of its memory.
type offer struct {
	Endpoint verbs.Endpoint
	Addr     uint64
	RKey     uint32
}

func main() {
	listen := flag.String("listen", "", "be the server, on this TCP `address`")
	connect := flag.String("connect", "", "be the client of the server on this TCP `address`")
	device := flag.String("device", "", "the RDMA `device`: an IP address or an interface of this host (default: a free loopback address)")
	flag.Parse()

	dev := try(verbs.Open(*device, nil))
	pd := try(dev.AllocPD())
	cq := try(dev.CreateCQ(16, nil))
	qp := try(pd.CreateQP(&verbs.QPConfig{
		Type: verbs.RC, SendCQ: cq, RecvCQ: cq,
		Cap: verbs.QPCap{MaxSendWR: 8, MaxSendSGE: 1},
	}))
	buf := make([]byte, 64)
	switch {
	case *listen != "" && *connect == "":
		mr := try(pd.RegMR(buf, verbs.AccessLocalWrite|verbs.AccessRemoteWrite))
		serve(*listen, qp, mr)
		fmt.Printf("the client has written %q\n", bytes.TrimRight(buf, "\x00"))
		check(mr.Close())
	case *connect != "" && *listen == "":
		n := copy(buf, "hello from the other process")
		mr := try(pd.RegMR(buf, 0))
		call(*connect, qp, cq, mr.SGE(0, n))
		check(mr.Close())
	default:
		log.Fatal("say -listen ADDRESS or -connect ADDRESS")
	}
	check(qp.Close())
	check(cq.Close())
	check(pd.Close())
	check(dev.Close())
}

// serve lends mr to one client, and returns when the client says that it is done.
func serve(address string, qp *verbs.QP, mr *verbs.MR) {
	ln := try(net.Listen("tcp", address))
	fmt.Println("listening on", ln.Addr())
	check(ln.(*net.TCPListener).SetDeadline(time.Now().Add(time.Minute)))
	conn := try(ln.Accept())
	check(conn.SetDeadline(time.Now().Add(10 * time.Second)))
	in, out := json.NewDecoder(conn), json.NewEncoder(conn)

	var client offer
	check(in.Decode(&client))
	check(qp.Connect(client.Endpoint, nil))
	mine := offer{Endpoint: qp.Endpoint(), Addr: mr.Addr(), RKey: mr.RKey()}
	check(out.Encode(mine)) // the queue pair is ready by now
	fmt.Printf("my offer: QPN %#x, PSN %#x, address %#x, key %#x\n",
		mine.Endpoint.QPN, mine.Endpoint.PSN, mine.Addr, mine.RKey)

	var done bool
	check(in.Decode(&done)) // this program sleeps here while its memory is written
	check(conn.Close())
	check(ln.Close())
}

// call writes the bytes that sge names into the memory that the server lends.
func call(address string, qp *verbs.QP, cq *verbs.CQ, sge verbs.SGE) {
	conn := try(net.Dial("tcp", address))
	check(conn.SetDeadline(time.Now().Add(10 * time.Second)))
	in, out := json.NewDecoder(conn), json.NewEncoder(conn)

	check(out.Encode(offer{Endpoint: qp.Endpoint()}))
	var server offer
	check(in.Decode(&server))
	check(qp.Connect(server.Endpoint, nil))

	try(qp.PostSend([]verbs.SendWR{{
		Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGL: []verbs.SGE{sge},
		RemoteAddr: server.Addr, RKey: server.RKey,
	}}))
	wcs := make([]verbs.WC, 1)
	for try(cq.Poll(wcs)) == 0 { // a peer that does not answer ends this too, after two seconds
		runtime.Gosched()
	}
	check(wcs[0].Err())
	fmt.Printf("%v: %v\n", wcs[0].Op, wcs[0].Status)

	check(out.Encode(true)) // done
	check(conn.Close())
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
