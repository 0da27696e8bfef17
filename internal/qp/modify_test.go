package qp

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
)

// attributes of Modify by the names that its messages use, with a value that is
// good for each, and how to see in Query that it was set.
var attributes = map[string]struct {
	bit  ib.QPAttrMask
	seen func(got, set *ib.QPAttr) bool
}{
	"cur_state":           {ib.QPMaskCurState, func(g, s *ib.QPAttr) bool { return true }},
	"access_flags":        {ib.QPMaskAccess, func(g, s *ib.QPAttr) bool { return g.Access == s.Access }},
	"pkey_index":          {ib.QPMaskPKeyIndex, func(g, s *ib.QPAttr) bool { return g.PKeyIndex == s.PKeyIndex }},
	"port":                {ib.QPMaskPort, func(g, s *ib.QPAttr) bool { return g.Port == s.Port }},
	"qkey":                {ib.QPMaskQKey, func(g, s *ib.QPAttr) bool { return g.QKey == s.QKey }},
	"av":                  {ib.QPMaskAV, func(g, s *ib.QPAttr) bool { return g.AV == s.AV }},
	"path_mtu":            {ib.QPMaskPathMTU, func(g, s *ib.QPAttr) bool { return g.PathMTU == s.PathMTU }},
	"timeout":             {ib.QPMaskTimeout, func(g, s *ib.QPAttr) bool { return g.Timeout == s.Timeout }},
	"retry_cnt":           {ib.QPMaskRetryCnt, func(g, s *ib.QPAttr) bool { return g.RetryCnt == s.RetryCnt }},
	"rnr_retry":           {ib.QPMaskRNRRetry, func(g, s *ib.QPAttr) bool { return g.RNRRetry == s.RNRRetry }},
	"rq_psn":              {ib.QPMaskRQPSN, func(g, s *ib.QPAttr) bool { return g.RQPSN == s.RQPSN }},
	"max_rd_atomic":       {ib.QPMaskMaxRDAtomic, func(g, s *ib.QPAttr) bool { return g.MaxRDAtomic == s.MaxRDAtomic }},
	"min_rnr_timer":       {ib.QPMaskMinRNRTimer, func(g, s *ib.QPAttr) bool { return g.MinRNRTimer == s.MinRNRTimer }},
	"sq_psn":              {ib.QPMaskSQPSN, func(g, s *ib.QPAttr) bool { return g.SQPSN == s.SQPSN }},
	"max_dest_rd_atomic":  {ib.QPMaskMaxDestRDAtomic, func(g, s *ib.QPAttr) bool { return g.MaxDestRDAtomic == s.MaxDestRDAtomic }},
	"cap":                 {ib.QPMaskCap, nil},
	"dest_qpn":            {ib.QPMaskDestQPN, func(g, s *ib.QPAttr) bool { return g.DestQPN == s.DestQPN }},
	"en_sqd_async_notify": {ib.QPMaskSQDAsyncNotify, func(g, s *ib.QPAttr) bool { return g.SQDAsyncNotify == s.SQDAsyncNotify }},
	"alt_path":            {ib.QPMaskAltPath, nil},
	"path_mig_state":      {ib.QPMaskPathMigState, nil},
}

