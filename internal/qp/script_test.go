package qp

// Scripts: stories of one rule each, named by its clause, under testdata. To
// write the output anew: go test ./internal/qp -run TestScripts -rewrite.
//
// After every command both queue pairs send what they have to send and both
// applications poll; whatever happened is shown, so that nothing happens in
// silence. Trains wait on the wires until the script delivers them.
//
//	pair [type=rc|uc|ud|xrc] [mtu=256] [window=64] [retry=7] … two connected ends, a and b;
//	                                 "b.retry=0" holds for b alone
//	region b NAME [size=] [pd=] [access=(…)]   registers memory ("mem" is there)
//	window b NAME [type=2] [pd=]     makes a memory window; "tag=" names another key of it than its last
//	bind b NAME on=mem+0 size= …     posts the verb that binds a type 1 window ("post b bind mw=NAME tag=" is for type 2)
//	mkey b NAME [pieces=4] [pd=]     makes an indirect key; "post b configure mkey=NAME list=(mem+0/64,…)", or
//	                                 "strides=(mem+0/64/192,…) repeat=8", makes it of regions
//	close b NAME                     closes a region, window or indirect key
//	post a OP id=1 [len=] [at=mem+0] [to=mem+0] [signaled] [fence] [solicited] …
//	recv b id=1 [len=] [at=mem+0] [count=] [srq=]
//	srq b 0x52 [pd=] [domain=] [close]   makes an XRC shared receive queue (0x51 is there)
//	deliver b [1 2 …]                trains on the way to b arrive: all, or these
//	drop b [1 2 …]                   … are lost
//	dup b 1                          … arrives twice
//	move b 1 2                       … is overtaken: it takes the place of 2
//	cut b [1]                        … is split into packets, one train each
//	alter b 1 psn=+1 len=9 …         … is changed on the way
//	inject b KIND psn=+0 …           a train that b's peer never sent
//	exchange                         everything arrives, and the answers, until none is on the way
//	advance 10ms [lost]              time passes; deadlines are met; trains sent meanwhile are lost
//	answering 10ms                   time passes, and everything arrives
//	modify a state=sqd …             Modify; "query a" shows the attributes
//	arm b next|solicited             asks for a completion event
//	limit b 2                        arms the limit of a shared receive queue
//	unreadable a 1                   the link cannot read the payload of a's next train
//	poll a off                       the application stops polling; "on": goes on
//	credits a 4                      another queue pair takes (-4: gives back) credits
//	sync b [eio]                     storage carries out a FLUSH; or it fails
//	begin b [receive] | end b        … in two steps; or what it has to fetch is fetched
//	absent b mem+0 [len=]            memory (of a "lazy" pair) has to be fetched first
//	fetch b [gone]                   what waits for memory gets it; or it turns out to be gone
//	suspend b mem | resume b mem     memory is taken away for a moment; "revoke": for ever
//	stored b mem+8                   shows eight bytes as storage has them
//	u64 b mem+8 [=5]                 shows or sets eight bytes
//	same a mem+0 b mem+100 len=      compares memory
//	show | wire b | counters b       where everything stands
//
// "hold" at the end of a command keeps the queue pairs from sending after it.

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/queue"
)

func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if filepath.Ext(path) != ".txt" { // fuzz corpora
			return
		}
		s := &script{t: t, polling: [2]bool{true, true}}
		datadriven.RunTestAny(t, path, s.run)
	})
}

// script is the state of one story.
type script struct {
	t       testing.TB
	w       *world
	out     strings.Builder
	polling [2]bool
	begun   Work                 // what storage is at
	line    string               // where we are, for failures
	tap     func(e *end, op any) // if set, sees what is posted (work requests) and delivered (trains)
	stamp   bool                 // lines begin with the time
}

func (s *script) fatalf(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf(s.line+": "+format, args...)
}

func (s *script) printf(format string, args ...any) {
	if s.stamp {
		fmt.Fprintf(&s.out, "[%v] ", s.w.now-epoch)
	}
	fmt.Fprintf(&s.out, format+"\n", args...)
}

// commands lists all, with those that need no world yet.
var commands = map[string]func(*script, *cmdArgs){
	"pair": (*script).pair, "region": (*script).region, "close": (*script).close, "post": (*script).post,
	"recv": (*script).recv, "deliver": (*script).deliver, "drop": (*script).drop, "dup": (*script).dup,
	"move": (*script).move, "cut": (*script).cut, "alter": (*script).alter, "inject": (*script).inject,
	"advance": (*script).advance, "exchange": (*script).exchange, "modify": (*script).modify, "query": (*script).query, "arm": (*script).arm,
	"limit": (*script).limit, "unreadable": (*script).unreadable, "poll": (*script).poll, "credits": (*script).credits,
	"u64": (*script).u64, "same": (*script).same, "show": (*script).show, "wire": (*script).wire,
	"counters": (*script).counters, "sync": (*script).sync, "begin": (*script).begin, "end": (*script).end, "stored": (*script).stored,
	"srq": (*script).srq, "window": (*script).window, "bind": (*script).bind, "mkey": (*script).mkey,
	"absent": (*script).absent, "answering": (*script).answering, "fetch": (*script).fetch,
	"suspend": (*script).suspend, "resume": (*script).resume, "revoke": (*script).revoke,
}

