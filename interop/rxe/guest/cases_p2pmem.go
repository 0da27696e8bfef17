package main

// Memory of a PCI device as memory of ours: the buffer of an NVMe controller, which the kernel gives to processes. The
// kernel's device writes and reads it over the network, and disks that the kernel lets use it do so by O_DIRECT. These
// cases need the controllers of vm.Peers, and run only with Order.Peers.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/p2p"
	"github.com/verbena-rdma/verbena/verbs"
)

// bounced names the kernel's memory for devices that cannot reach the memory of others. The machine is booted so that all
// DMA to and from system memory goes through it.
const bounced = "/tmp/debug/swiotlb/"

func peerMemory() (rows []*testCase) {
	long := map[string]bool{"send": true, "fadd": true, "send/ondemand": true, "fadd/ondemand": true, "ib_read_bw": true, "ib_send_bw": true}
	add := func(name string, run func(*scene) error) {
		rows = append(rows, onlyV4(everyWay(testCase{name: "rc/p2pmem/" + name, peers: true, short: !long[name]}, run))...)
	}
	for _, op := range []struct {
		name string
		op   verbs.Opcode
	}{{"write", verbs.OpRDMAWrite}, {"read", verbs.OpRDMARead}, {"send", verbs.OpSend}, {"fadd", verbs.OpAtomicFetchAdd}} {
		add(op.name, func(s *scene) error {
			return s.onBuffer(op.op, func() (*region, error) { return s.ours.peerRegion(bufferRights) })
		})
		add(op.name+"/ondemand", func(s *scene) error {
			return s.onBuffer(op.op, func() (*region, error) { return s.ours.peerRegion(bufferRights | verbs.AccessOnDemand) })
		})
	}
	add("allocated", (*scene).peerAllocated)
	add("disk", (*scene).peerDisk)
	for _, tool := range []string{"ib_write_bw", "ib_read_bw", "ib_send_bw"} {
		add(tool, func(s *scene) error { return s.mappedPerftest(tool) })
	}
	rows = append(rows, &testCase{name: "rc/p2pmem/processes/v4/we", peers: true, short: true, family: "v4", run: (*scene).peerProcesses})
	add("gone", (*scene).peerGone) // the last: it takes the controller away
	return rows
}

// peerSetup tells the host where the memory is, and opens the kernel's counters.
func peerSetup() error {
	if err := errors.Join(vm.TellPeers(share), os.MkdirAll("/tmp/debug", 0o755)); err != nil {
		return err
	}
	return passThrough("mount", "-t", "debugfs", "none", "/tmp/debug")
}

// peerProvider returns the memory of the controller.
func peerProvider() (*p2p.SysProvider, error) {
	c, err := vm.FindPeer(vm.PeerCMB)
	if err != nil {
		return nil, err
	}
	return openProvider(c)
}

func openProvider(c vm.Peer) (*p2p.SysProvider, error) {
	at, err := p2p.ParseAddress(c.At)
	if err != nil {
		return nil, err
	}
	return p2p.OpenSysProvider(at)
}

// peerRegion registers memory of the controller.
func (o *ours) peerRegion(access verbs.Access) (*region, error) {
	p, err := peerProvider()
	if err != nil {
		return nil, err
	}
	b, release, err := p.Alloc(bufferSize)
	if err != nil {
		return nil, err
	}
	o.keep(closer(release))
	mr, err := o.pd.RegMR(b, access)
	return o.bufferRegion(mr, err, &region{buf: b})
}

// peerAllocated: the kernel counts what we have taken, until it is given back. More than there is cannot be had.
func (s *scene) peerAllocated() error {
	p, err := peerProvider()
	if err != nil {
		return err
	}
	before, err := p.Available()
	if err != nil {
		return err
	}
	b, release, err := p.Alloc(bufferSize)
	if err != nil {
		return err
	}
	mr, err := s.ours.pd.RegMR(b, bufferRights)
	if err != nil {
		return err
	}
	if n, err := p.Available(); err != nil || n != before-bufferSize {
		return fmt.Errorf("%d of %d bytes are available with %d taken, %w", n, before, bufferSize, err)
	}
	if _, _, err := p.Alloc(int(before)); !errors.Is(err, syscall.ENOMEM) {
		return fmt.Errorf("as much as there was before: %w", err)
	}
	if _, _, err := p.Alloc(0); !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("nothing: %w", err)
	}
	if err := mr.Close(); err != nil {
		return err
	}
	release()
	release()
	if n, err := p.Available(); err != nil || n != before {
		return fmt.Errorf("%d of %d bytes are available when all was given back, %w", n, before, err)
	}
	far, err := vm.FindPeer(vm.PeerFar)
	if err != nil {
		return err
	}
	if _, err := openProvider(far); !errors.Is(err, syscall.ENODEV) {
		return fmt.Errorf("a controller without memory: %w", err)
	}
	return nil
}

