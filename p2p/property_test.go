package p2p

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"testing"
)

// random makes a machine by chance: host bridges of all sorts, nested switches, bridges, functions
// with ACS bits anywhere.
func randomMachine(r *rand.Rand) (*Topology, error) {
	cpus := []CPU{intelMax, zen, {"AuthenticAMD", 0x16, 0}, {"AuthenticAMD", 0x1a, 0}, {"HygonGenuine", 0x18, 0}, {}}
	ids := []ID{q35, skylake, ivy, dsa, google, noDevice, {0x8086, 0x2f01}, {0x8086, 0x09a2}, {0x8086, 0x4948}}
	b := NewBuilder(cpus[r.IntN(len(cpus))])
	if r.IntN(2) == 0 {
		b.Spec.Kernel = Linux612
	}
	b.Spec.IOMMU = r.IntN(2) == 0
	acs := func() *ACS {
		if r.IntN(2) == 0 {
			return nil
		}
		bits := ACSBits(r.IntN(1 << 7))
		if r.IntN(2) == 0 {
			bits &^= redirects
		}
		return &ACS{Capability: allACS, Control: bits}
	}
	var fill func(p *Part, depth int)
	device := func(p *Part) {
		e := p.Endpoint("", idNVMe, ClassNVMe, cmb(Hex(1)<<(12+r.IntN(16))))
		e.Function.ACS = acs()
		for range r.IntN(3) {
			e.Another("").Function.ACS = acs()
		}
	}
	fill = func(p *Part, depth int) {
		switch n := r.IntN(5); {
		case n == 0 && depth < 3:
			for _, down := range p.Switch(1+r.IntN(3), nil) {
				down.Function.ACS = acs()
				fill(down, depth+1)
			}
			p.below[0].Function.ACS = acs()
		case n == 1:
			bridge := p.Bridge()
			for range 1 + r.IntN(3) {
				bridge.add(FunctionSpec{Kind: Conventional, ID: idNVMe})
			}
		case n < 4:
			device(p)
		}
	}
	for range 1 + r.IntN(3) {
		h := b.HostBridge(ids[r.IntN(len(ids))])
		if r.IntN(3) == 0 {
			device(h)
		}
		for range r.IntN(4) {
			port := h.RootPort(acs())
			port.Function.ID = ids[r.IntN(len(ids)-1)]
			fill(port, 0)
		}
	}
	t, err := b.Build()
	if err != nil {
		return nil, err
	}
	// Some root buses begin with another device than 00.0.
	s := t.Spec()
	for _, h := range s.HostBridges {
		if r.IntN(2) == 0 {
			continue
		}
		for i := range s.Functions {
			if f := &s.Functions[i]; f.Address.Bus == h.Bus {
				f.Address.Device += 2
			}
		}
	}
	return New(s)
}

