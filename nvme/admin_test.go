package nvme

import (
	"errors"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
)

func (r *rig) identify(cns uint8, nsid uint32, csi uint8) []byte {
	r.t.Helper()
	b := make([]byte, 4096)
	r.want(true, Command{Opcode: AdminIdentify, NSID: nsid, CDW10: uint32(cns), CDW11: uint32(csi) << 24}, b, StatusSuccess)
	return b
}

func (r *rig) logPage(id uint8, n int) []byte {
	r.t.Helper()
	b := make([]byte, n)
	r.want(true, LogPageCommand(id, 0, n, false), b, StatusSuccess)
	return b
}

func setFeature(id uint8, v uint32) Command {
	return Command{Opcode: AdminSetFeatures, CDW10: uint32(id), CDW11: v}
}

func getFeature(id uint8, sel uint32) Command {
	return Command{Opcode: AdminGetFeatures, CDW10: uint32(id) | sel<<8}
}

func memoryNS(t testing.TB) Namespace { return must(NewMemory(1<<20, 4096))(t) }

func TestIdentifyController(t *testing.T) {
	r := newRig(t, memoryNS(t), ControllerConfig{Transport: TransportRDMA, MDTS: 5, InCapsule: 4096, QueueEntries: 64})
	b := r.identify(CNSController, 0, 0)
	if got := string(b[4:24]); got != "S1                  " {
		t.Errorf("serial number %q", got)
	}
	if got := text(b[24:64]); got != "Verbena" {
		t.Errorf("model %q", got)
	}
	if got := text(b[768:1024]); got != testNQN {
		t.Errorf("name %q", got)
	}
	for _, f := range []struct {
		what      string
		got, want uint32
	}{
		{"CNTLID", uint32(le.Uint16(b[78:])), uint32(r.c.CNTLID())}, {"MDTS", uint32(b[77]), 5}, {"VER", le.Uint32(b[80:]), 0x10400},
		{"CNTRLTYPE", uint32(b[111]), 1}, {"SQES", uint32(b[512]), 0x66}, {"CQES", uint32(b[513]), 0x44},
		{"KAS", uint32(le.Uint16(b[320:])), 10}, {"MAXCMD", uint32(le.Uint16(b[514:])), 64}, {"NN", le.Uint32(b[516:]), 1024},
		{"ONCS", uint32(le.Uint16(b[520:])), 0x1d}, {"VWC", uint32(b[525]), 7}, {"SGLS", le.Uint32(b[536:]), 0x100005},
		{"IOCCSZ", le.Uint32(b[1792:]), (64 + 4096) / 16}, {"IORCSZ", le.Uint32(b[1796:]), 1}, {"MSDBD", uint32(b[1803]), 1},
		{"OAES", le.Uint32(b[92:]), 1 << 8}, {"CMIC", uint32(b[76]), 3},
	} {
		if f.got != f.want {
			t.Errorf("%s is %#x, should be %#x", f.what, f.got, f.want)
		}
	}
	pci := newRig(t, memoryNS(t), ControllerConfig{})
	b = pci.identify(CNSController, 0, 0)
	if le.Uint32(b[1792:]) != 0 || le.Uint16(b[320:]) != 0 || le.Uint32(b[536:]) != 1 || b[76] != 0 {
		t.Error("a PCI function has fields of fabrics")
	}
	pci.want(true, Command{Opcode: AdminKeepAlive}, nil, StatusInvalidOpcode|dnr)
	r.want(true, Command{Opcode: AdminKeepAlive}, nil, StatusSuccess)
}