// peerDisk: data comes over the network into the controller's memory, and goes from there to the disk behind the same
// switch; then the other way. The kernel has bounced none of it. The disk elsewhere refuses that memory, and what it writes
// from system memory the kernel does bounce, so that the count is seen to work.
func (s *scene) peerDisk() error {
	near, err1 := vm.FindPeer(vm.PeerNear)
	far, err2 := vm.FindPeer(vm.PeerFar)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	// The side that initiates writes: the kernel's device into our memory, or ours reads it from there.
	op, back := verbs.OpRDMARead, verbs.OpRDMAWrite
	if !s.weInit {
		op, back = verbs.OpRDMAWrite, verbs.OpRDMARead
	}
	i, t, local, remote, mine, err := s.bufferSides(func() (*region, error) { return s.ours.peerRegion(bufferRights) })
	if err != nil {
		return err
	}
	theirs := remote
	if !s.weInit {
		theirs = local
	}
	disk, err := sys.OpenDirect(near.Disk)
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	if err := clearBounced(); err != nil {
		return err
	}
	for round := range uint64(3) {
		n, off := bufferSize>>round, int64(round)<<20
		if err := s.exchange(i, t, local, remote, op, n, round+10); err != nil {
			return fmt.Errorf("round %d, in: %w", round, err)
		}
		if k, err := disk.WriteAt(mine.buf[:n], off); err != nil || k != n {
			return fmt.Errorf("round %d: the disk took %d of %d bytes, %w", round, k, n, err)
		}
		clear(mine.buf)
		if k, err := disk.ReadAt(mine.buf[:n], off); err != nil || k != n {
			return fmt.Errorf("round %d: the disk gave %d of %d bytes, %w", round, k, n, err)
		}
		if err := s.ours.check(mine, 0, n, round+10); err != nil {
			return fmt.Errorf("round %d, from the disk: %w", round, err)
		}
		// Out again: what the disk has put into the memory.
		if err := s.kernel.fill(theirs, 0, n, 99); err != nil {
			return err
		}
		if _, err := i.do(verbs.SendWR{ID: round, Op: back, SGL: []verbs.SGE{local.sge(0, n)}, RemoteAddr: remote.addr, RKey: remote.rkey}); err != nil {
			return err
		}
		if err := s.kernel.check(theirs, 0, n, round+10); err != nil {
			return fmt.Errorf("round %d, out: %w", round, err)
		}
	}
	if n, err := readBounced(); err != nil || n != 0 {
		return fmt.Errorf("%d slots of bounce memory were in use, %w", n, err)
	}
	return farDisk(far.Disk, mine.buf)
}

// farDisk is the control: a disk that may not use the memory.
func farDisk(name string, memory []byte) error {
	disk, err := sys.OpenDirect(name)
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	if _, err := disk.WriteAt(memory[:65536], 0); !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.EREMOTEIO) {
		return fmt.Errorf("a disk that does not reach the memory: %w", err)
	}
	_, plain, err := sys.NewMappedFile("plain", 65536)
	if err != nil {
		return err
	}
	defer func() { _ = sys.Unmap(plain) }()
	if _, err := disk.WriteAt(plain, 0); err != nil {
		return err
	}
	if n, err := readBounced(); err != nil || n == 0 {
		return fmt.Errorf("%d slots of bounce memory were in use for system memory, %w", n, err)
	}
	return nil
}

// clearBounced begins to count how much of the bounce memory is in use at most.
func clearBounced() error {
	return os.WriteFile(bounced+"io_tlb_used_hiwater", []byte("0"), 0)
}