func (s *script) run(_ testing.TB, d *datadriven.TestData) string {
	s.t.Helper()
	s.line = d.Pos
	s.out.Reset()
	f := commands[d.Cmd]
	if f == nil {
		s.fatalf("no command %q", d.Cmd)
	}
	a := &cmdArgs{s: s, args: d.CmdArgs, used: make([]bool, len(d.CmdArgs))}
	hold := a.flag("hold")
	if s.w != nil {
		s.w.holding = hold
	}
	f(s, a)
	a.done()
	s.observe()
	s.w.holding = false
	if s.out.Len() == 0 {
		return "ok\n"
	}
	return s.out.String()
}

// observe lets the ends send and shows what happened.
func (s *script) observe() {
	s.w.pullAll()
	for i, e := range s.w.ends() {
		if s.polling[i] {
			s.drain(e, "send", e.sendCQ)
			s.drain(e, "recv", e.recvCQ)
		}
		if st := e.q.State(); st != e.state {
			s.printf("%s state: %v -> %v", e.name, e.state, st)
			e.state = st
		}
	}
}

func (s *script) drain(e *end, name string, cq *queue.CQ) {
	var wcs [8]ib.WC
	for n := cq.Poll(wcs[:]); n > 0; n = cq.Poll(wcs[:]) {
		for i := range n {
			s.printf("%s", describeWC(e, name, &wcs[i]))
		}
	}
}

// cmdArgs are the arguments of a command; each must be used.
type cmdArgs struct {
	s    *script
	args []datadriven.CmdArg
	used []bool
	next int // the next one without a name
}

func (a *cmdArgs) done() {
	for i, u := range a.used {
		if !u {
			a.s.fatalf("argument %q is not understood", a.args[i].Key)
		}
	}
}

// word returns the next argument without a value, "" if there is none.
func (a *cmdArgs) word() string {
	for ; a.next < len(a.args); a.next++ {
		if !a.used[a.next] && len(a.args[a.next].Vals) == 0 {
			a.used[a.next] = true
			return a.args[a.next].Key
		}
	}
	return ""
}

func (a *cmdArgs) flag(name string) bool {
	for i, x := range a.args {
		if x.Key == name && len(x.Vals) == 0 && !a.used[i] {
			a.used[i] = true
			return true
		}
	}
	return false
}

// values returns the values of key=value or key=(value,value), nil if absent.
func (a *cmdArgs) values(key string) []string {
	for i, x := range a.args {
		if x.Key == key && len(x.Vals) > 0 {
			a.used[i] = true
			return x.Vals
		}
	}
	return nil
}

func (a *cmdArgs) str(key, def string) string {
	if v := a.values(key); v != nil {
		return v[0]
	}
	return def
}

func (a *cmdArgs) num(key string, def uint64) uint64 {
	v := a.values(key)
	if v == nil {
		return def
	}
	return a.parse(v[0])
}

func (a *cmdArgs) parse(s string) uint64 {
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		a.s.fatalf("%q is not a number", s)
	}
	return n
}

func (a *cmdArgs) has(key string) bool {
	return slices.ContainsFunc(a.args, func(x datadriven.CmdArg) bool { return x.Key == key })
}

func (a *cmdArgs) end() *end {
	switch w := a.word(); w {
	case "a":
		return a.s.w.a
	case "b":
		return a.s.w.b
	default:
		a.s.fatalf("%q is neither a nor b", w)
		return nil
	}
}

// place parses name+offset.
func (a *cmdArgs) place(e *end, s string) (*region, uint64) {
	name, off, _ := strings.Cut(s, "+")
	r := e.regions[name]
	if r == nil {
		a.s.fatalf("%s has no region %q", e.name, name)
	}
	if off == "" {
		return r, 0
	}
	return r, a.parse(off)
}

// sgl parses where the bytes of a request lie: sge=(mem+0/100,mem+300/50), or
// at=mem+0 len=150.
func (a *cmdArgs) sgl(e *end) []ib.SGE {
	var l []ib.SGE
	for _, v := range a.values("sge") {
		where, n, _ := strings.Cut(v, "/")
		r, off := a.place(e, where)
		l = append(l, r.at(off, int(a.parse(n))))
	}
	r, off := a.place(e, a.str("at", "mem+0"))
	if n := int(a.num("len", 0)); n > 0 {
		l = append(l, r.at(off, n))
	}
	return l
}
