package verbs_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/verbena-rdma/verbena/verbs"
)

// connected returns two sides with a reliable connection between them, as
// [Example] makes it.
func connected() (alice, bob *side) {
	alice, bob = newSide(verbs.RC), newSide(verbs.RC)
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	return alice, bob
}

// A SEND takes the oldest receive that the peer has posted.
func ExampleQP_PostSend() {
	alice, bob := connected()
	out, in := []byte("ping"), make([]byte, 64)
	source, target := alice.register(out), bob.register(in)

	_, err := bob.qp.PostRecv([]verbs.RecvWR{{ID: 7, SGL: []verbs.SGE{target.SGE(0, len(in))}}})
	check(err)
	_, err = alice.qp.PostSend([]verbs.SendWR{{
		ID:    1,
		Op:    verbs.OpSendImm,
		Flags: verbs.SendSignaled,
		SGL:   []verbs.SGE{source.SGE(0, len(out))},
		Imm:   0xcafe,
	}})
	check(err)

	got := bob.wait()
	fmt.Printf("Bob:   %d %v %v: %q, immediate %#x\n", got.ID, got.Op, got.Status, in[:got.ByteLen], got.Imm)
	sent := alice.wait()
	fmt.Printf("Alice: %d %v %v\n", sent.ID, sent.Op, sent.Status)

	alice.close(source)
	bob.close(target)
	// Output:
	// Bob:   7 RECV success: "ping", immediate 0xcafe
	// Alice: 1 SEND success
}

// A READ fetches a part of the peer's memory.
func ExampleQP_PostSend_read() {
	alice, bob := connected()
	page, got := []byte("the quick brown fox"), make([]byte, 5)
	source, target := bob.register(page), alice.register(got)

	_, err := alice.qp.PostSend([]verbs.SendWR{{
		Op:         verbs.OpRDMARead,
		Flags:      verbs.SendSignaled,
		SGL:        []verbs.SGE{target.SGE(0, len(got))},
		RemoteAddr: source.Addr() + 10,
		RKey:       source.RKey(),
	}})
	check(err)
	wc := alice.wait()
	fmt.Printf("%v %v: %d bytes, %q\n", wc.Op, wc.Status, wc.ByteLen, got)

	alice.close(target)
	bob.close(source)
	// Output:
	// RDMA_READ success: 5 bytes, "brown"
}

// A WRITE with immediate data takes a receive of the peer, which thereby learns
// that the data is there. The receive needs no memory of its own.
func ExampleQP_PostSend_writeImm() {
	alice, bob := connected()
	page := make([]byte, 16)
	target := bob.register(page)

	_, err := bob.qp.PostRecv([]verbs.RecvWR{{ID: 7}})
	check(err)
	_, err = alice.qp.PostSend([]verbs.SendWR{{
		Op:         verbs.OpRDMAWriteImm,
		Inline:     []byte("page three"),
		RemoteAddr: target.Addr(),
		RKey:       target.RKey(),
		Imm:        3,
	}})
	check(err)

	wc := bob.wait()
	fmt.Printf("%d %v: page %d is %q\n", wc.ID, wc.Op, wc.Imm, page[:wc.ByteLen])

	alice.close()
	bob.close(target)
	// Output:
	// 7 RECV_RDMA_WITH_IMM: page 3 is "page three"
}