// legal is the table of IBA 11.2.5.2 as the specification has it, less what a
// device without alternate paths leaves out: for each transition what it needs,
// and after the bar what it may have. It is written down a second time here, so
// that a slip in one of the two shows.
var legal = map[string]string{
	"RC RESET>INIT": "pkey_index port access_flags |",
	"UC RESET>INIT": "pkey_index port access_flags |",
	"UD RESET>INIT": "pkey_index port qkey |",
	"RC INIT>INIT":  "| pkey_index port access_flags",
	"UC INIT>INIT":  "| pkey_index port access_flags",
	"UD INIT>INIT":  "| pkey_index port qkey",
	"RC INIT>RTR":   "av path_mtu dest_qpn rq_psn max_dest_rd_atomic min_rnr_timer | pkey_index access_flags",
	"UC INIT>RTR":   "av path_mtu dest_qpn rq_psn | pkey_index access_flags",
	"UD INIT>RTR":   "| pkey_index qkey",
	"RC RTR>RTS":    "sq_psn timeout retry_cnt rnr_retry max_rd_atomic | cur_state access_flags min_rnr_timer",
	"UC RTR>RTS":    "sq_psn | cur_state access_flags",
	"UD RTR>RTS":    "sq_psn | cur_state qkey",
	"RC RTS>RTS":    "| cur_state access_flags min_rnr_timer",
	"UC RTS>RTS":    "| cur_state access_flags",
	"UD RTS>RTS":    "| cur_state qkey",
	"RC RTS>SQD":    "| en_sqd_async_notify",
	"UC RTS>SQD":    "| en_sqd_async_notify",
	"UD RTS>SQD":    "| en_sqd_async_notify",
	"RC SQD>RTS":    "| cur_state access_flags min_rnr_timer",
	"UC SQD>RTS":    "| cur_state access_flags",
	"UD SQD>RTS":    "| cur_state qkey",
	"RC SQD>SQD": "| port av timeout retry_cnt rnr_retry max_rd_atomic max_dest_rd_atomic access_flags pkey_index " +
		"min_rnr_timer",
	"UC SQD>SQD": "| av access_flags pkey_index",
	"UD SQD>SQD": "| pkey_index qkey",
	"UC SQE>RTS": "| cur_state access_flags",
	"UD SQE>RTS": "| cur_state qkey",

	// IBA annex A14; as the table of the kernel's verbs has them too
	"XRC_SEND RESET>INIT": "pkey_index port access_flags |",
	"XRC_RECV RESET>INIT": "pkey_index port access_flags |",
	"XRC_SEND INIT>INIT":  "| pkey_index port access_flags",
	"XRC_RECV INIT>INIT":  "| pkey_index port access_flags",
	"XRC_SEND INIT>RTR":   "av path_mtu dest_qpn rq_psn | pkey_index access_flags",
	"XRC_RECV INIT>RTR":   "av path_mtu dest_qpn rq_psn max_dest_rd_atomic min_rnr_timer | pkey_index access_flags",
	"XRC_SEND RTR>RTS":    "sq_psn timeout retry_cnt rnr_retry max_rd_atomic | cur_state access_flags",
	"XRC_RECV RTR>RTS":    "sq_psn timeout | cur_state access_flags min_rnr_timer",
	"XRC_SEND RTS>RTS":    "| cur_state access_flags",
	"XRC_RECV RTS>RTS":    "| cur_state access_flags min_rnr_timer",
	"XRC_SEND RTS>SQD":    "| en_sqd_async_notify",
	"XRC_RECV RTS>SQD":    "| en_sqd_async_notify",
	"XRC_SEND SQD>RTS":    "| cur_state access_flags",
	"XRC_RECV SQD>RTS":    "| cur_state access_flags min_rnr_timer",
	"XRC_SEND SQD>SQD":    "| port av timeout retry_cnt rnr_retry max_rd_atomic access_flags pkey_index",
	"XRC_RECV SQD>SQD":    "| port av timeout max_dest_rd_atomic access_flags pkey_index min_rnr_timer",
}

func maskOf(t *testing.T, names string) (m ib.QPAttrMask) {
	for _, n := range strings.Fields(names) {
		a, ok := attributes[n]
		if !ok {
			t.Fatalf("no attribute %q", n)
		}
		m |= a.bit
	}
	return m
}

// good are values that every transition accepts.
func good(from, to ib.QPState) ib.QPAttr {
	return ib.QPAttr{State: to, CurState: from, Access: ib.AccessRemoteRead, Port: 1, QKey: 77,
		AV: ib.AHAttr{FlowLabel: 5}, PathMTU: ib.MTU512, Timeout: 3, RetryCnt: 2, RNRRetry: 1, RQPSN: 0xabcdef,
		MaxRDAtomic: 2, MinRNRTimer: 9, SQPSN: 0x123456, MaxDestRDAtomic: 3, DestQPN: 0x99, SQDAsyncNotify: true}
}

// inState makes an end whose queue pair is in a state, or nil if there is none
// such.
func inState(t *testing.T, typ ib.QPType, st ib.QPState) *end {
	w := newWorld(t)
	s := usual()
	s.typ = typ
	e := w.newEnd("a", s)
	e.peer = w.newEnd("b", s)
	switch st {
	case ib.QPSQD, ib.QPErr:
		e.toState(ib.QPRTS, s, s)
		if err := e.modify(ib.QPAttr{State: st}, ib.QPMaskState, 64); err != nil {
			t.Fatal(err)
		}
	case ib.QPSQE:
		if services[typ].reliable {
			return nil
		}
		e.toState(ib.QPRTS, s, s)
		wr := ib.SendWR{Op: ib.OpSend, SGL: []ib.SGE{{Addr: 1, Length: 1, LKey: 1}}}
		if typ == ib.UD {
			wr.AH = ib.NewAH(ib.AHAttr{}, &Address{PD: testPD, Flow: e.flow(e.peer)}, nil)
		}
		if _, err := e.q.PostSend([]ib.SendWR{wr}); err != nil {
			t.Fatal(err)
		}
		e.pull()
	default:
		e.toState(st, s, s)
	}
	if e.q.State() != st {
		t.Fatalf("%v instead of %v", e.q.State(), st)
	}
	return e
}

