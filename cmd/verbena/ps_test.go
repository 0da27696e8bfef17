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
	lent, err := pd.RegMR(make([]byte, 4096), verbs.AccessLocalWrite|verbs.AccessMWBind)
	if err != nil {
		t.Fatal(err)
	}
	mw, err := pd.AllocMW(verbs.MWType1)
	if err != nil {
		t.Fatal(err)
	}
	free, err := pd.AllocMW(verbs.MWType2)
	if err != nil {
		t.Fatal(err)
	}
	dm, err := dev.AllocDM(2048, 0)
	if err != nil {
		t.Fatal(err)
	}
	dmr, err := pd.RegDMMR(dm, 0, 1024, verbs.AccessLocalWrite|verbs.AccessZeroBased)
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(t.TempDir() + "/domain")
	if err != nil {
		t.Fatal(err)
	}
	named, err := dev.OpenXRCD(&verbs.XRCDConfig{File: file, Create: true})
	if err != nil {
		t.Fatal(err)
	}
	xrcd, err := dev.OpenXRCD(&verbs.XRCDConfig{Create: true})
	if err != nil {
		t.Fatal(err)
	}
	target, err := xrcd.CreateQP()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, c := range []interface{ Close() error }{target, xrcd, named, file, dmr, dm, mw, free, lent, mr, qp, cq, pd, dev} {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
	}()
	if err := qp.Connect(qp.Endpoint(), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := qp.BindMW(mw, 1, verbs.SendSignaled, verbs.MWBind{LKey: lent.LKey(), Addr: lent.Addr() + 96, Length: 1000, Access: verbs.AccessRemoteRead}); err != nil {
		t.Fatal(err)
	}
	for wc := make([]verbs.WC, 1); ; {
		if n, err := cq.Poll(wc); err != nil || n == 1 && wc[0].Err() != nil {
			t.Fatal(err, wc)
		} else if n == 1 {
			break
		}
	}

	out := succeed(t, "ps", "-q", "-m", "-x").stdout
	for _, want := range []string{
		`(?m)^ADDRESS +PID +PROGRAM`,
		`(?m)^127\.77\.0\.203 +` + regexp.QuoteMeta(strconv.Itoa(os.Getpid())) + ` +\S+ +2 +3 +17\.1 KiB +2 +2\.0 KiB +2 +1 `,
		`QP 0x` + fmt.Sprintf("%06x", qp.Number()) + ` +RC +RTS`,
		`MR 0x[0-9a-f]+ +pinned +12\.1 KiB +local-write`,
		`MW ` + fmt.Sprintf("%#x", lent.Addr()+96) + ` +type 1 +1000 B +remote-read`,
		`MW +type 2 +free`,
		`DM 1 +plain +1 +2\.0 KiB`,
		`XRCD 1 +0 +file [0-9a-f]+:\d+ +opened 1 times, 0 SRQs`,
		`XRCD 2 +1 +no file +opened 1 times, 0 SRQs`,
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
			found = len(d.Processes) == 1 && p.PID == os.Getpid() && p.Answered && len(p.QPs) == 2 && len(p.MRs) == 3 &&
				len(p.MWs) == 2 && p.MWs[0].Bound != p.MWs[1].Bound && len(p.DMs) == 1 && p.DMs[0].MRs == 1 && len(p.XRCDs) == 2 && p.XRCDs[1].QPs == 1
		}
	}
	if !found {
		t.Errorf("%+v", list)
	}
	if regexp.MustCompile(`"[lr]?key"`).MatchString(succeed(t, "ps", "--json").stdout) {
		t.Error("keys are told")
	}
}

// ps shows the shard of each queue pair: the first one until it is connected by packets, and
// then that of its number.
func TestPSShards(t *testing.T) {
	const most = 3
	addrs := []string{"127.77.0.216", "127.77.0.217"}
	var qps [2][most]*verbs.QP
	for i, addr := range addrs {
		dev, err := verbs.Open(addr, &verbs.Config{Link: verbs.LinkUDP, Receivers: most})
		if err != nil {
			t.Fatal(err)
		}
		pd, err := dev.AllocPD()
		if err != nil {
			t.Fatal(err)
		}
		for k := range most { // queue pairs of one completion queue would share a shard
			cq, err := dev.CreateCQ(1, nil)
			if err != nil {
				t.Fatal(err)
			}
			if qps[i][k], err = pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 1}}); err != nil {
				t.Fatal(err)
			}
			defer func() { _, _ = qps[i][k].Close(), cq.Close() }()
		}
		t.Cleanup(func() { _, _ = pd.Close(), dev.Close() })
	}
	wantShards(t, addrs[0], qps[0][:], 0, 0, 0)
	for k, q := range qps[0] {
		if err := q.Connect(qps[1][k].Endpoint(), nil); err != nil {
			t.Fatal(err)
		}
	}
	wantShards(t, addrs[0], qps[0][:], 0, 1, 2)
	wantShards(t, addrs[1], qps[1][:], 0, 0, 0)
}

// wantShards checks in which shards ps shows the queue pairs of the device at an address.
func wantShards(t *testing.T, addr string, qps []*verbs.QP, want ...int) {
	t.Helper()
	out := succeed(t, "ps", "--qps").stdout
	var list []verbs.DeviceResources
	if err := json.Unmarshal([]byte(succeed(t, "ps", "--json").stdout), &list); err != nil {
		t.Fatal(err)
	}
	got := map[uint32]int{}
	for _, d := range list {
		if d.Addr.String() == addr {
			for _, q := range d.Processes[0].QPs {
				got[q.Number] = q.Shard
			}
		}
	}
	for k, q := range qps {
		if n, ok := got[q.Number()]; !ok || n != want[k] {
			t.Errorf("queue pair %d of %s: shard %d (listed: %v), want %d", k, addr, n, ok, want[k])
		}
		line := fmt.Sprintf(`QP 0x%06x +RC .* shard %d `, q.Number(), want[k])
		if !regexp.MustCompile(line).MatchString(out) {
			t.Errorf("no line like %s in\n%s", line, out)
		}
	}
}