// A SEND with invalidate gives memory back that the peer has lent: its key is dead
// when the message has come. The fence keeps it behind the READ, which needs the key
// until it is answered.
func ExampleQP_PostSend_invalidate() {
	alice, bob := connected()
	page, got := []byte("the quick brown fox"), make([]byte, 5)
	lent, err := bob.pd.RegMR(page, verbs.AccessRemoteRead|verbs.AccessRemoteInvalidate)
	check(err)
	target := alice.register(got)

	_, err = bob.qp.PostRecv([]verbs.RecvWR{{}})
	check(err)
	read := verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{target.SGE(0, len(got))},
		RemoteAddr: lent.Addr() + 4, RKey: lent.RKey()}
	_, err = alice.qp.PostSend([]verbs.SendWR{read,
		{Op: verbs.OpSendInv, Flags: verbs.SendFence | verbs.SendSignaled, InvalidateKey: lent.RKey()}})
	check(err)
	fmt.Printf("%v: %q\n", alice.wait().Status, got)
	wc := bob.wait()
	fmt.Println("given back:", wc.Flags == verbs.WCWithInv && wc.InvalidatedKey == lent.RKey())

	_, err = alice.qp.PostSend([]verbs.SendWR{read})
	check(err)
	fmt.Println("once more:", alice.wait().Status)

	alice.close(target)
	bob.close(lent)
	// Output:
	// success: "quick"
	// given back: true
	// once more: remote access error
}

// Atomics work on 8 aligned bytes of the peer's memory, a number in the byte
// order of that host, and return what was there before.
func ExampleQP_PostSend_atomic() {
	alice, bob := connected()
	counter, results := make([]byte, 8), make([]byte, 24)
	binary.NativeEndian.PutUint64(counter, 40)
	target, mr := bob.register(counter), alice.register(results)

	_, err := alice.qp.PostSend([]verbs.SendWR{{
		Op:         verbs.OpAtomicFetchAdd,
		SGL:        []verbs.SGE{mr.SGE(0, 8)},
		RemoteAddr: target.Addr(),
		RKey:       target.RKey(),
		CompareAdd: 2,
	}, {
		Op:         verbs.OpAtomicCmpSwap,
		SGL:        []verbs.SGE{mr.SGE(8, 8)},
		RemoteAddr: target.Addr(),
		RKey:       target.RKey(),
		CompareAdd: 42, // if it is 42 …
		Swap:       7,  // … make it 7
	}, {
		Op:         verbs.OpRDMARead,
		Flags:      verbs.SendSignaled,
		SGL:        []verbs.SGE{mr.SGE(16, 8)},
		RemoteAddr: target.Addr(),
		RKey:       target.RKey(),
	}})
	check(err)
	wc := alice.wait() // the last: the others were not signaled
	fmt.Println(wc.Op, wc.Status)
	fmt.Println("before the addition:", binary.NativeEndian.Uint64(results))
	fmt.Println("before the swap:", binary.NativeEndian.Uint64(results[8:]))
	fmt.Println("after:", binary.NativeEndian.Uint64(results[16:]))

	alice.close(mr)
	bob.close(target)
	// Output:
	// RDMA_READ success
	// before the addition: 40
	// before the swap: 42
	// after: 7
}

