package main

// The kernel's side: a kverbs process in the other namespace, at the other end of a pipe. The
// head comment of kverbs.c explains the lines.

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// kernel is the kernel's device.
type kernel struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	dead error // why kverbs cannot be asked any more

	ids   map[string]int // how many of each kind were made
	addr  netip.Addr
	sgid  int // the index of the GID of addr
	types map[int]verbs.QPType
	caps  uint64 // of the device: kernelAtomicWrite and the like

	// extended is whether queue pairs are made for requests that ibv_post_send does not
	// support: ATOMIC WRITE and FLUSH.
	extended bool
}

// Bits of enum ib_uverbs_device_cap_flags.
const (
	kernelFlushGlobal = 1 << 38
	kernelAtomicWrite = 1 << 40
)

// startKernel starts a kverbs on a device.
func startKernel(dev string) (*kernel, error) {
	k := &kernel{cmd: exec.Command("ip", "netns", "exec", kernelNS, kverbsPath)}
	var err error
	if k.in, err = k.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := k.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	k.out = bufio.NewReaderSize(out, 64<<10)
	k.cmd.Stderr = os.Stderr
	if err := k.cmd.Start(); err != nil {
		return nil, err
	}
	k.forget()
	if _, err = k.ask("open dev=%s", dev); err != nil {
		return k, err
	}
	a, err := k.ask("device")
	k.caps = a.num("caps")
	return k, err
}

func (k *kernel) forget() {
	k.ids, k.types, k.extended = map[string]int{}, map[int]verbs.QPType{}, false
}

// stand chooses the address that the device uses.
func (k *kernel) stand(addr netip.Addr) error {
	want := verbs.GIDFromAddr(addr)
	for i := range 16 {
		a, err := k.ask("gid index=%d", i)
		if err != nil {
			break
		}
		if a["gid"] == hex.EncodeToString(want[:]) {
			k.addr, k.sgid = addr, i
			return nil
		}
	}
	return fmt.Errorf("kernel: no GID of %v", addr)
}

// kill ends the process from outside; stop collects it.
func (k *kernel) kill() {
	_ = k.cmd.Process.Signal(syscall.SIGKILL) // it may have ended already
}

// die kills the process as part of a case.
func (k *kernel) die() {
	k.kill()
	_ = k.cmd.Wait() // then the kernel has destroyed its objects
	k.dead = errKilled
}

// errKilled marks a kverbs that was killed on purpose.
var errKilled = errors.New("kernel: killed on purpose")

// stop ends the process.
func (k *kernel) stop() {
	_ = k.in.Close()
	k.kill()
	_ = k.cmd.Wait() // it returns an error, since the process was killed
	k.dead = errors.New("kernel: kverbs was stopped")
}

// answer has the key=value pairs of an answer.
type answer map[string]string

func (a answer) num(key string) uint64 {
	n, err := strconv.ParseUint(a[key], 0, 64)
	if err != nil {
		return 0
	}
	return n
}

// ask sends a request and returns the answer.
func (k *kernel) ask(format string, args ...any) (answer, error) {
	if k.dead != nil {
		return nil, k.dead
	}
	line := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintln(k.in, line); err != nil {
		k.dead = fmt.Errorf("kernel: kverbs has gone: %w", err)
		return nil, k.dead
	}
	reply, err := k.out.ReadString('\n')
	if err != nil {
		k.dead = fmt.Errorf("kernel: kverbs has gone: %w", err)
		return nil, k.dead
	}
	words := strings.Fields(reply)
	if len(words) == 0 || words[0] != "ok" {
		return nil, fmt.Errorf("kernel: %q says %q", line, strings.TrimSpace(reply))
	}
	a := answer{}
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, "=")
		a[key] = value
	}
	return a, nil
}

// next returns the number for a new object of a kind.
func (k *kernel) next(kind string) int {
	k.ids[kind]++
	return k.ids[kind] - 1
}

func (k *kernel) who() string    { return "kernel" }
func (k *kernel) gid() verbs.GID { return verbs.GIDFromAddr(k.addr) }

// domain makes protection domain 0, if it does not exist.
func (k *kernel) domain() error {
	if k.ids["pd"] > 0 {
		return nil
	}
	_, err := k.ask("pd id=%d", k.next("pd"))
	return err
}

