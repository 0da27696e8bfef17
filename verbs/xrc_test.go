package verbs_test

// What the documentation promises of XRC domains, tried on the software device.

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

func TestXRCDErrnos(t *testing.T) {
	dev := ok[*verbs.Device](t)(verbs.Open("", nil))
	other := ok[*verbs.Device](t)(verbs.Open("", nil))
	file := ok[*os.File](t)(os.Create(filepath.Join(t.TempDir(), "domain")))
	again := ok[*os.File](t)(os.Open(file.Name()))
	open := func(cfg *verbs.XRCDConfig) (*verbs.XRCD, error) { return dev.OpenXRCD(cfg) }

	wantErrno(t, "nothing to open", errOf(open(&verbs.XRCDConfig{})), syscall.EINVAL)
	wantErrno(t, "new without creating", errOf(open(&verbs.XRCDConfig{File: file, Exclusive: true})), syscall.EINVAL)
	wantErrno(t, "none that the file names", errOf(open(&verbs.XRCDConfig{File: file})), syscall.EAGAIN)
	x := ok[*verbs.XRCD](t)(open(&verbs.XRCDConfig{File: file, Create: true, Exclusive: true}))
	wantErrno(t, "not new", errOf(open(&verbs.XRCDConfig{File: again, Create: true, Exclusive: true})), syscall.EINVAL)
	wantErrno(t, "another device's", errOf(other.OpenXRCD(&verbs.XRCDConfig{File: file})), syscall.EAGAIN)
	same := ok[*verbs.XRCD](t)(open(&verbs.XRCDConfig{File: again, Create: true}))
	alone := ok[*verbs.XRCD](t)(open(nil))
	closeAll(t, file, again) // not needed any more
	_, err := open(&verbs.XRCDConfig{File: file, Create: true})
	if err == nil {
		t.Error("a closed file names a domain")
	}

	pd, cq := ok[*verbs.PD](t)(dev.AllocPD()), ok[*verbs.CQ](t)(dev.CreateCQ(4, nil))
	opd, ocq := ok[*verbs.PD](t)(other.AllocPD()), ok[*verbs.CQ](t)(other.CreateCQ(4, nil))
	srq := ok[*verbs.SRQ](t)(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 4, MaxSGE: 1, XRCD: same, CQ: cq}))
	target := ok[*verbs.QP](t)(x.CreateQP())
	initiator := ok[*verbs.QP](t)(pd.CreateQP(&verbs.QPConfig{Type: verbs.XRCSend, SendCQ: cq, Cap: verbs.QPCap{MaxSendWR: 1}}))
	plain := ok[*verbs.SRQ](t)(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 4}))
	if n := srq.Number(); n == 0 || n >= 1<<24 || n == plain.Number() {
		t.Errorf("the queues' numbers are %#x and %#x", n, plain.Number())
	}
	for _, c := range []struct {
		name string
		err  error
		want syscall.Errno
	}{
		{"SRQ without CQ", errOf(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, XRCD: x})), syscall.EINVAL},
		{"SRQ without XRCD", errOf(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, CQ: cq})), syscall.EINVAL},
		{"SRQ on a foreign XRCD", errOf(opd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, XRCD: x, CQ: ocq})), syscall.EINVAL},
		{"SRQ on a foreign CQ", errOf(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, XRCD: x, CQ: ocq})), syscall.EINVAL},
		{"RC on it", errOf(pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, SRQ: srq})), syscall.EINVAL},
		{"initiator with a receive side", errOf(pd.CreateQP(&verbs.QPConfig{Type: verbs.XRCSend, SendCQ: cq, RecvCQ: cq})), syscall.EINVAL},
		{"initiator with an SRQ", errOf(pd.CreateQP(&verbs.QPConfig{Type: verbs.XRCSend, SendCQ: cq, SRQ: plain})), syscall.EINVAL},
		{"target in a PD", errOf(pd.CreateQP(&verbs.QPConfig{Type: verbs.XRCRecv, SendCQ: cq, RecvCQ: cq})), syscall.EINVAL},
		{"PostRecv on a target", errOf(target.PostRecv(make([]verbs.RecvWR, 1))), syscall.EINVAL},
		{"PostRecv on an initiator", errOf(initiator.PostRecv(make([]verbs.RecvWR, 1))), syscall.EINVAL},
		{"domain of a target", x.Close(), syscall.EBUSY},
		{"domain of a queue", same.Close(), syscall.EBUSY},
		{"CQ of a queue", cq.Close(), syscall.EBUSY},
		{"PD of a queue", pd.Close(), syscall.EBUSY},
		{"device with domains", dev.Close(), syscall.EBUSY},
	} {
		wantErrno(t, c.name, c.err, c.want)
	}
	if target.Type() != verbs.XRCRecv || initiator.Type() != verbs.XRCSend {
		t.Errorf("types %v and %v", target.Type(), initiator.Type())
	}
	closeAll(t, initiator, target, srq, plain, x, x, same, alone)
	wantErrno(t, "target in a closed domain", errOf(x.CreateQP()), syscall.EINVAL)
	wantErrno(t, "queue in a closed domain", errOf(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, XRCD: x, CQ: cq})), syscall.EINVAL)
	wantErrno(t, "target closed", errOf(target.Query()), syscall.EINVAL)
	closeAll(t, cq, ocq, pd, opd, dev, other)
}

// Limits hold for what XRC makes too.
func TestXRCDLimits(t *testing.T) {
	dev := ok[*verbs.Device](t)(verbs.Open("", &verbs.Config{Limits: verbs.Limits{PDs: 1, QPs: 1, SRQs: 1}}))
	x := ok[*verbs.XRCD](t)(dev.OpenXRCD(nil))
	wantErrno(t, "domains", errOf(dev.OpenXRCD(nil)), syscall.ENOMEM)
	target := ok[*verbs.QP](t)(x.CreateQP())
	wantErrno(t, "queue pairs", errOf(x.CreateQP()), syscall.ENOMEM)
	pd, cq := ok[*verbs.PD](t)(dev.AllocPD()), ok[*verbs.CQ](t)(dev.CreateCQ(4, nil))
	srq := ok[*verbs.SRQ](t)(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, XRCD: x, CQ: cq}))
	wantErrno(t, "queues", errOf(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, XRCD: x, CQ: cq})), syscall.ENOMEM)
	closeAll(t, srq, target, cq, pd, x)
	closeAll(t, dev)
}