func TestIdentifyNamespaces(t *testing.T) {
	r := newRig(t, memoryNS(t), ControllerConfig{})
	check(t, r.sub.AddNamespace(7, must(NewMemory(3*512, 512))(t)))
	b := r.identify(CNSNamespace, 1, 0)
	if le.Uint64(b) != 256 || le.Uint64(b[8:]) != 256 || b[130] != 12 || b[25] != 0 || b[26] != 0 {
		t.Errorf("%d blocks of 2^%d", le.Uint64(b), b[130])
	}
	if b := r.identify(CNSNamespace, 7, 0); le.Uint64(b) != 3 || b[130] != 9 {
		t.Errorf("%d blocks of 2^%d", le.Uint64(b), b[130])
	}
	if b := r.identify(CNSNamespace, 2, 0); slices.Max(b) != 0 {
		t.Error("an inactive namespace is not zeros")
	}
	ids := func(cns uint8, above uint32) []uint32 {
		b := r.identify(cns, above, 0)
		return []uint32{le.Uint32(b), le.Uint32(b[4:]), le.Uint32(b[8:])}
	}
	if got := ids(CNSActiveNamespaces, 0); !slices.Equal(got, []uint32{1, 7, 0}) {
		t.Errorf("active: %d", got)
	}
	if got := ids(CNSCommandSetActive, 1); !slices.Equal(got, []uint32{7, 0, 0}) {
		t.Errorf("active above 1: %d", got)
	}
	if got := ids(CNSActiveNamespaces, 7); !slices.Equal(got, []uint32{0, 0, 0}) {
		t.Errorf("active above 7: %d", got)
	}

	one, seven := r.identify(CNSDescriptors, 1, 0), r.identify(CNSDescriptors, 7, 0)
	if one[0] != 2 || one[1] != 16 || one[20] != 3 || one[21] != 16 || one[40] != 4 || one[41] != 1 || one[45] != 0 {
		t.Errorf("descriptors % x", one[:48])
	}
	if slices.Equal(one[:40], seven[:40]) {
		t.Error("two namespaces with one identifier")
	}
	// The identifiers stay when the subsystem is made again.
	again := newRig(t, memoryNS(t), ControllerConfig{})
	if !slices.Equal(one, again.identify(CNSDescriptors, 1, 0)) {
		t.Error("a namespace has another identifier after a restart")
	}

	r.identify(CNSCommandSetNamespace, 1, 0)
	r.identify(CNSCommandSetController, 0, 0)
	if b := r.identify(CNSIndependentNamespace, 1, 0); b[14] != 1 {
		t.Error("not ready")
	}
	if b := r.identify(CNSCommandSets, 0, 0); le.Uint64(b) != 1 {
		t.Error("command sets")
	}
	for _, bad := range []struct {
		cns  uint8
		nsid uint32
		csi  uint8
		want Status
	}{
		{CNSNamespace, 0, 0, StatusInvalidNamespace | dnr}, {CNSNamespace, NSIDAll, 0, StatusInvalidNamespace | dnr},
		{CNSNamespace, 5000, 0, StatusInvalidNamespace | dnr}, {CNSDescriptors, 2, 0, StatusInvalidField | dnr},
		{CNSActiveNamespaces, NSIDAll, 0, StatusInvalidNamespace | dnr}, {CNSActiveNamespaces, 0xfffffffe, 0, StatusInvalidNamespace | dnr},
		{CNSCommandSetNamespace, 1, 2, StatusInvalidField | dnr}, {0x44, 1, 0, StatusInvalidField | dnr},
	} {
		cmd := Command{Opcode: AdminIdentify, NSID: bad.nsid, CDW10: uint32(bad.cns), CDW11: uint32(bad.csi) << 24}
		r.want(true, cmd, make([]byte, 4096), bad.want)
	}
	cmd := Command{Opcode: AdminIdentify, CDW10: 1}
	if done, _ := r.c.Execute(true, &cmd, [][]byte{make([]byte, 4095)}); done.Status != StatusDataSGLLength|dnr {
		t.Errorf("too little memory: %v", done.Status)
	}
}