func (k *kernel) alloc(size int, access verbs.Access) (*region, error) {
	if err := k.domain(); err != nil {
		return nil, err
	}
	r := &region{id: k.next("mem"), size: size}
	if _, err := k.ask("mem id=%d size=%d", r.id, size); err != nil {
		return nil, err
	}
	a, err := k.ask("mr id=%d pd=0 mem=%d len=%d access=%d", r.id, r.id, size, access)
	if err != nil {
		return nil, err
	}
	r.addr, r.lkey, r.rkey = a.num("addr"), uint32(a.num("lkey")), uint32(a.num("rkey"))
	return r, nil
}

// discard discards the pages of a region's memory: then they read as zeros.
func (k *kernel) discard(r *region) error {
	_, err := k.ask("discard id=%d", r.id)
	return err
}

func (k *kernel) fill(r *region, off, n int, seed uint64) error {
	_, err := k.ask("fill mem=%d off=%d len=%d seed=%d", r.id, off, n, seed)
	return err
}

func (k *kernel) check(r *region, off, n int, seed uint64) error {
	a, err := k.ask("check mem=%d off=%d len=%d seed=%d", r.id, off, n, seed)
	if err != nil {
		return err
	}
	if a["at"] != "-1" {
		return fmt.Errorf("kernel: byte %s of %d is %s, want %s", a["at"], n, a["found"], a["want"])
	}
	return nil
}

func (k *kernel) peek(r *region, off, n int) ([]byte, error) {
	var all []byte
	for len(all) < n || n == 0 {
		b, err := k.peekSome(r, off+len(all), min(n-len(all), maxPeek))
		if all = append(all, b...); err != nil || n == 0 {
			return all, err
		}
	}
	return all, nil
}

// maxPeek is how many bytes peek asks kverbs for at a time.
const maxPeek = 1024

func (k *kernel) peekSome(r *region, off, n int) ([]byte, error) {
	a, err := k.ask("peek mem=%d off=%d len=%d", r.id, off, n)
	if err != nil {
		return nil, err
	}
	return hex.DecodeString(a["data"])
}

func (k *kernel) poke(r *region, off int, b []byte) error {
	_, err := k.ask("poke mem=%d off=%d data=%x", r.id, off, b)
	return err
}

func (k *kernel) newQP(typ verbs.QPType, c verbs.QPCap) (int, uint32, error) {
	if err := k.domain(); err != nil {
		return 0, 0, err
	}
	qp := k.next("qp")
	k.types[qp] = typ
	if _, err := k.ask("cq id=%d cqe=%d", 2*qp, c.MaxSendWR+1); err != nil {
		return 0, 0, err
	}
	if _, err := k.ask("cq id=%d cqe=%d", 2*qp+1, c.MaxRecvWR+1); err != nil {
		return 0, 0, err
	}
	ex := 0
	if k.extended {
		ex = 1
	}
	a, err := k.ask("qp id=%d pd=0 type=%v scq=%d rcq=%d swr=%d rwr=%d ssge=%d rsge=%d inline=%d ex=%d", qp, typ, 2*qp, 2*qp+1,
		c.MaxSendWR, c.MaxRecvWR, c.MaxSendSGE, c.MaxRecvSGE, c.MaxInlineData, ex)
	if err != nil {
		return 0, 0, err
	}
	return qp, uint32(a.num("qpn")), nil
}

func (k *kernel) connect(qp int, typ verbs.QPType, a *verbs.QPAttr) error {
	if _, err := k.ask("init id=%d access=%d qkey=%d", qp, a.Access, a.QKey); err != nil {
		return err
	}
	err := k.receive(qp, a)
	for range 3 { // ETIMEDOUT: the kernel waits a second for the neighbour's address, and an emulated machine may be slower
		if err == nil || !strings.Contains(err.Error(), "err 110 ") {
			break
		}
		err = k.receive(qp, a)
	}
	if err != nil {
		return err
	}
	_, err = k.ask("rts id=%d psn=%d timeout=%d retry=%d rnr=%d rd=%d", qp, a.SQPSN, a.Timeout, a.RetryCnt, a.RNRRetry, a.MaxRDAtomic)
	return err
}

