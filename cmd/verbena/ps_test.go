package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// ps shows a device that this process has open, with a queue pair and a region.
func TestPS(t *testing.T) {
	const addr = "127.77.0.203"
	dev, err := verbs.Open(addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	pd, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	cq, err := dev.CreateCQ(10, nil)
	if err != nil {
		t.Fatal(err)
	}
	qp, err := pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1}})
	if err != nil {
		t.Fatal(err)
	}
	mr, err := pd.RegMR(make([]byte, 12345), verbs.AccessLocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, c := range []interface{ Close() error }{mr, qp, cq, pd, dev} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}()

	out := succeed(t, "ps", "-q", "-m").stdout
	for _, want := range []string{
		`(?m)^ADDRESS +PID +PROGRAM`,
		`(?m)^127\.77\.0\.203 +` + regexp.QuoteMeta(strconv.Itoa(os.Getpid())) + `\* +\S+ +1 +1 +12\.1 KiB +1 `,
		`QP 0x` + fmt.Sprintf("%06x", qp.Number()) + ` +RC +RESET`,
		`MR 0x[0-9a-f]+ +pinned +12\.1 KiB +local-write`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no line like %s in\n%s", want, out)
		}
	}

	var list []verbs.DeviceResources
	if err := json.Unmarshal([]byte(succeed(t, "ps", "--json").stdout), &list); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, d := range list {
		if d.Addr.String() == addr {
			p := d.Processes[0]
			found = len(d.Processes) == 1 && p.PID == os.Getpid() && p.Owner && p.Answered && len(p.QPs) == 1 && p.QPs[0].Number == qp.Number() &&
				len(p.MRs) == 1 && p.MRs[0].Length == 12345
		}
	}
	if !found {
		t.Errorf("%+v", list)
	}
	if regexp.MustCompile(`"[lr]?key"`).MatchString(succeed(t, "ps", "--json").stdout) {
		t.Error("keys are told")
	}
}