func TestFeatures(t *testing.T) {
	r := newRig(t, memoryNS(t), ControllerConfig{IOQueues: 4, HostID: [16]byte{1, 2, 3}})
	value := func(cmd Command, want uint64) {
		t.Helper()
		if got := r.want(true, cmd, nil, StatusSuccess).Result; got != want {
			t.Errorf("feature %#x: %#x, should be %#x", cmd.CDW10, got, want)
		}
	}
	value(setFeature(FeatureQueues, 1|1<<16), 1|1<<16)
	if n := r.c.QueueCount(); n != 2 {
		t.Errorf("%d queues", n)
	}
	value(setFeature(FeatureQueues, 99|99<<16), 3|3<<16)
	value(getFeature(FeatureQueues, selectCurrent), 3|3<<16)
	r.want(true, setFeature(FeatureQueues, 0xffff), nil, StatusInvalidField|dnr)
	r.want(true, setFeature(FeatureQueues, 0xffff0000), nil, StatusInvalidField|dnr)

	value(setFeature(FeatureAsyncEvents, 0x100), 0)
	value(getFeature(FeatureAsyncEvents, selectCurrent), 0x100)
	value(getFeature(FeatureAsyncEvents, selectDefault), 0)
	value(getFeature(FeatureAsyncEvents, selectCapabilities), 4)
	value(getFeature(FeatureVector, selectCapabilities), 0)
	value(getFeature(FeatureTemperature, selectCurrent), 0xffff)
	value(setFeature(FeatureTemperature, 0x150), 0)
	value(getFeature(FeatureTemperature, selectCurrent), 0x150)

	id := make([]byte, 16)
	wide := getFeature(FeatureHostID, 0)
	wide.CDW11 = 1
	r.want(true, wide, id, StatusSuccess)
	if [16]byte(id) != [16]byte{1, 2, 3} {
		t.Errorf("host identifier % x", id)
	}
	r.want(true, setFeature(FeatureHostID, 0), []byte{8, 7, 6, 5, 4, 3, 2, 1}, StatusSuccess)
	r.want(true, getFeature(FeatureHostID, 0), id, StatusSuccess)
	if [8]byte(id) != [8]byte{8, 7, 6, 5, 4, 3, 2, 1} {
		t.Errorf("host identifier % x", id)
	}

	save := setFeature(FeatureArbitration, 0)
	save.CDW10 |= 1 << 31
	r.want(true, save, nil, StatusFeatureNotSaveable|dnr)
	one := setFeature(FeatureArbitration, 0)
	one.NSID = 1
	r.want(true, one, nil, StatusFeatureNotPerNamespace|dnr)
	r.want(true, setFeature(FeatureVector, 0), nil, StatusFeatureNotChangeable|dnr)
	r.want(true, setFeature(FeaturePowerManagement, 1), nil, StatusInvalidField|dnr)
	r.want(true, setFeature(0x55, 0), nil, StatusInvalidField|dnr)
	r.want(true, getFeature(0x55, 0), nil, StatusInvalidField|dnr)
	r.want(true, getFeature(FeatureArbitration, 7), nil, StatusInvalidField|dnr)
	r.want(true, getFeature(FeatureKeepAlive, 0), nil, StatusInvalidField|dnr)
}

func TestFabricsFeatures(t *testing.T) {
	r := newRig(t, memoryNS(t), ControllerConfig{Transport: TransportTCP, KeepAlive: 5 * time.Second})
	if d := r.c.KeepAliveTimeout(); d != 5*time.Second {
		t.Error(d)
	}
	r.want(true, setFeature(FeatureKeepAlive, 1500), nil, StatusSuccess)
	if d := r.c.KeepAliveTimeout(); d != 2*time.Second {
		t.Error(d)
	}
	r.want(true, setFeature(FeatureKeepAlive, 0xffffffff), nil, StatusKeepAliveInvalid|dnr)
	r.want(true, setFeature(FeatureHostID, 1), make([]byte, 16), StatusCommandSequence|dnr)
	r.want(true, getFeature(FeatureHostID, 0), nil, StatusInvalidField|dnr)
	r.want(true, getFeature(FeatureCoalescing, 0), nil, StatusInvalidField|dnr)
}

