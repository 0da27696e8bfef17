package device

// UC and UD on a network that mistreats packets: what arrives is whole, and a
// request completes when it has left, whatever becomes of it.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
)

// letter fills a message with its number, over and over, and its own length.
func letter(b []byte, number uint32) {
	for i := 0; i+8 <= len(b); i += 8 {
		binary.BigEndian.PutUint32(b[i:], number)
		binary.BigEndian.PutUint32(b[i+4:], uint32(len(b)))
	}
}

// number returns the number of a letter that is whole.
func number(b []byte) (uint32, error) {
	if len(b) < 8 {
		return 0, fmt.Errorf("%d bytes", len(b))
	}
	n := binary.BigEndian.Uint32(b)
	want := make([]byte, len(b))
	letter(want, n)
	if k := firstDifference(b, want); k >= 0 {
		return n, fmt.Errorf("letter %d is not whole: wrong from byte %d on", n, k)
	}
	return n, nil
}

// Of UC messages some are lost; each that arrives is whole, and without
// reordering and duplication none arrives twice or after a later one.
func TestFaultyUC(t *testing.T) {
	seed := testSeed(t)
	for _, w := range []weather{
		{"lossless", link.FaultyConfig{MinDelay: near, MaxDelay: near}},
		{"lossy", link.FaultyConfig{Drop: 0.02, MinDelay: near, MaxDelay: near}},
		{"damaged", link.FaultyConfig{Corrupt: 0.02, MinDelay: near, MaxDelay: near}},
		{"stormy", link.FaultyConfig{Drop: 0.005, Duplicate: 0.01, Reorder: 0.01, MinDelay: near, MaxDelay: near}},
	} {
		for _, op := range []ib.Opcode{ib.OpSendImm, ib.OpRDMAWriteImm} {
			t.Run(fmt.Sprintf("%s/%v", w.name, op), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					cfg := w.cfg
					cfg.Seed = seed
					_, devs := simulated(t, 2, cfg, nil)
					const most = 20 << 10
					a, b := connected(t, devs[0], devs[1], ib.UC, most, func(e *end) { e.pause = virtualPause })
					rng := rand.New(rand.NewPCG(seed, 1))
					var arrived []uint32
					n := lastingOps(120, 1000)
					for i := range n {
						size := 8 * (1 + rng.IntN(most/8))
						letter(a.buf[:size], uint32(i))
						if b.qp.(*QP).recv.Len() == 0 {
							b.recv(ib.RecvWR{SGL: b.sge(0, most)})
						}
						a.post(ib.SendWR{ID: uint64(i), Op: op, SGL: a.sge(0, size), Imm: uint32(i),
							RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
						if wc := a.ok(); wc.ID != uint64(i) {
							t.Fatalf("%+v", wc)
						}
						time.Sleep(500 * time.Microsecond)
						var wc [1]ib.WC
						for {
							k, err := b.cq.Poll(wc[:])
							if err != nil || wc[0].Status != ib.WCSuccess {
								t.Fatal(err, wc[0].Err())
							}
							if k == 0 {
								break
							}
							got, err := number(b.buf[:wc[0].ByteLen])
							if err != nil || got != wc[0].Imm {
								t.Errorf("%+v: %d, %v", wc[0], got, err)
							}
							arrived = append(arrived, got)
						}
					}
					t.Logf("%d of %d arrived", len(arrived), n)
					for i := 1; i < len(arrived) && w.name != "stormy"; i++ {
						if arrived[i] <= arrived[i-1] {
							t.Errorf("%d arrived after %d", arrived[i], arrived[i-1])
						}
					}
					if w.name == "lossless" && len(arrived) != n || len(arrived) < n/4 || w.name == "lossy" && len(arrived) == n {
						t.Errorf("%d of %d arrived", len(arrived), n)
					}
				})
			})
		}
	}
}