// A log in a file of the peer: the record is made persistent before the word that
// publishes it is stored, and then that word too. All of it is posted at once;
// the order is the device's to keep.
func ExampleQP_PostSend_flush() {
	alice, bob := connected()
	file, err := os.CreateTemp("/var/tmp", "log") // on storage: not in memory, as /tmp may be
	check(err)
	check(file.Truncate(4096))
	log, err := syscall.Mmap(int(file.Fd()), 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	check(err)
	target, err := bob.pd.RegMR(log, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessFlushPersistent)
	check(err)

	record := []byte("ten thousand to Bob")
	at := func(off int, wr verbs.SendWR) verbs.SendWR {
		wr.RemoteAddr, wr.RKey = target.Addr()+uint64(off), target.RKey()
		return wr
	}
	flush := func(off, n int) verbs.SendWR {
		return at(off, verbs.SendWR{Op: verbs.OpFlush, RemoteLength: uint32(n),
			FlushType: verbs.FlushPersistent, FlushLevel: verbs.FlushRange})
	}
	wrs := []verbs.SendWR{
		at(8, verbs.SendWR{Op: verbs.OpRDMAWrite, Inline: record}),
		flush(8, len(record)),
		at(0, verbs.SendWR{Op: verbs.OpAtomicWrite, Inline: binary.LittleEndian.AppendUint64(nil, uint64(len(record)))}),
		flush(0, 8),
	}
	wrs[3].Flags = verbs.SendSignaled
	_, err = alice.qp.PostSend(wrs)
	check(err)

	wc := alice.wait() // whatever happens from now on, the record is in the file
	fmt.Println(wc.Op, wc.Status)
	n := binary.LittleEndian.Uint64(log)
	fmt.Printf("%d bytes: %s\n", n, log[8:][:n])

	alice.close()
	bob.close(target)
	check(syscall.Munmap(log))
	check(file.Close())
	check(os.Remove(file.Name()))
	// Output:
	// FLUSH success
	// 19 bytes: ten thousand to Bob
}

// Inline data is copied when it is posted and needs no region. A list is posted
// up to the first request that cannot be; n is the number of those accepted, and
// thus the index of the bad one.
func ExampleQP_PostSend_batch() {
	alice, bob := connected()
	log := make([]byte, 12)
	target := bob.register(log)

	scratch := make([]byte, 4)
	wrs := make([]verbs.SendWR, 0, 4)
	for i, word := range []string{"one ", "two ", "six "} {
		copy(scratch, word)
		wrs = append(wrs[:0], verbs.SendWR{
			Op:         verbs.OpRDMAWrite,
			Inline:     scratch, // reused for the next word at once
			RemoteAddr: target.Addr() + uint64(4*i),
			RKey:       target.RKey(),
		})
		_, err := alice.qp.PostSend(wrs)
		check(err)
	}

	wrs = []verbs.SendWR{
		{ID: 10, Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, Inline: []byte("ten "),
			RemoteAddr: target.Addr() + 8, RKey: target.RKey()},
		{ID: 11, Op: verbs.OpRDMAWrite, Inline: make([]byte, 1<<16)}, // more than MaxInlineData
		{ID: 12, Op: verbs.OpRDMAWrite},
	}
	n, err := alice.qp.PostSend(wrs)
	fmt.Println("accepted:", n)
	fmt.Println("bad:", wrs[n].ID, errors.Is(err, syscall.EINVAL))

	wc := alice.wait()
	fmt.Println(wc.ID, wc.Status)
	fmt.Printf("%q\n", log)

	alice.close()
	bob.close(target)
	// Output:
	// accepted: 1
	// bad: 11 true
	// 10 success
	// "one two ten "
}

// A datagram goes to an address handle and a queue pair number. The receiver
// learns who sent it, and finds 40 bytes of header in front of the message.
func ExamplePD_CreateAH() {
	alice, bob := newSide(verbs.UD), newSide(verbs.UD)
	check(alice.qp.Connect(verbs.Endpoint{}, nil)) // no peer: just ready
	check(bob.qp.Connect(verbs.Endpoint{}, nil))

	in := make([]byte, verbs.GRHLength+64)
	target := bob.register(in)
	_, err := bob.qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{target.SGE(0, len(in))}}})
	check(err)

	to := bob.qp.Endpoint()
	ah, err := alice.pd.CreateAH(verbs.AHAttr{DGID: to.GID})
	check(err)
	_, err = alice.qp.PostSend([]verbs.SendWR{{
		Op:         verbs.OpSend,
		Flags:      verbs.SendSignaled,
		Inline:     []byte("to whom it may concern"),
		AH:         ah,
		RemoteQPN:  to.QPN,
		RemoteQKey: to.QKey,
	}})
	check(err)

	wc := bob.wait()
	fmt.Printf("%v %q\n", wc.Status, in[verbs.GRHLength:wc.ByteLen])
	fmt.Println("from Alice:", wc.SrcQP == alice.qp.Number())
	fmt.Println("sent:", alice.wait().Status)

	check(ah.Close())
	alice.close()
	bob.close(target)
	// Output:
	// success "to whom it may concern"
	// from Alice: true
	// sent: success
}
