package verbs_test

import (
	"context"
	"fmt"
	"os"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/verbs"
)

// A buffer of another device is registered by its descriptor. Its owner moves it, and the peer
// reads it all the same. When its owner takes it away, the peer is refused.
func ExamplePD_RegDMABufMR() {
	alice, bob := connected()
	ctx, page, got := context.Background(), os.Getpagesize(), make([]byte, 5)
	target := alice.register(got)

	// The exporter's part: memory in three pieces that the device sees as one.
	memory, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: uint64(3 * page), Segments: 3})
	check(err)
	_, err = memory.WriteAt([]byte("hello"), int64(page-2)) // across two pieces
	check(err)
	fd, err := memory.Buffer().FD()
	check(err)

	// The importer's part: the region keeps the buffer, so the descriptor can go.
	mr, err := bob.pd.RegDMABufMR(verbs.DMABuf{FD: fd, Length: uint64(3 * page)}, verbs.AccessRemoteRead)
	check(err)
	check(os.NewFile(uintptr(fd), "dma-buf").Close())

	read := []verbs.SendWR{{
		Op:         verbs.OpRDMARead,
		Flags:      verbs.SendSignaled,
		SGL:        []verbs.SGE{target.SGE(0, 5)},
		RemoteAddr: mr.Addr() + uint64(page-2),
		RKey:       mr.RKey(),
	}}
	_, err = alice.qp.PostSend(read)
	check(err)
	fmt.Printf("at its first place: %v: %q\n", alice.wait().Status, got)

	check(memory.Move(ctx))
	clear(got)
	_, err = alice.qp.PostSend(read)
	check(err)
	fmt.Printf("moved:              %v: %q\n", alice.wait().Status, got)
	st := mr.PagingStats()
	fmt.Printf("invalidations: %d, faults: %d\n", st.Invalidations, st.PageFaults)

	check(memory.Revoke(ctx))
	_, err = alice.qp.PostSend(read)
	check(err)
	fmt.Printf("revoked:            %v\n", alice.wait().Status)

	alice.close(target)
	bob.close(mr)
	check(memory.Close())
	// Output:
	// at its first place: success: "hello"
	// moved:              success: "hello"
	// invalidations: 1, faults: 1
	// revoked:            remote access error
}

// Device memory of one device is registered on another one. What a peer of the second device
// writes, the program finds in the memory of the first.
func ExampleDM_DMABuf() {
	alice, bob := connected()
	other, err := verbs.Open("", nil) // the device that has the memory
	check(err)
	dm, err := other.AllocDM(4096, 0)
	check(err)
	buffer, err := dm.DMABuf()
	check(err)
	mr, err := bob.pd.RegDMABufMR(verbs.DMABuf{Buffer: buffer, Length: 4096}, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	check(err)
	buffer.Put() // the region has a reference of its own

	source := alice.register([]byte("straight through"))
	_, err = alice.qp.PostSend([]verbs.SendWR{{
		Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGL: []verbs.SGE{source.SGE(0, 16)}, RKey: mr.RKey(),
	}})
	check(err)
	check(alice.waitErr())
	got := make([]byte, 16)
	_, err = dm.ReadAt(got, 0)
	check(err)
	fmt.Printf("%q\n", got)

	check(dm.Close()) // mr has no memory any more
	alice.close(source)
	bob.close(mr)
	check(other.Close())
	// Output: "straight through"
}