// Datagrams arrive whole or not at all, with the sender's number and header.
func TestFaultyUD(t *testing.T) {
	seed := testSeed(t)
	synctest.Test(t, func(t *testing.T) {
		_, devs := simulated(t, 3, link.FaultyConfig{Seed: seed, Drop: 0.05, Duplicate: 0.02, Reorder: 0.05, Corrupt: 0.03,
			MinDelay: near, MaxDelay: 2 * near, MTU: 2048}, nil)
		const qkey, deep = 0x11223344, 64
		var ends [3]*end
		for i, d := range devs {
			e := newEnd(t, d, ib.UD, deep*4096)
			t.Cleanup(e.close)
			e.pause = virtualPause
			e.openDatagrams(qkey)
			ends[i] = e
		}
		a, b, target := ends[0], ends[1], ends[2]
		ahs := [2]*ib.AH{}
		for i, e := range []*end{a, b} {
			ahs[i] = must[*ib.AH](t)(e.pd.CreateAH(ib.AHAttr{DGID: target.dev.GIDs()[0], TrafficClass: 0x68, HopLimit: 33}))
			t.Cleanup(func() { closeAll(t, ahs[i]) })
		}
		rng := rand.New(rand.NewPCG(seed, 1))
		n, arrived := lastingOps(300, 3000), 0
		for i := range n {
			from := i % 2
			e := ends[from]
			for target.qp.(*QP).recv.Len() < deep/2 {
				target.recv(ib.RecvWR{ID: uint64(i % deep), SGL: target.sge(i%deep*4096, 4096)})
			}
			size := 8 * (1 + rng.IntN(2048/8))
			letter(e.buf[:size], uint32(i))
			e.post(ib.SendWR{ID: uint64(i), Op: ib.OpSendImm, SGL: e.sge(0, size), Imm: uint32(i), AH: ahs[from],
				RemoteQPN: target.qp.Number(), RemoteQKey: qkey})
			if wc := e.ok(); wc.ID != uint64(i) {
				t.Fatalf("%+v", wc)
			}
			time.Sleep(100 * time.Microsecond)
			var wc [1]ib.WC
			for k, _ := target.cq.Poll(wc[:]); k > 0; k, _ = target.cq.Poll(wc[:]) {
				if err := wc[0].Err(); err != nil {
					t.Fatal(err)
				}
				buf := target.buf[wc[0].ID*4096:][:wc[0].ByteLen]
				got, err := number(buf[ib.GRHLength:])
				src := ends[got%2]
				if err != nil || got != wc[0].Imm || wc[0].SrcQP != src.qp.Number() || wc[0].Flags != ib.WCGRH|ib.WCWithImm || wc[0].SL != ib.WCIPv4 {
					t.Errorf("%+v: %d, %v", wc[0], got, err)
				}
				// For IPv4 the last 20 of the 40 bytes are its header.
				ip := buf[20:40]
				from, to := src.dev.addrs[0].As4(), target.dev.addrs[0].As4()
				if ip[0] != 0x45 || ip[1] != 0x68 || ip[8] != 33 || !bytes.Equal(ip[12:16], from[:]) || !bytes.Equal(ip[16:20], to[:]) {
					t.Errorf("header % x", ip)
				}
				arrived++
			}
		}
		if arrived < n/2 {
			t.Errorf("%d of %d arrived", arrived, n)
		}
		if c := countsOf(target.dev); c["drop_no_receive"] != 0 || c["drop_bad_icrc"] == 0 {
			t.Errorf("%v", c)
		}
	})
}

// openDatagrams takes a UD queue pair to RTS.
func (e *end) openDatagrams(qkey uint32) {
	e.t.Helper()
	e.modify(ib.QPAttr{State: ib.QPInit, Port: 1, QKey: qkey}, ib.QPMaskPort|ib.QPMaskPKeyIndex|ib.QPMaskQKey)
	e.modify(ib.QPAttr{State: ib.QPRTR}, 0)
	e.modify(ib.QPAttr{State: ib.QPRTS, SQPSN: e.psn}, ib.QPMaskSQPSN)
}