func readBounced() (int, error) {
	b, err := os.ReadFile(bounced + "io_tlb_used_hiwater")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

// mappedPerftest runs perftest with the controller's memory as its buffer at our end.
func (s *scene) mappedPerftest(tool string) error {
	c, err := vm.FindPeer(vm.PeerCMB)
	if err != nil {
		return err
	}
	mapped := " --mmap=/sys/bus/pci/devices/" + c.At + "/p2pmem/allocate"
	m := cmMeeting{server: tool + " -R -F -n 20 -s 8192", client: tool + " -R -F -n 20 -s 8192 IP", crossing: true, race: cmLost}
	if s.weInit {
		m.client += mapped
	} else {
		m.server += mapped
	}
	return s.meet(&m)
}

// Where the two processes of peerProcesses are.
const (
	holderAddr = "127.0.90.2:7180"
	userAddr   = "127.0.90.1"
)

// peerProcesses has another process of ours register the controller's memory, and uses it from here. Processes of one
// machine use each other's memory without the network where they can; the kernel refuses that for memory of a device.
func (s *scene) peerProcesses() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	holder, err := begin(ctx, []string{self, "holder"})
	if err != nil {
		return err
	}
	defer holder.kill()
	for !holder.lost("(?m)^ready$") {
		if ctx.Err() != nil {
			return fmt.Errorf("the other process: %s", holder.said.String())
		}
		time.Sleep(20 * time.Millisecond)
	}
	dev, err := verbs.Open("", &verbs.Config{Addrs: []netip.Addr{netip.MustParseAddr(userAddr)}})
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	c, err := cm.Dial(ctx, holderAddr, &cm.Config{Device: dev})
	if err != nil {
		return fmt.Errorf("%w; the other process: %s", err, holder.said.String())
	}
	defer func() { _ = c.Close() }()
	room := make([]byte, 2*bufferSize)
	mr, err := c.RegMR(room, bufferRights)
	if err != nil {
		return err
	}
	addr, rkey := binary.LittleEndian.Uint64(c.Private()), binary.LittleEndian.Uint32(c.Private()[8:])
	var past sys.VMRead // past the device
	past.AddLocal(room[:4096])
	past.AddRemote(sys.VMRange{Addr: addr, Len: 4096})
	if n, err := past.Do(holder.cmd.Process.Pid); !errors.Is(err, syscall.EFAULT) {
		return fmt.Errorf("process_vm_readv of memory of a device: %d bytes, %w, should be EFAULT", n, err)
	}
	do := func(wr verbs.SendWR) error {
		wr.RemoteAddr, wr.RKey, wr.Flags = addr, rkey, verbs.SendSignaled
		if _, err := c.QP().PostSend([]verbs.SendWR{wr}); err != nil {
			return err
		}
		wcs := make([]verbs.WC, 1)
		for {
			n, err := c.SendCQ().Poll(wcs)
			switch {
			case err != nil:
				return err
			case n == 1 && wcs[0].Status != verbs.WCSuccess:
				return fmt.Errorf("%v ended with %v", wr.Op, wcs[0].Status)
			case n == 1:
				return nil
			case ctx.Err() != nil:
				return fmt.Errorf("%v does not end", wr.Op)
			}
			time.Sleep(time.Millisecond)
		}
	}
	for round := range uint64(4) {
		n := bufferSize >> (2 * round)
		pattern(n, round+1, func(i int, b byte) bool { room[i] = b; return true })
		err := do(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{mr.SGE(0, n)}})
		if err == nil {
			err = do(verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{mr.SGE(bufferSize, n)}})
		}
		if err == nil && !bytes.Equal(room[:n], room[bufferSize:][:n]) {
			err = errors.New("other bytes were read than written")
		}
		before := binary.LittleEndian.Uint64(room)
		for range 2 {
			if err == nil {
				err = do(verbs.SendWR{Op: verbs.OpAtomicFetchAdd, CompareAdd: 5, SGL: []verbs.SGE{mr.SGE(0, 8)}})
			}
		}
		if found := binary.LittleEndian.Uint64(room); err == nil && found != before+5 {
			err = fmt.Errorf("fetch-and-add found %#x, of %#x and 5 more", found, before)
		}
		if err != nil {
			return fmt.Errorf("%d bytes: %w", n, err)
		}
	}
	return nil
}

// hold is the other process: it has the memory, for one connection, until it is killed.
func hold() error {
	ctx := context.Background()
	l, err := cm.Listen(ctx, holderAddr, &cm.Config{Setup: func(c *cm.Conn) error {
		p, err := peerProvider()
		if err != nil {
			return err
		}
		b, _, err := p.Alloc(bufferSize)
		if err != nil {
			return err
		}
		mr, err := c.RegMR(b, bufferRights)
		if err != nil {
			return err
		}
		return c.SetPrivate(binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(nil, mr.Addr()), mr.RKey()))
	}})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	c, err := l.Accept(ctx)
	if err != nil {
		return err
	}
	<-c.Done()
	return nil
}

// peerGone: the controller's driver is removed while the memory is registered. The kernel takes the memory away. Requests
// to it are refused, those with it fail, and the device goes on.
func (s *scene) peerGone() error {
	c, err := vm.FindPeer(vm.PeerCMB)
	if err != nil {
		return err
	}
	i, t, local, remote, mine, err := s.bufferSides(func() (*region, error) { return s.ours.peerRegion(bufferRights) })
	if err != nil {
		return err
	}
	if err := s.exchange(i, t, local, remote, verbs.OpRDMAWrite, 8192, 1); err != nil {
		return err
	}
	const driver = "/sys/bus/pci/drivers/nvme/"
	if err := os.WriteFile(driver+"unbind", []byte(c.At), 0); err != nil {
		return err
	}
	want := verbs.WCRemAccessErr
	if s.weInit {
		want = verbs.WCLocProtErr
	}
	wc, err := i.try(verbs.SendWR{ID: 2, Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local.sge(0, 8192)}, RemoteAddr: remote.addr, RKey: remote.rkey})
	if err := wantStatus(i.who(), wc, err, want); err != nil {
		return err
	}
	if err := mine.mr.Close(); err != nil {
		return err
	}
	// Other memory is as it was.
	i, t, err = s.connect(connection{})
	if err != nil {
		return err
	}
	if local, remote, err = buffers(i, t, 8192); err != nil {
		return err
	}
	if err := s.exchange(i, t, local, remote, verbs.OpRDMAWrite, 8192, 3); err != nil {
		return err
	}
	if err := os.WriteFile(driver+"bind", []byte(c.At), 0); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		if _, err = peerProvider(); err == nil {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("the controller is back, its memory is not: %w", err)
}
