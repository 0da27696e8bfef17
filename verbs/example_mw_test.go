package verbs_test

import (
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// A memory window lets one peer read a part of a region, until it is taken away
// again. Nothing else of the region is open to anybody.
func ExamplePD_AllocMW() {
	alice, bob := connected()
	memory, got := []byte("mine, and yours for now"), make([]byte, 13)
	mr, err := bob.pd.RegMR(memory, verbs.AccessMWBind)
	check(err)
	mw, err := bob.pd.AllocMW(verbs.MWType2)
	check(err)
	target := alice.register(got)

	bind := mw.Bind(mr, 10, 13, verbs.AccessRemoteRead)
	_, err = bob.qp.PostSend([]verbs.SendWR{{Op: verbs.OpBindMW, Flags: verbs.SendSignaled, Bind: bind}})
	check(err)
	fmt.Println("Bob:  ", bob.wait().Op)

	read := []verbs.SendWR{{
		Op:         verbs.OpRDMARead,
		Flags:      verbs.SendSignaled,
		SGL:        []verbs.SGE{target.SGE(0, 13)},
		RemoteAddr: bind.Addr,
		RKey:       mw.RKey(),
	}}
	_, err = alice.qp.PostSend(read)
	check(err)
	fmt.Printf("Alice: %v: %q\n", alice.wait().Status, got)

	_, err = bob.qp.PostSend([]verbs.SendWR{{Op: verbs.OpLocalInv, Flags: verbs.SendSignaled, InvalidateKey: mw.RKey()}})
	check(err)
	fmt.Println("Bob:  ", bob.wait().Op)
	_, err = alice.qp.PostSend(read)
	check(err)
	fmt.Println("Alice:", alice.wait().Status)

	check(mw.Close())
	alice.close(target)
	bob.close(mr)
	// Output:
	// Bob:   BIND_MW
	// Alice: success: "yours for now"
	// Bob:   LOCAL_INV
	// Alice: remote access error
}

// Two devices, which could be of two processes, have the same memory registered,
// each with rights of its own.
func ExampleMR_Share() {
	alice, bob := connected()
	first, err := alice.pd.AllocMR(4096, verbs.AccessLocalWrite)
	check(err)
	handle, err := first.Share() // to be sent to the other process
	check(err)
	second, err := bob.pd.OpenSharedMR(handle, verbs.AccessRemoteRead)
	check(err)
	copy(first.Bytes(), "one memory")
	fmt.Printf("%q, %v\n", second.Bytes()[:10], second.Access())
	alice.close(first)
	fmt.Printf("%q\n", second.Bytes()[:10])
	bob.close(second)
	// Output:
	// "one memory", remote-read
	// "one memory"
}