func (k *kernel) receive(qp int, a *verbs.QPAttr) error {
	_, err := k.ask("rtr id=%d mtu=%d dqpn=%d psn=%d rd=%d rnr=%d gid=%x sgid=%d", qp, a.PathMTU, a.DestQPN, a.RQPSN,
		a.MaxDestRDAtomic, a.MinRNRTimer, a.AV.DGID[:], k.sgid)
	return err
}

// Numbers of enum ibv_qp_state.
var kernelStates = []verbs.QPState{verbs.QPReset, verbs.QPInit, verbs.QPRTR, verbs.QPRTS, verbs.QPSQD, verbs.QPSQE, verbs.QPErr}

func (k *kernel) reject(qp int) error {
	_, err := k.ask("state id=%d state=6", qp)
	return err
}

func (k *kernel) state(qp int) (verbs.QPState, error) {
	a, err := k.ask("query id=%d", qp)
	if err != nil {
		return 0, err
	}
	if n := a.num("state"); n < uint64(len(kernelStates)) {
		return kernelStates[n], nil
	}
	return 0, fmt.Errorf("kernel: state %s", a["state"])
}

func (k *kernel) destroy(qp int) error {
	_, err := k.ask("destroy_qp id=%d", qp)
	return err
}

func (k *kernel) address(to verbs.GID) (int, error) {
	if err := k.domain(); err != nil {
		return 0, err
	}
	ah := k.next("ah")
	_, err := k.ask("ah id=%d pd=0 gid=%x sgid=%d", ah, to[:], k.sgid)
	return ah, err
}

var kernelOps = map[verbs.Opcode]string{
	verbs.OpSend: "send", verbs.OpSendImm: "send_imm", verbs.OpSendInv: "send_inv",
	verbs.OpRDMAWrite: "write", verbs.OpRDMAWriteImm: "write_imm", verbs.OpRDMARead: "read",
	verbs.OpAtomicCmpSwap: "cas", verbs.OpAtomicFetchAdd: "fadd", verbs.OpLocalInv: "local_inv",
}

// Bits of enum ibv_send_flags.
const (
	kernelFence     = 1 << 0
	kernelSignaled  = 1 << 1
	kernelSolicited = 1 << 2
)

func sges(list []verbs.SGE) string {
	var s strings.Builder
	for i, g := range list {
		if i > 0 {
			s.WriteByte(',')
		}
		fmt.Fprintf(&s, "%#x:%d:%d", g.Addr, g.Length, g.LKey)
	}
	return s.String()
}

func (k *kernel) send(qp int, wr *verbs.SendWR, ah int) error {
	if wr.Inline != nil {
		return errors.New("kernel: inline data is not supported here")
	}
	flags := kernelSignaled
	if wr.Flags&verbs.SendFence != 0 {
		flags |= kernelFence
	}
	if wr.Flags&verbs.SendSolicited != 0 {
		flags |= kernelSolicited
	}
	switch wr.Op {
	case verbs.OpAtomicWrite:
		_, err := k.ask("atomic_write qp=%d id=%d flags=%d raddr=%#x rkey=%d sge=%s", qp, wr.ID, flags, wr.RemoteAddr, wr.RKey, sges(wr.SGL))
		return err
	case verbs.OpFlush:
		level := 0 // IBV_FLUSH_RANGE
		if wr.FlushLevel == verbs.FlushMR {
			level = 1
		}
		_, err := k.ask("flush qp=%d id=%d flags=%d raddr=%#x rkey=%d len=%d type=%d level=%d", qp, wr.ID, flags, wr.RemoteAddr, wr.RKey,
			wr.RemoteLength, wr.FlushType, level)
		return err
	}
	_, err := k.ask("send qp=%d id=%d op=%s flags=%d imm=%d inv=%d raddr=%#x rkey=%d compare=%d swap=%d ah=%d rqpn=%d qkey=%d sge=%s",
		qp, wr.ID, kernelOps[wr.Op], flags, wr.Imm, wr.InvalidateKey, wr.RemoteAddr, wr.RKey, wr.CompareAdd, wr.Swap,
		ah, wr.RemoteQPN, wr.RemoteQKey, sges(wr.SGL))
	return err
}

func (k *kernel) recv(qp int, wr *verbs.RecvWR) error {
	_, err := k.ask("recv qp=%d id=%d sge=%s", qp, wr.ID, sges(wr.SGL))
	return err
}