func TestLogPages(t *testing.T) {
	r := newRig(t, memoryNS(t), ControllerConfig{})
	buf := make([]byte, 8192)
	for range 5 {
		r.want(false, ioCmd(IORead, 0, 1), buf, StatusSuccess)
	}
	r.want(false, ioCmd(IOWrite, 0, 2), buf, StatusSuccess)
	bad := ioCmd(IORead, 1234, 1)
	bad.CID = 99
	r.want(false, bad, nil, StatusLBAOutOfRange|dnr)
	b := r.logPage(LogSMART, 512)
	if le.Uint64(b[64:]) != 5 || le.Uint64(b[80:]) != 1 || le.Uint64(b[32:]) != 1 || le.Uint64(b[176:]) != 1 {
		t.Errorf("%d reads, %d writes, %d units read, %d errors", le.Uint64(b[64:]), le.Uint64(b[80:]), le.Uint64(b[32:]), le.Uint64(b[176:]))
	}
	b = r.logPage(LogErrors, 128)
	if le.Uint64(b) != 1 || le.Uint16(b[10:]) != 99 || Status(le.Uint16(b[12:])>>1) != StatusLBAOutOfRange|dnr || le.Uint64(b[16:]) != 1234 || le.Uint64(b[64:]) != 0 {
		t.Errorf("error log % x", b[:64])
	}
	for range 100 { // more than the log has
		r.want(false, bad, nil, StatusLBAOutOfRange|dnr)
	}
	if b = r.logPage(LogErrors, 8192); le.Uint64(b) != 101 || le.Uint64(b[63*64:]) != 38 || le.Uint64(b[64*64:]) != 0 {
		t.Errorf("errors from %d down to %d", le.Uint64(b), le.Uint64(b[63*64:]))
	}
	if b = r.logPage(LogFirmware, 512); b[0] != 1 || text(b[8:16]) != "1.0" {
		t.Errorf("firmware % x", b[:16])
	}
	b = r.logPage(LogCommands, 4096)
	if b[4*int(AdminIdentify)] != 1 || b[4*int(AdminCreateSQ)] != 1 || b[1024+4*int(IOWrite)] != 3 || b[1024+4*int(IORead)] != 1 || b[4*0x10] != 0 || b[4*int(AdminKeepAlive)] != 0 {
		t.Error("commands supported")
	}
	part := make([]byte, 8)
	r.want(true, LogPageCommand(LogCommands, 1024, 8, true), part, StatusSuccess)
	if !slices.Equal(part, b[1024:1032]) {
		t.Errorf("from an offset: % x", part)
	}
	r.want(true, LogPageCommand(LogSMART, 512, 4, true), part, StatusSuccess)
	r.want(true, LogPageCommand(LogSMART, 516, 4, true), part, StatusInvalidField|dnr)
	r.want(true, LogPageCommand(LogSMART, 2, 4, true), part, StatusInvalidField|dnr)
	r.want(true, LogPageCommand(0x42, 0, 4, true), part, StatusInvalidLogPage|dnr)
	r.want(true, LogPageCommand(LogDiscovery, 0, 4, true), part, StatusInvalidLogPage|dnr)
	one := LogPageCommand(LogSMART, 0, 512, true)
	one.NSID = 1
	r.want(true, one, buf, StatusInvalidField|dnr)
	r.want(true, Command{Opcode: AdminGetLogPage, CDW10: 0xffff0002, CDW11: 0xffff}, nil, StatusInvalidField|dnr)
}

func TestAsyncEvents(t *testing.T) {
	r := newRig(t, memoryNS(t), ControllerConfig{})
	wait := func(cid uint16) {
		t.Helper()
		cmd := Command{Opcode: AdminAsyncEventRequest, CID: cid}
		if done, ok := r.c.Execute(true, &cmd, nil); ok {
			t.Fatalf("completed with %+v", done)
		}
	}
	wait(1)
	wait(2)
	check(t, r.sub.AddNamespace(2, memoryNS(t))) // before the host wants to hear of it
	if len(r.late) != 0 {
		t.Fatalf("%+v", r.late)
	}
	r.logPage(LogChangedNamespaces, 4096)
	r.want(true, setFeature(FeatureAsyncEvents, AsyncNamespaces), nil, StatusSuccess)
	check(t, r.sub.RemoveNamespace(2))
	check(t, r.sub.AddNamespace(3, memoryNS(t))) // the event is masked
	if want := (Event{EventNotice, NoticeNamespace, LogChangedNamespaces}); len(r.late) != 1 || r.late[0].CID != 1 || ParseEvent(r.late[0].Result) != want || r.late[0].Result != 0x040002 {
		t.Fatalf("%+v", r.late)
	}
	if b := r.logPage(LogChangedNamespaces, 4096); le.Uint32(b) != 2 || le.Uint32(b[4:]) != 3 || le.Uint32(b[8:]) != 0 {
		t.Errorf("changed % x", b[:12])
	}
	if b := r.logPage(LogChangedNamespaces, 4096); le.Uint32(b) != 0 {
		t.Errorf("changed again % x", b[:12])
	}
	// The page was read, so the second request gets the next event.
	check(t, r.sub.AddNamespace(4, memoryNS(t)))
	if len(r.late) != 2 || r.late[1].CID != 2 {
		t.Fatalf("%+v", r.late)
	}
	r.logPage(LogChangedNamespaces, 4096)
	// No request waits: the event does.
	check(t, r.sub.RemoveNamespace(3))
	if done := r.want(true, Command{Opcode: AdminAsyncEventRequest, CID: 5}, nil, StatusSuccess); done.Result != 0x040002 || len(r.late) != 2 {
		t.Errorf("%+v", done)
	}
	for cid := range uint16(asyncRequests) {
		wait(10 + cid)
	}
	r.want(true, Command{Opcode: AdminAsyncEventRequest}, nil, StatusAsyncLimit|dnr)

	abort := func(sq, cid uint16, want uint64) {
		t.Helper()
		if done := r.want(true, Command{Opcode: AdminAbort, CDW10: uint32(sq) | uint32(cid)<<16}, nil, StatusSuccess); done.Result != want {
			t.Errorf("abort: %d, should be %d", done.Result, want)
		}
	}
	abort(0, 11, 0)
	if last := r.late[len(r.late)-1]; last.CID != 11 || last.Status != StatusAbortRequested {
		t.Errorf("%+v", last)
	}
	abort(0, 11, 1)
	abort(1, 12, 1)

	r.c.Report(Event{EventError, ErrorInvalidDoorbellValue, LogErrors})
	if last := r.late[len(r.late)-1]; last.CID != 10 || last.Result != 0x010100 {
		t.Errorf("%+v", last)
	}
	n := len(r.late)
	r.c.Close()
	r.c.Close()
	r.c.Report(Event{EventError, ErrorPersistent, LogSMART})
	if len(r.late) != n {
		t.Error("an event after Close")
	}
	r.want(true, Command{Opcode: AdminIdentify, CDW10: 1}, nil, StatusAbortRequested)
}

