package mem

// Copies by several processors at a time. An engine moves bytes of page-locked memory several times as fast as one
// processor copies them there. So where many are to be copied to or from staging bytes, some goroutines help: as many as
// half of the processors, but no more than maxHelpers. They help one caller at a time, and look for more to do for a while:
// to start them takes as long as to copy some ten thousand bytes.

import (
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// maxHelpers is how many goroutines help at most.
	maxHelpers = 7
	// helpLinger is how long a helper looks for more to do, where there are processors enough.
	helpLinger = 50 * time.Microsecond
	// helpPiece is the shortest copy that is worth handing to a helper, helpLeast the shortest that is worth parting.
	helpPiece = 32 << 10
	helpLeast = 128 << 10
	// pieceMask makes lengths of copies multiples of a page.
	pieceMask = 4<<10 - 1
)

// helpers is how many may help.
var helpers atomic.Int32

func init() { helpers.Store(int32(min(runtime.GOMAXPROCS(0)/2-1, maxHelpers))) } //nolint:gosec // it is small

// gang is the helpers of the process.
var gang struct {
	work atomic.Pointer[shared] // nil: nothing to do
	live atomic.Int32           // how many there are
}

// shared is work that several goroutines do: the calls do(0) to do(n-1).
type shared struct {
	do         func(i int)
	n          int32
	next, over atomic.Int32
}

// help does what nobody has begun.
func (s *shared) help() {
	for {
		i := s.next.Add(1) - 1
		if i >= s.n {
			return
		}
		s.do(int(i))
		s.over.Add(1)
	}
}

// together calls do for 0 to n-1, several at a time if there are helpers, and returns when all calls have returned.
func together(n int, do func(i int)) {
	most := min(helpers.Load(), int32(n)-1) //nolint:gosec // it is small
	s := &shared{do: do, n: int32(n)}       //nolint:gosec // as is n
	if most <= 0 || !gang.work.CompareAndSwap(nil, s) {
		s.help() // or others are being helped
		return
	}
	for gang.live.Load() < most {
		gang.live.Add(1)
		go helper()
	}
	s.help()
	for s.over.Load() < s.n {
		runtime.Gosched()
	}
	gang.work.Store(nil)
}

// helper helps until there has been nothing to do for a while.
func helper() {
	defer gang.live.Add(-1)
	idle := time.Now()
	for {
		if s := gang.work.Load(); s != nil && s.next.Load() < s.n {
			s.help()
			idle = time.Now()
			continue
		}
		if !manyCPUs || time.Since(idle) > helpLinger {
			return
		}
		for i := 0; i < 100 && gang.work.Load() == nil; i++ {
			continue
		}
	}
}

// CopyToStaging copies the first bytes of a list to staging bytes, which are those of to, by several processors if there are
// many. The list's payload may be by reference.
func CopyToStaging(to, l *List) Fault {
	b := to.Raw[0]
	many := max(0, int(helpers.Load())) + 1
	piece := max(helpPiece, (len(b)/many+pieceMask)&^pieceMask)
	k := (len(b) + piece - 1) / piece
	if len(b) < helpLeast || many == 1 {
		f, _ := Copy(to, l, uint64(len(b)), false)
		return f
	}
	faults := make([]Fault, k)
	together(k, func(i int) {
		to, from := b[i*piece:min(len(b), (i+1)*piece)], *l
		from.Off += uint64(i * piece)
		from.Memo = nil // it is for one goroutine
		faults[i], _ = Copy(&List{Raw: [][]byte{to}}, &from, uint64(len(to)), false)
	})
	for _, f := range faults {
		if !f.OK() {
			return f
		}
	}
	return Fault{}
}
