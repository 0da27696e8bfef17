package interop

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func init() {
	scenes["windows"] = map[string]func(*cast) error{"initiator": (*cast).useWindow, "target": (*cast).lendWindow}
}

// One process lends a memory window to another, and invalidates it while the other writes
// through it. The two also share a region.
func TestWindowsBetweenProcesses(t *testing.T) {
	at := loopbacks()
	for _, tt := range []struct {
		name string
		a, b place
		any  bool
	}{
		{"one address", at[0], at[0], true},
		{"two addresses", at[0], at[1], true},
		{"packets", at[0], at[1], false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for range 3 {
				for _, r := range perform(t, script{Scenario: "windows", Any: tt.any}, tt.a, tt.b, nil) {
					t.Logf("%d bytes through the window", r.Bytes)
				}
			}
		})
	}
}

// lent is what the target tells the initiator.
type lent struct {
	Addr   uint64
	RKey   uint32
	Length int
	Handle string // of a shared region
}

// lendWindow binds a window, lets the peer write for a while, and invalidates it: from then
// on the memory does not change.
func (c *cast) lendWindow() (err error) {
	const length = 300 << 10
	memory := make([]byte, length+128) // with margins
	mr, err := c.pd.RegMR(memory, verbs.AccessLocalWrite|verbs.AccessMWBind)
	if err != nil {
		return err
	}
	mw, err := c.pd.AllocMW(verbs.MWType2)
	if err != nil {
		return errors.Join(err, mr.Close())
	}
	shared, err := c.pd.AllocMR(1<<20, verbs.AccessLocalWrite)
	if err != nil {
		return errors.Join(err, mw.Close(), mr.Close())
	}
	defer func() { err = errors.Join(err, shared.Close(), mw.Close(), mr.Close()) }()
	handle, err := shared.Share()
	if err != nil {
		return err
	}
	pattern(shared.Bytes(), 77)
	bind := mw.Bind(mr, 64, length, verbs.AccessRemoteWrite)
	if _, err := c.do(c.rc, verbs.SendWR{ID: 1, Op: verbs.OpBindMW, Bind: bind}); err != nil {
		return err
	}
	c.tell(lent{Addr: bind.Addr, RKey: mw.RKey(), Length: length, Handle: handle})
	if err := c.barrier("opened"); err != nil {
		return err
	}
	if err := matches(shared.Bytes(), 78); err != nil {
		return fmt.Errorf("the shared region, which the peer has filled: %w", err)
	}
	for deadline := time.Now().Add(patience); bytes.Equal(memory[64:128], make([]byte, 64)); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return errors.New("nothing is written")
		}
	}
	if _, err := c.do(c.rc, verbs.SendWR{ID: 2, Op: verbs.OpLocalInv, InvalidateKey: mw.RKey()}); err != nil {
		return err
	}
	after := bytes.Clone(memory)
	time.Sleep(20 * time.Millisecond)
	if !bytes.Equal(memory, after) {
		return errors.New("the memory changed after the window was invalidated")
	}
	if err := c.barrier("refused"); err != nil {
		return err
	}
	if !bytes.Equal(memory, after) {
		return errors.New("the memory changed in the end")
	}
	margins := append(bytes.Clone(memory[:64]), memory[64+length:]...)
	if !bytes.Equal(margins, make([]byte, 128)) {
		return errors.New("the memory around the window has changed")
	}
	return nil
}

// useWindow writes through the window until it is refused.
func (c *cast) useWindow() error {
	var l lent
	if err := c.hear(&l); err != nil {
		return err
	}
	shared, err := c.pd.OpenSharedMR(l.Handle, verbs.AccessLocalWrite)
	if err != nil {
		return err
	}
	if err := matches(shared.Bytes(), 77); err != nil {
		return errors.Join(fmt.Errorf("the shared region: %w", err), shared.Close())
	}
	pattern(shared.Bytes(), 78)
	if err := errors.Join(shared.Close(), c.barrier("opened")); err != nil {
		return err
	}
	wr := verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{c.mr.SGE(sourceAt, l.Length)}, RemoteAddr: l.Addr, RKey: l.RKey}
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		wr.ID++
		pattern(c.buf[sourceAt:][:l.Length], wr.ID)
		if err := c.post(c.rc, wr); err != nil {
			return err
		}
		wc, err := c.wait(patience)
		if err != nil {
			return err
		}
		switch wc.Status {
		case verbs.WCSuccess:
			c.result.Bytes += uint64(l.Length)
		case verbs.WCRemAccessErr:
			return c.barrier("refused")
		default:
			return wc.Err()
		}
	}
	return errors.New("the window was not invalidated")
}
