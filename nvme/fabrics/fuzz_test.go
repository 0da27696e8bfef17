package fabrics

import (
	"testing"

	"github.com/verbena-rdma/verbena/nvme"
)

// FuzzCapsule: whatever a host sends, the data of a command that is taken lies in its capsule, or is no more than what a command
// may move; and executing it does not go beyond that.
func FuzzCapsule(f *testing.F) {
	add := func(cmd nvme.Command, s nvme.SGL, admin bool, data int) {
		var b [commandBytes]byte
		cmd.SetSGL(s)
		cmd.Put(&b)
		f.Add(append(b[:], make([]byte, data)...), admin)
	}
	write := nvme.Command{Opcode: nvme.IOWrite, NSID: 1}
	add(write, nvme.SGL{Type: nvme.SGLData, Sub: nvme.SGLOffset, Length: 512}, false, 512)
	add(write, nvme.SGL{Type: nvme.SGLData, Sub: nvme.SGLOffset, Length: 512, Addr: ^uint64(0)}, false, 512)
	add(write, nvme.SGL{Type: nvme.SGLKeyed, Length: 512, Key: 7}, false, 0)
	add(nvme.Command{Opcode: nvme.AdminIdentify, CDW10: 1}, nvme.SGL{Type: nvme.SGLKeyed, Sub: nvme.SGLInvalidate, Length: 4096}, true, 0)
	add(nvme.ConnectCommand(nvme.Connect{SQSize: 31}), nvme.SGL{Type: nvme.SGLKeyed, Length: 1024}, true, 0)
	sub := disk(f, 1<<20, 512)
	cfg := TargetConfig{Subsystems: []*nvme.Subsystem{sub}}
	check(f, cfg.complete())
	ctrl := must[*nvme.Controller](f)(sub.NewController(nvme.ControllerConfig{Transport: nvme.TransportRDMA, MDTS: 8, InCapsule: cfg.InCapsule, Complete: func(nvme.Completion) {}}))
	f.Cleanup(ctrl.Close)
	f.Fuzz(func(t *testing.T, capsule []byte, admin bool) {
		if len(capsule) < commandBytes || len(capsule) > commandBytes+cfg.InCapsule {
			return
		}
		q := &queue{t: &Target{cfg: cfg}, qid: 1}
		q.of = &association{t: q.t}
		q.of.ctrl.Store(ctrl)
		q.of.props.up.Store(true)
		if admin {
			q.qid = 0
		}
		s := &slot{}
		s.n = len(capsule)
		s.cmd = nvme.ParseCommand((*[commandBytes]byte)(capsule))
		s.where = s.cmd.SGL()
		var st nvme.Status
		if s.need, s.dir, st = q.transfer(s); st == nvme.StatusSuccess {
			st = q.checkData(s)
		}
		if st != nvme.StatusSuccess {
			return
		}
		if s.need < 0 || s.need > cfg.MaxTransfer {
			t.Fatalf("%d bytes", s.need)
		}
		var data []byte
		if s.dir != nvme.NoData && s.need > 0 {
			if isInCapsule(&s.where) {
				data = capsule[commandBytes+int(s.where.Addr):][:s.need:s.need]
			} else {
				data = make([]byte, s.need)
			}
		}
		if s.cmd.Opcode == nvme.OpcodeFabrics {
			s.data[0] = data
			if s.cmd.FabricsType() != nvme.FabricsConnect {
				q.fabrics(s)
			}
			return
		}
		ctrl.Execute(admin, &s.cmd, [][]byte{data})
	})
}
