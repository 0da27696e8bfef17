package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/clib/settings"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// conf returns the settings, which its first call reads from the variables that the front has passed.
var conf = sync.OnceValue(func() *settings.Settings {
	s, err := settings.Parse(device.Getenv, os.Getpid())
	if err != nil {
		fmt.Fprintf(os.Stderr, "verbena: %v\n", err)
	}
	if !s.Log {
		slog.SetLogLoggerLevel(slog.LevelError) // standard error belongs to the program
	}
	return s
})

// failed returns the negative errno that C gets for an error.
func failed(err error) C.int64_t {
	if conf().Log {
		fmt.Fprintf(os.Stderr, "verbena: %v\n", err)
	}
	errno := syscall.EIO
	errors.As(err, &errno)
	return -C.int64_t(errno)
}

// result returns 0, or what failed returns for an error.
func result(err error) C.int64_t {
	if err != nil {
		return failed(err)
	}
	return 0
}

var errStale = ib.Errorf("handle", syscall.EINVAL, "no such object, or it was destroyed")

// descriptors is the number from which on descriptors are out of the program's way.
var descriptors int

// vbe_version is the front's first call. Meanwhile the limit on descriptors is raised
// (../front/limits.c).
//
//export vbe_version
func vbe_version(f *C.struct_vbe_front) C.int64_t {
	C.set_front(f)
	device.SetEnvironment(stringList(f.settings))
	descriptors = int(f.descriptors)
	if err := device.StartPoller(int(f.descriptors)); err != nil && conf().Log {
		fmt.Fprintf(os.Stderr, "verbena: the descriptors of the Go runtime are not out of the program's way, and it will crash if the program closes them: %v\n", err)
	}
	return C.VBE_VERSION
}

// list returns the devices: those of VERBENA_ADDR, or one for each interface. The loopback
// interface is left out where there is another: its address is the same on every host, and
// programs that use all devices they see (UCX) would take it for a second path to a peer.
func list() ([]listed, error) {
	all, err := listOwn()
	for i := range all {
		all[i].name = shownName(all[i].name)
	}
	return all, err
}

// shownName returns the name that programs see of a device: that of VERBENA_NAME, with its number.
func shownName(name string) string {
	return conf().Name + strings.TrimPrefix(name, settings.DefaultName)
}

// ownName takes back shownName.
func ownName(shown string) string {
	return settings.DefaultName + strings.TrimPrefix(shown, conf().Name)
}

// listOwn is list, with the device's own names.
func listOwn() ([]listed, error) {
	s := conf()
	base := provider.Config{Link: s.Link, Lock: ib.LockOff, Window: s.Window, Receivers: s.Receivers, PCAP: s.PCAP, PinDMABuf: s.DMABuf == "pinned", Limits: limits(s)}
	switch s.Lock {
	case "auto":
		base.Lock = ib.LockAuto
	case "strict":
		base.Lock = ib.LockStrict
	}
	infos, err := device.List()
	if err != nil {
		return nil, err
	}
	var all []listed
	if s.Addrs != nil {
		for i, addrs := range s.Addrs {
			c := base
			c.Addrs = addrs
			all = append(all, listed{fmt.Sprintf("%s%d", settings.DefaultName, i), interfaceOf(infos, addrs), c})
		}
		return all, nil
	}
	for _, info := range infos {
		c := base
		c.Addrs = info.Addrs
		all = append(all, listed{info.Name, info.Interface, c})
	}
	all = found.update(all)
	if s.Devices == nil {
		return found.withoutLoopback(all), nil
	}
	var chosen []listed
	for _, want := range s.Devices {
		for _, d := range all {
			if want == d.name || want == d.iface || want == shownName(d.name) {
				chosen = append(chosen, d)
			}
		}
	}
	return chosen, nil
}

// interfaceOf returns the interface that has one of the addresses, or "".
func interfaceOf(infos []ib.DeviceInfo, addrs addrList) string {
	for _, i := range infos {
		for _, a := range i.Addrs {
			if slices.Contains(addrs, a) || a.IsLoopback() && addrs[0].IsLoopback() && a.Is4() == addrs[0].Is4() {
				return i.Interface
			}
		}
	}
	return ""
}

func limits(s *settings.Settings) provider.Limits {
	l := s.Limits
	return provider.Limits{QPs: l["qp"], CQs: l["cq"], MRs: l["mr"], MWs: l["mw"], PDs: l["pd"], AHs: l["ah"],
		SRQs: l["srq"], QPWR: l["qp_wr"], CQE: l["cqe"], SRQWR: l["srq_wr"]}
}

//export vbe_list
func vbe_list(out *C.struct_vbe_device, room C.int64_t) C.int64_t {
	all, err := list()
	if err != nil {
		return failed(err)
	}
	to := view(out, int(room))
	n := min(len(all), len(to))
	for i := range all[:n] {
		to[i] = cDevice(&all[i])
	}
	return C.int64_t(n)
}

func cDevice(d *listed) C.struct_vbe_device {
	c := C.struct_vbe_device{guid: C.uint64_t(device.GUID(d.config.Addrs[0]))}
	setChars(c.name[:], d.name)
	setChars(c._interface[:], d.iface)
	return c
}

// setChars writes a C string, cut to its room.
func setChars(to []C.char, s string) {
	n := min(len(s), len(to)-1)
	for i := range n {
		to[i] = C.char(s[i])
	}
	to[n] = 0
}