// slowVerdict is the rules once more, written from their description and not from the code: by
// lists of names, without precomputed counts.
func slowVerdict(s *Spec, provider, client Address) (MapType, int) {
	find := func(a Address) *FunctionSpec {
		for i := range s.Functions {
			if s.Functions[i].Address == a {
				return &s.Functions[i]
			}
		}
		return nil
	}
	up := func(a Address) (path []string) {
		for f := find(a); f != nil; {
			path = append(path, f.Address.String())
			var above *FunctionSpec
			for i := range s.Functions {
				if g := &s.Functions[i]; g.Secondary != 0 && g.Secondary == f.Address.Bus && g.Address.Domain == f.Address.Domain {
					above = g
				}
			}
			f = above
		}
		return path
	}
	hostOf := func(path []string) string {
		top, _ := ParseAddress(path[len(path)-1])
		return fmt.Sprintf("pci%04x:%02x", top.Domain, top.Bus)
	}
	redirecting := func(name string) bool {
		a, _ := ParseAddress(name)
		f := find(a)
		if f.ACS == nil {
			return false
		}
		for _, bit := range f.ACS.Control.Names() {
			if bit == "request redirect" || bit == "completion redirect" || bit == "egress control" {
				return true
			}
		}
		return false
	}
	a, b := up(provider), up(client)
	meet := -1
	for i, name := range a {
		if slices.Contains(b, name) {
			meet = i
			break
		}
	}
	distance := len(a) + len(b)
	if meet >= 0 {
		k := slices.Index(b, a[meet])
		distance = meet + k
		if !slices.ContainsFunc(append(slices.Clone(a[:meet+1]), b[:k]...), redirecting) {
			return BusAddress, distance
		}
	}
	if s.CPU.Vendor == "AuthenticAMD" && s.CPU.Family >= 23 {
		return ThroughHostBridge, distance
	}
	trusted := func(host string) bool {
		var first *FunctionSpec
		for i := range s.Functions {
			f := &s.Functions[i]
			if f.PhysFn == nil && host == fmt.Sprintf("pci%04x:%02x", f.Address.Domain, f.Address.Bus) && (first == nil || f.Address.Compare(first.Address) < 0) {
				first = f
			}
		}
		if first.Kind != RootPort && (first.Address.Device != 0 || first.Address.Function != 0) {
			return false
		}
		switch first.ID.String() {
		case "8086:3c00", "8086:3c01", "8086:2f00", "8086:2f01":
			return hostOf(a) == hostOf(b)
		case "8086:2030", "8086:2031", "8086:2032", "8086:2033", "8086:2020", "8086:09a2":
			return true
		case "8086:0b25", "8086:0cfe", "8086:11fb", "8086:1212", "8086:1216", "8086:4940", "8086:4942", "8086:4944", "8086:4946", "8086:4948":
			return s.Kernel == "7.2"
		}
		return s.Kernel == "7.2" && first.ID.Vendor == 0x1ae0
	}
	if trusted(hostOf(a)) && trusted(hostOf(b)) {
		return ThroughHostBridge, distance
	}
	return NotSupported, -1
}

// TestAgainstSlow compares every pair of machines by chance with the rules written a second time.
// Each machine also survives JSON and a dump.
func TestAgainstSlow(t *testing.T) {
	r, _ := seeds(t)
	seen := map[MapType]int{}
	pairs := 0
	rounds := 40
	if os.Getenv("VERBENA_FULL") != "" {
		rounds = 1000
	}
	for round := range rounds {
		top, err := randomMachine(r)
		check(t, err)
		s := top.Spec()
		all := top.Functions()
		matrix := top.Matrix(all, all)
		for i, p := range all {
			for k, c := range all {
				want, distance := slowVerdict(&s, p, c)
				v := top.Verdict(p, c)
				if v.Map != want || v.Distance != distance || v.Reason == "" || matrix[i][k] != (Cell{want, distance}) {
					b, _ := json.Marshal(s)
					t.Fatalf("round %d: %v → %v: %v, %d (%s), matrix %v; want %v, %d\n%s", round, p, c, v.Map, v.Distance, v.Reason, matrix[i][k], want, distance, b)
				}
				seen[want]++
				pairs++
			}
		}
		if round%10 == 0 {
			survives(t, top)
		}
	}
	t.Logf("%d pairs: %v", pairs, seen)
	if len(seen) != 3 || min(seen[BusAddress], seen[ThroughHostBridge], seen[NotSupported]) < pairs/50 {
		t.Errorf("the machines are too much alike: %v", seen)
	}
}

// survives wants a topology to be the same after JSON and after a dump.
func survives(t *testing.T, top *Topology) {
	t.Helper()
	b, err := json.Marshal(top)
	check(t, err)
	same(t, "JSON", must(ParseJSON(b))(t), top)
	dir := t.TempDir() + "/dump"
	check(t, top.Dump(dir))
	same(t, "a dump", must(Read(dir))(t), top)
}

func same(t *testing.T, what string, got, want *Topology) {
	t.Helper()
	a, b := got.Spec(), want.Spec()
	if len(a.Functions) != len(b.Functions) {
		t.Fatalf("after %s: %d functions, want %d", what, len(a.Functions), len(b.Functions))
	}
	for i := range a.Functions {
		x, _ := json.Marshal(a.Functions[i])
		y, _ := json.Marshal(b.Functions[i])
		if string(x) != string(y) {
			t.Fatalf("after %s:\n%s\nwant\n%s", what, x, y)
		}
	}
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	if string(x) != string(y) || !reflect.DeepEqual(got.Matrix(got.Functions(), got.Functions()), want.Matrix(want.Functions(), want.Functions())) {
		t.Fatalf("after %s:\n%s\nwant\n%s", what, x, y)
	}
}