func TestManyChangedNamespaces(t *testing.T) {
	var l changedList
	for i := range uint32(maxChanged) {
		l.add(2*i + 1)
		l.add(2*i + 1)
	}
	if b := l.page(); le.Uint32(b) != 1 || le.Uint32(b[4*1023:]) != 2047 {
		t.Error("a full list")
	}
	l.add(1 << 20)
	if b := l.page(); le.Uint32(b) != NSIDAll || le.Uint32(b[4:]) != 0 {
		t.Error("more than the list can hold")
	}
}

func TestDiscovery(t *testing.T) {
	s := must(NewSubsystem(SubsystemConfig{Discovery: true}))(t)
	r := &rig{t: t, sub: s}
	r.c = must(s.NewController(ControllerConfig{Transport: TransportRDMA, Complete: func(c Completion) { r.late = append(r.late, c) }}))(t)
	defer r.c.Close()
	if s.NQN() != DiscoveryNQN {
		t.Error(s.NQN())
	}
	b := r.identify(CNSController, 0, 0)
	if b[111] != 2 || le.Uint32(b[92:]) != 1<<31 || le.Uint32(b[516:]) != 0 || text(b[768:1024]) != DiscoveryNQN {
		t.Error("identify")
	}
	r.want(true, setFeature(FeatureAsyncEvents, AsyncDiscovery), nil, StatusSuccess)
	cmd := Command{Opcode: AdminAsyncEventRequest, CID: 3}
	if _, ok := r.c.Execute(true, &cmd, nil); ok {
		t.Fatal("an event")
	}
	entries := []DiscoveryEntry{
		{Transport: TransportRDMA, Family: AddressIPv4, PortID: 1, Address: "192.0.2.1", Service: "4420", NQN: testNQN},
		{Transport: TransportTCP, Family: AddressIPv6, PortID: 2, Address: "2001:db8::1", Service: "8009", NQN: DiscoveryNQN, Discovery: true},
	}
	check(t, s.SetDiscovery(entries))
	check(t, s.SetDiscovery(entries)) // no change
	if len(r.late) != 1 || r.late[0].Result != 0x70f002 {
		t.Errorf("%+v", r.late)
	}
	page := r.logPage(LogDiscovery, 1024+2048)
	generation, got := ParseDiscovery(page)
	if generation != 2 || !slices.Equal(got, entries) {
		t.Errorf("generation %d, %+v", generation, got)
	}
	if page[1024+768] != 1 || page[1024+769] != 4 || page[1024+770] != 1 {
		t.Error("the part about RDMA")
	}
	if _, got := ParseDiscovery(page[:1500]); got != nil {
		t.Errorf("of half a record: %+v", got)
	}
	ParseDiscovery(nil)
	r.want(true, Command{Opcode: AdminIdentify, NSID: 1}, make([]byte, 4096), StatusInvalidField|dnr)
	r.want(true, Command{Opcode: AdminAbort}, nil, StatusInvalidOpcode|dnr)
	r.want(true, LogPageCommand(LogSMART, 0, 512, true), make([]byte, 512), StatusInvalidLogPage|dnr)
	r.want(true, setFeature(FeatureQueues, 1), nil, StatusInvalidField|dnr)
	r.want(false, ioCmd(IORead, 0, 1), nil, StatusInvalidOpcode|dnr)
	if err := s.AddNamespace(1, memoryNS(t)); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Error(err)
	}
	entries[0].NQN = "no name"
	if err := s.SetDiscovery(entries); !errors.Is(err, syscall.EINVAL) {
		t.Error(err)
	}
}