// shared is an open device. The contexts of this process share it, since a process can open
// an address only once.
type shared struct {
	name string
	dev  *device.Device
	refs int           // guarded by devices.mu
	told bool          // guarded by devices.mu: the counters of VERBENA_STATS are written
	done chan struct{} // closed when watch has returned
	stop func()

	// The objects that events are for.
	qps  listeners[queuePair]
	cqs  listeners[completionQueue]
	srqs listeners[sharedQueue]
}

var devices struct {
	mu     sync.Mutex // guards opened; held while a device is opened or closed
	opened map[string]*shared
}

// acquire returns an open device, and counts one more user of it.
func acquire(name string) (*shared, error) {
	devices.mu.Lock()
	if s := devices.opened[name]; s != nil {
		s.refs++
		devices.mu.Unlock()
		return s, nil
	}
	devices.mu.Unlock()
	all, err := list()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(d listed) bool { return d.name == name })
	if i < 0 {
		return nil, ib.Errorf("open_device", syscall.ENODEV, "there is no device %q", name)
	}
	return acquireListed(all[i])
}

// acquireListed is acquire of a device that the caller has just listed.
func acquireListed(d listed) (*shared, error) {
	name := d.name
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if s := devices.opened[name]; s != nil {
		s.refs++
		return s, nil
	}
	dev, err := device.Open(name, &d.config)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &shared{name: name, dev: dev, refs: 1, done: make(chan struct{}), stop: stop}
	if devices.opened == nil {
		devices.opened = map[string]*shared{}
	}
	devices.opened[name] = s
	found.opened(ownName(name), d.config.Addrs)
	go s.watch(ctx)
	return s, nil
}

// release ends a use. The last one closes the device.
func (s *shared) release() error {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if s.refs--; s.refs > 0 {
		return nil
	}
	delete(devices.opened, s.name)
	s.stop()
	<-s.done
	s.writeStats()
	err := s.dev.Close()
	found.closed(ownName(s.name))
	return err
}

// watch delivers asynchronous events until ctx is cancelled.
func (s *shared) watch(ctx context.Context) {
	defer close(s.done)
	for {
		ev, err := s.dev.NextEvent(ctx)
		if err != nil {
			return
		}
		s.deliver(ev)
	}
}

// eventTypes are the numbers of ibv_event_type.
var eventTypes = map[ib.EventType]C.uint32_t{
	ib.EventCQErr: 0, ib.EventQPFatal: 1, ib.EventQPReqErr: 2, ib.EventQPAccessErr: 3, ib.EventCommEst: 4,
	ib.EventSQDrained: 5, ib.EventDeviceFatal: 8, ib.EventPortActive: 9, ib.EventPortErr: 10, ib.EventSRQErr: 14,
	ib.EventSRQLimitReached: 15, ib.EventQPLastWQEReached: 16,
}

func (s *shared) deliver(ev ib.AsyncEvent) {
	typ, known := eventTypes[ev.Type]
	switch {
	case !known:
	case ev.QPN != 0:
		s.qps.each(ev.QPN, func(q *queuePair) { C.call_async_event(q.ctx.cookie, C.VBE_OF_QP, q.cookie, typ) })
	case ev.CQ != 0:
		s.cqs.each(ev.CQ, func(q *completionQueue) { C.call_async_event(q.ctx.cookie, C.VBE_OF_CQ, q.cookie, typ) })
	case ev.SRQ != 0:
		s.srqs.each(ev.SRQ, func(q *sharedQueue) { C.call_async_event(q.ctx.cookie, C.VBE_OF_SRQ, q.cookie, typ) })
	default:
		for _, c := range contexts.all() {
			if c.shared == s {
				C.call_async_event(c.cookie, C.VBE_OF_PORT, 0, typ)
			}
		}
	}
}

// writeStats appends the device's counters to the file that VERBENA_STATS names.
func (s *shared) writeStats() {
	path := conf().Stats
	if path == "" || s.told {
		return
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# %s, process %d, %s\n", s.name, os.Getpid(), program())
	counter := func(name string, value uint64) {
		if value != 0 {
			fmt.Fprintf(&b, "%-40s %d\n", name, value)
		}
	}
	for _, c := range s.dev.Counters() {
		counter(c.Name, c.Value)
	}
	paging := s.dev.PagingStats()
	for _, c := range slices.Concat(paging.Counters(), paging.DebugCounters()) {
		counter(c.Name, c.Value)
	}
	if path == "stderr" {
		fmt.Fprint(os.Stderr, b.String())
		return
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err == nil {
		_, err = f.WriteString(b.String())
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "verbena: VERBENA_STATS: %v\n", err)
	}
}

// vbe_write_stats does not wait for a thread that opens or closes a device: that thread may have been stopped
// by the end of the process.
//
//export vbe_write_stats
func vbe_write_stats() C.int64_t {
	if !devices.mu.TryLock() {
		return -C.int64_t(C.EBUSY)
	}
	defer devices.mu.Unlock()
	for _, s := range devices.opened {
		s.writeStats()
		s.told = true // whatever the program's destructors still close
	}
	return 0
}

// program returns the name of the program. os.Args is empty in a library on some systems.
func program() string {
	if len(os.Args) > 0 {
		return os.Args[0]
	}
	return "?"
}
