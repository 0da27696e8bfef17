package verbs_test

import (
	"fmt"
	"net/netip"

	"github.com/verbena-rdma/verbena/verbs"
)

// Two queue pairs are members of a group; a message to it reaches both of them, the
// sender too.
func ExampleQP_AttachMcast() {
	dev, err := verbs.Open("", nil)
	check(err)
	defer dev.Close()
	pd, err := dev.AllocPD()
	check(err)
	defer pd.Close()
	cq, err := dev.CreateCQ(16, nil)
	check(err)
	defer cq.Close()
	buf := make([]byte, 2*256)
	mr, err := pd.RegMR(buf, verbs.AccessLocalWrite)
	check(err)
	defer mr.Close()

	group := verbs.GIDFromAddr(netip.MustParseAddr("239.77.77.77"))
	const qkey = 0x1234 // the same for all members
	var members [2]*verbs.QP
	for i := range members {
		qp, err := pd.CreateQP(&verbs.QPConfig{Type: verbs.UD, SendCQ: cq, RecvCQ: cq,
			Cap: verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 64}})
		check(err)
		defer qp.Close() // which leaves the group
		check(qp.ToInit(&verbs.QPAttr{Port: 1, QKey: qkey}))
		check(qp.ToRTR(&verbs.QPAttr{}))
		check(qp.ToRTS(&verbs.QPAttr{}))
		check(qp.AttachMcast(group))
		_, err = qp.PostRecv([]verbs.RecvWR{{ID: uint64(i), SGL: []verbs.SGE{mr.SGE(256*i, 256)}}})
		check(err)
		members[i] = qp
	}

	ah, err := pd.CreateAH(verbs.AHAttr{DGID: group})
	check(err)
	defer ah.Close()
	_, err = members[0].PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte("to all"), AH: ah,
		RemoteQPN: verbs.MulticastQPN, RemoteQKey: qkey}})
	check(err)

	for range members {
		var wc [1]verbs.WC
		for n := 0; n == 0; {
			n, err = cq.Poll(wc[:])
			check(err)
		}
		got := buf[256*wc[0].ID:][:wc[0].ByteLen]
		fmt.Printf("%s\n", got[verbs.GRHLength:])
	}
	// Output:
	// to all
	// to all
}