func TestSubsystemErrors(t *testing.T) {
	for _, cfg := range []SubsystemConfig{{}, {NQN: "disk"}, {NQN: testNQN, Serial: "123456789012345678901"}, {NQN: testNQN, Model: "ü"},
		{NQN: testNQN, MaxNamespaces: 1 << 20}, {NQN: "nqn." + string(make([]byte, 300))}} {
		if _, err := NewSubsystem(cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	s := must(NewSubsystem(SubsystemConfig{NQN: testNQN}))(t)
	check(t, s.AddNamespace(1, memoryNS(t)))
	for nsid, want := range map[uint32]syscall.Errno{0: syscall.EINVAL, 1025: syscall.EINVAL, NSIDAll: syscall.EINVAL, 1: syscall.EEXIST} {
		if err := s.AddNamespace(nsid, memoryNS(t)); !errors.Is(err, want) {
			t.Errorf("namespace %d: %v", nsid, err)
		}
	}
	if err := s.RemoveNamespace(2); !errors.Is(err, syscall.ENOENT) {
		t.Error(err)
	}
	for _, cfg := range []ControllerConfig{{CNTLID: 0xfff0}, {IOQueues: -1}, {IOQueues: 65536}, {QueueEntries: 1}, {MDTS: 13}, {InCapsule: 15},
		{SGLs: 256}, {KeepAlive: -1}} {
		if _, err := s.NewController(cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	c := must(s.NewController(ControllerConfig{CNTLID: 1}))(t)
	if _, err := s.NewController(ControllerConfig{CNTLID: 1}); !errors.Is(err, syscall.EEXIST) {
		t.Error(err)
	}
	other := must(s.NewController(ControllerConfig{}))(t)
	if other.CNTLID() != 2 {
		t.Error(other.CNTLID())
	}
	c.Close()
	must(s.NewController(ControllerConfig{CNTLID: 1}))(t).Close()
	other.Close()
}

// Namespaces come and go beside commands; RemoveNamespace waits for those that use the namespace.
func TestRemoveBesideCommands(t *testing.T) {
	s := must(NewSubsystem(SubsystemConfig{NQN: testNQN}))(t)
	c := must(s.NewController(ControllerConfig{}))(t)
	defer c.Close()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			buf := make([]byte, 4096)
			for {
				select {
				case <-stop:
					return
				default:
				}
				cmd := ioCmd(IOWrite, 0, 1)
				done, _ := c.Execute(false, &cmd, [][]byte{buf})
				if st := done.Status; st != StatusSuccess && st != StatusInvalidField|dnr {
					t.Errorf("%v", st)
					return
				}
			}
		})
	}
	for range 200 {
		ns := &plain{Namespace: memoryNS(t)}
		check(t, s.AddNamespace(1, ns))
		check(t, s.RemoveNamespace(1))
		ns.removed = true // without a lock: nobody uses it any more
	}
	close(stop)
	wg.Wait()
}

// plain is storage that the race detector watches: it may not be used after it is removed.
type plain struct {
	Namespace
	removed bool
}

func (p *plain) WriteAt(b []byte, off int64) (int, error) {
	if p.removed {
		panic("used after it was removed")
	}
	return p.Namespace.WriteAt(b, off)
}