func (k *kernel) sent(qp int, d time.Duration) (verbs.WC, error) { return k.wait(2*qp, "send", d) }

func (k *kernel) received(qp int, d time.Duration) (verbs.WC, error) {
	return k.wait(2*qp+1, "receive", d)
}

// Numbers of enum ibv_wc_opcode.
var kernelWCOps = map[uint64]verbs.WCOpcode{0: verbs.WCSend, 1: verbs.WCRDMAWrite, 2: verbs.WCRDMARead, 3: verbs.WCCompSwap,
	4: verbs.WCFetchAdd, 5: verbs.WCBindMW, 6: verbs.WCLocalInv, 8: verbs.WCFlush, 9: verbs.WCAtomicWrite,
	128: verbs.WCRecv, 129: verbs.WCRecvRDMAWithImm}

// Bits of enum ibv_wc_flags.
const (
	kernelWCGRH = 1 << 0
	kernelWCImm = 1 << 1
	kernelWCInv = 1 << 3
	// rxe passes the kernel's bit for "with invalidate" to user space, where that bit means
	// something else: docs/interop.md.
	kernelWCInvRxe = 1 << 2
)

func (k *kernel) wait(cq int, what string, d time.Duration) (verbs.WC, error) {
	a, err := k.ask("poll id=%d ms=%d", cq, d.Milliseconds())
	if err != nil {
		return verbs.WC{}, err
	}
	if a.num("n") == 0 {
		return verbs.WC{}, errNone{"kernel", what, d}
	}
	wc := verbs.WC{ID: a.num("id"), Status: verbs.WCStatus(a.num("status")), Op: kernelWCOps[a.num("op")], QPN: uint32(a.num("qpn")),
		ByteLen: uint32(a.num("len")), SrcQP: uint32(a.num("src")), VendorErr: uint16(a.num("vendor"))}
	flags := a.num("flags")
	if flags&kernelWCGRH != 0 {
		wc.Flags |= verbs.WCGRH
	}
	if flags&kernelWCImm != 0 {
		wc.Flags |= verbs.WCWithImm
		wc.Imm = uint32(a.num("imm"))
	}
	if flags&(kernelWCInv|kernelWCInvRxe) != 0 {
		wc.Flags |= verbs.WCWithInv
		wc.InvalidatedKey = uint32(a.num("inv"))
	}
	return wc, nil
}

// killable binds a memory window of type 2: in user space a peer can invalidate nothing else.
func (k *kernel) killable(qp int) (uint32, error) {
	r, err := k.alloc(64, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessMWBind)
	if err != nil {
		return 0, err
	}
	w, err := k.newWindow(verbs.MWType2)
	if err != nil {
		return 0, err
	}
	wc, err := k.bind(qp, w, r, 0, r.size, verbs.AccessRemoteWrite)
	if err == nil {
		err = wc.Err()
	}
	return w.rkey, err
}

func (k *kernel) newWindow(typ verbs.MWType) (*window, error) {
	if err := k.domain(); err != nil {
		return nil, err
	}
	w := &window{id: k.next("mw"), typ: typ}
	a, err := k.ask("mw id=%d pd=0 type=%d", w.id, typ)
	w.rkey = uint32(a.num("rkey"))
	return w, err
}

func (k *kernel) bind(qp int, w *window, r *region, off, n int, access verbs.Access) (verbs.WC, error) {
	how := fmt.Sprintf("qp=%d id=%d flags=%d mw=%d mr=%d raddr=%#x len=%d access=%d", qp, bindID, kernelSignaled, w.id, r.id,
		r.addr+uint64(off), n, access)
	var err error
	if w.typ == verbs.MWType1 {
		var a answer
		if a, err = k.ask("bind_mw %s", how); err == nil {
			w.rkey = uint32(a.num("rkey"))
		}
	} else {
		w.rkey = verbs.IncRKey(w.rkey)
		_, err = k.ask("send op=bind rkey=%d %s", w.rkey, how)
	}
	if err != nil {
		return verbs.WC{}, err
	}
	return k.sent(qp, patience)
}

func (k *kernel) endWindow(w *window) error {
	_, err := k.ask("dealloc_mw id=%d", w.id)
	return err
}

func (k *kernel) clear() error {
	k.forget()
	_, err := k.ask("clear")
	return err
}