// TestModify tries every transition of every type (IBA 10.3.1, 11.2.5.2): with
// what it needs, with all that it may have, with each thing missing and with
// each thing too much. A refusal names what is wrong and changes nothing.
func TestModify(t *testing.T) {
	tried := 0
	for typ := ib.RC; typ <= ib.XRCRecv; typ++ {
		for from := ib.QPReset; from <= ib.QPErr; from++ {
			for to := ib.QPReset; to <= ib.QPErr; to++ {
				if inState(t, typ, from) == nil {
					continue
				}
				rule, ok := legal[fmt.Sprintf("%v %v>%v", typ, from, to)]
				if to == ib.QPReset || to == ib.QPErr {
					rule, ok = "|", true
				}
				t.Run(fmt.Sprintf("%v/%v-%v", typ, from, to), func(t *testing.T) {
					if !ok {
						refused(t, typ, from, to, 0, to.String())
						return
					}
					needs, may, _ := strings.Cut(rule, "|")
					need, all := maskOf(t, needs), maskOf(t, needs)|maskOf(t, may)
					accepted(t, typ, from, to, need)
					accepted(t, typ, from, to, all)
					for name, a := range attributes {
						switch {
						case need&a.bit != 0:
							refused(t, typ, from, to, all&^a.bit, "needs "+name)
						case all&a.bit == 0:
							refused(t, typ, from, to, need|a.bit, "does not take "+name)
						default:
							accepted(t, typ, from, to, need|a.bit)
						}
					}
				})
				tried++
			}
		}
	}
	if want := 5*7*7 - 3*7; tried != want { // but for RC and XRC queue pairs in SQE
		t.Errorf("%d transitions tried, not %d", tried, want)
	}
}

func accepted(t *testing.T, typ ib.QPType, from, to ib.QPState, mask ib.QPAttrMask) {
	t.Helper()
	e := inState(t, typ, from)
	before := e.q.Query()
	set := good(from, to)
	if got, err := e.q.CheckModify(&set, mask|ib.QPMaskState); err != nil || got != to {
		t.Fatalf("with %v: CheckModify: %v, %v", mask, got, err)
	}
	if e.q.State() != from {
		t.Fatalf("CheckModify changed the state")
	}
	if err := e.modify(set, mask|ib.QPMaskState, 64); err != nil {
		t.Fatalf("with %v: %v", mask, err)
	}
	got := e.q.Query()
	if got.State != to || e.q.State() != to || got.CurState != to {
		t.Fatalf("state %v, Query says %v", e.q.State(), got.State)
	}
	if to == ib.QPReset {
		if got.Cap != before.Cap || (got != ib.QPAttr{State: to, CurState: to, Cap: before.Cap}) {
			t.Errorf("after reset Query returns %+v", got)
		}
		return
	}
	for name, a := range attributes {
		switch {
		case a.seen == nil:
		case mask&a.bit != 0 && !a.seen(&got, &set):
			t.Errorf("%s was set, Query returns %+v", name, got)
		case mask&a.bit == 0 && !a.seen(&got, &before) && name != "en_sqd_async_notify":
			t.Errorf("%s was not set, Query returns %+v instead of %+v", name, got, before)
		}
	}
}

func refused(t *testing.T, typ ib.QPType, from, to ib.QPState, mask ib.QPAttrMask, want string) {
	t.Helper()
	e := inState(t, typ, from)
	before := e.q.Query()
	set := good(from, to)
	err := e.modify(set, mask|ib.QPMaskState, 64)
	var op *ib.OpError
	if !errors.As(err, &op) || op.Op != "modify_qp" || !errors.Is(err, syscall.EINVAL) {
		t.Fatalf("with %v: %v", mask, err)
	}
	if !strings.Contains(err.Error(), want) {
		t.Errorf("with %v: %q does not say %q", mask, err, want)
	}
	if after := e.q.Query(); after != before {
		t.Errorf("with %v: refused, and changed from %+v to %+v", mask, before, after)
	}
}

// Modify without a new state changes attributes of the state that it is in.
func TestModifyWithoutState(t *testing.T) {
	e := inState(t, ib.RC, ib.QPRTS)
	if err := e.modify(ib.QPAttr{MinRNRTimer: 3}, ib.QPMaskMinRNRTimer, 64); err != nil {
		t.Fatal(err)
	}
	if got := e.q.Query(); got.MinRNRTimer != 3 || got.State != ib.QPRTS {
		t.Errorf("%+v", got)
	}
	if err := e.modify(ib.QPAttr{Timeout: 3}, ib.QPMaskTimeout, 64); err == nil {
		t.Error("timeout was changed in RTS")
	}
	for _, cur := range []ib.QPState{ib.QPInit, 0, 99} {
		if err := e.modify(ib.QPAttr{CurState: cur}, ib.QPMaskCurState, 64); err == nil {
			t.Errorf("cur_state %v was taken for RTS", cur)
		}
	}
	for _, to := range []ib.QPState{0, 8, 99} {
		if err := e.modify(ib.QPAttr{State: to}, ib.QPMaskState, 64); err == nil {
			t.Errorf("state %d was accepted", to)
		}
	}
}
