package device

// How queue pairs are spread over shards. A device begins with one shard. Where there are
// enough processors, a queue pair that would share its shard with others gets a number of a
// new shard, which has a socket of its own. A queue pair is in the first shard until it is
// connected with a peer that it reaches by packets: then it moves to the shard of its number,
// where its packets arrive.

import (
	"iter"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// spread are the shards of a device.
type spread struct {
	byPlace [sys.NumPlaces]atomic.Pointer[shard] // if other processes can share the device

	growing sync.Mutex // is held by the goroutine that adds a shard; taken before mu

	mu   sync.Mutex // guards what follows, and the shards' loads
	list []*shard   // the first one was there from the beginning
	most int        // how many there may be
}

// maxReceivers is how many shards a device has at most: with more of them, a program that polls
// one completion queue for all its queue pairs would find packets late.
const maxReceivers = 8

// addShard adds a shard, which makes progress from when run is called.
func (d *Device) addShard(r link.Receiver, places *host.Places) *shard {
	s := &shard{dev: d, receiver: r, places: places, done: make(chan struct{}), armed: make(chan struct{}, 1)}
	s.rx.dev = d
	reserved := func(i uint32) bool { return i <= 1 || sys.IsManagement(i) || i == wire.MulticastQP }
	if d.member != nil {
		s.qps = mem.NewSharedSlots[QP](d.limits.QPs, reserved, d.member.Key())
	} else {
		s.qps = mem.NewSlots[QP](d.limits.QPs, reserved, mem.RandomPermKey())
	}
	d.spread.mu.Lock()
	s.number = len(d.spread.list)
	d.spread.list = append(d.spread.list, s)
	d.spread.mu.Unlock()
	return s
}

// receivers returns how many shards a device with a configuration may have.
func receivers(cfg *provider.Config, shared bool) int {
	switch {
	case !shared || cfg.Link == linkLocal: // no packets come
		return 1
	case cfg.Receivers > 0:
		return cfg.Receivers
	}
	return max(1, min(runtime.GOMAXPROCS(0)/2, maxReceivers)) // the senders need processors, too
}

// shards returns the shards.
func (d *Device) shards() []*shard {
	d.spread.mu.Lock()
	defer d.spread.mu.Unlock()
	return slices.Clone(d.spread.list)
}

// findQP returns the queue pair of this process that has a number, or nil.
func (d *Device) findQP(number uint32) *QP {
	if d.member == nil {
		return d.first.qps.Get(number)
	}
	if s := d.spread.byPlace[sys.Place(number)].Load(); s != nil {
		return s.qps.Get(number)
	}
	return nil
}

// allQPs iterates over the queue pairs and their numbers.
func (d *Device) allQPs() iter.Seq2[uint32, *QP] {
	return func(yield func(uint32, *QP) bool) {
		for _, s := range d.shards() {
			for number, q := range s.qps.All() {
				if !yield(number, q) {
					return
				}
			}
		}
	}
}

// lease returns what gets numbers for queue pairs of the shard; nil if all numbers are its own.
func (s *shard) lease() func() (uint32, error) {
	if s.places == nil {
		return nil
	}
	return func() (uint32, error) {
		r, err := s.places.Lease()
		if err == nil {
			s.dev.spread.byPlace[r>>(mem.PlaceSlotBits-mem.RangeBits)].Store(s)
		}
		return r, err
	}
}

// newQP returns a queue pair that has no number and no core yet.
func newQP(d *Device, owner interface{ unuse(n *int) }) *QP {
	q := &QP{dev: d, owner: owner, timerIndex: -1, home: d.first}
	q.shard.Store(d.first)
	return q
}

// chooseHome chooses the shard that a queue pair gets its number from. The queue pairs of one
// completion queue, which one thread is likely to poll, stay together, two by two.
func (q *QP) chooseHome(t ib.QPType) {
	sp := &q.dev.spread
	if t != ib.RC && t != ib.UC {
		return
	}
	sp.mu.Lock()
	best := slices.MinFunc(sp.list, func(a, b *shard) int { return a.load - b.load })
	least, grow := best.load, false
	if len(sp.list) < sp.most {
		least, grow = 0, best.load > 0
	}
	if c := q.sendCQ.home; c != nil && c.load <= least+1 {
		best, grow = c, false
	}
	sp.mu.Unlock()
	if grow {
		if s := q.dev.newShard(); s != nil {
			best = s
		}
	}
	sp.mu.Lock()
	defer sp.mu.Unlock()
	best.load++
	q.home, q.counted, q.sendCQ.home = best, true, best
}

// newShard adds a shard with a socket for each address. It returns nil if there are enough, or
// if that is not possible: then it is not tried again.
func (d *Device) newShard() *shard {
	d.spread.growing.Lock()
	defer d.spread.growing.Unlock()
	d.spread.mu.Lock()
	enough := len(d.spread.list) >= d.spread.most
	d.spread.mu.Unlock()
	if enough {
		return nil
	}
	r, err := d.link.(*link.Shared).NewReceiver()
	var places *host.Places
	if err == nil {
		places, err = d.member.MorePlaces(func(w *host.Sockets) (int, error) { return listen(r, w) })
	}
	if err != nil {
		d.spread.mu.Lock()
		d.spread.most = 0
		d.spread.mu.Unlock()
		return nil
	}
	s := d.addShard(r, places)
	s.run() // what comes to its sockets for no queue pair has to be read and counted, too
	return s
}

// leaveHome undoes chooseHome.
func (q *QP) leaveHome() {
	if q.counted {
		q.dev.spread.mu.Lock()
		q.home.load--
		q.dev.spread.mu.Unlock()
	}
}

// changeShardLocked moves the queue pair, which is connected by a flow or, if that is nil, not connected,
// to the shard where what comes for it arrives. The queue pair is locked.
func (q *QP) changeShardLocked(f *train.Flow) {
	to, from := q.dev.first, q.shard.Load()
	if f != nil && q.dev.byPackets(f) {
		to = q.home
	}
	if to == from {
		return
	}
	from.timers.remove(q)
	q.armed = 0
	q.shard.Store(to)
	q.rearmLocked()
	q.eachCQ(func(c *CQ) { c.polls(to, from) })
}

// byPackets reports whether a flow goes by packets.
func (d *Device) byPackets(f *train.Flow) bool {
	s, shared := d.link.(*link.Shared)
	return shared && !isOwn(f) && !s.IsLocal(f)
}

// later lists a queue pair that has more to send: the next poll of its shard or the background
// goroutine there goes on with it.
func (q *QP) later() {
	if !q.queued.CompareAndSwap(false, true) {
		return
	}
	s := q.shard.Load()
	s.ready.Lock()
	s.ready.list.push(q)
	s.ready.some.Store(true)
	s.ready.Unlock()
	s.wakeBefore(0)
}

// polled are the shards that a poll of a completion queue makes progress for: those of the
// queue pairs that use the queue, or the first one if there are none.
type polled struct {
	mu    sync.Mutex     // guards users
	users map[*shard]int // queue pairs in each shard
	list  atomic.Pointer[[]*shard]
	next  atomic.Uint32 // polls that chose one of several
	busy  atomic.Uint32 // the index, in a list, of the shard where something arrived last
	vain  atomic.Uint32 // polls that found nothing: see help
}

// polls makes polls of the queue read one shard for a queue pair, instead of another; either may
// be nil.
func (c *CQ) polls(to, from *shard) {
	p := &c.polled
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users == nil {
		p.users = make(map[*shard]int)
	}
	if to != nil {
		p.users[to]++
	}
	if from != nil {
		if p.users[from]--; p.users[from] == 0 {
			delete(p.users, from)
		}
	}
	list := []*shard{c.dev.first}
	if len(p.users) > 0 {
		list = slices.Collect(maps.Keys(p.users))
	}
	p.list.Store(&list)
}

// choose returns which of n shards a poll reads: three times in four the one where something
// arrived last, since more is likely to come there, else each in turn.
func (p *polled) choose(n int) int {
	if n == 1 {
		return 0
	}
	k := p.next.Add(1)
	i := p.busy.Load() // may be of a longer list
	if k%4 == 0 {
		i = k / 4
	}
	return int(i % uint32(n))
}

// shards returns the shards that a poll reads.
func (p *polled) shards() []*shard { return *p.list.Load() }
