package p2p

import (
	"bytes"
	"encoding/json"
	"testing"
)

// Whatever JSON is taken makes verdicts for all pairs, and is taken again when it is written.
func FuzzJSON(f *testing.F) {
	add := func(seed string) {
		must(ParseJSON([]byte(seed)))(f)
		f.Add([]byte(seed))
	}
	// The seeds are short: the fuzzer tries to leave out every part of what it finds.
	add(`{"cpu":{"vendor":"AuthenticAMD","family":23},"iommu":true,"host_bridges":[{}],"functions":[
{"address":"00:01.0","kind":"root port","id":"8086:3c00","secondary":1,"subordinate":2,"acs":{"capability":95,"control":4},"windows":[{"first":"0x80000000","last":"0x8fffffff"}]},
{"address":"01:00.0","kind":"endpoint","id":"1b36:0010","bars":[{"index":2,"address":"0x80000000","size":"0x200000"}],"p2pmem":{"bar":2,"size":"0x200000","available":"0x1000"}},
{"address":"02:00.1","kind":"endpoint","id":"1b36:0010","physfn":"01:00.0"}],
"links":[{"kind":"XGMI","ends":["01:00.0","02:00.1"],"bandwidth":1}]}`)
	add(`{"kernel":"6.12","host_bridges":[{"last_bus":15,"numa":1},{"bus":16}],"functions":[
{"address":"00:01.0","kind":"root port","id":"8086:2030","secondary":1,"subordinate":3},{"address":"01:00.0","kind":"upstream port","id":"0:0","secondary":2,"subordinate":3},
{"address":"02:03.0","kind":"downstream port","id":"0:0","secondary":3,"subordinate":3},{"address":"10:00.0","kind":"conventional","id":"8086:2f00","iommu_group":3}]}`)
	add(`{"host_bridges":[{"bus":0}],"functions":[{"address":"0000:00:00.0","kind":"endpoint","id":"8086:2030"}]}`)
	f.Fuzz(func(t *testing.T, in []byte) {
		top, err := ParseJSON(in)
		if err != nil {
			return
		}
		all := top.Functions()
		if len(all) > 16 {
			all = all[:16]
		}
		for i, row := range top.Matrix(all, all) {
			for k, cell := range row {
				v := top.Verdict(all[i], all[k])
				if v.Reason == "" || v.Map != cell.Map || v.Distance != cell.Distance || (v.Map == NotSupported) != (v.Distance < 0) {
					t.Fatalf("%+v, in the matrix %+v", v, cell)
				}
			}
		}
		out, err := json.Marshal(top)
		check(t, err)
		again, err := ParseJSON(out)
		check(t, err)
		second, err := json.Marshal(again)
		check(t, err)
		if !bytes.Equal(out, second) {
			t.Fatalf("%s\nbecomes\n%s", out, second)
		}
	})
}

// Whatever configuration space there is, it is read without a panic; and what is read of it is the
// same after it was written.
func FuzzConfig(f *testing.F) {
	s := newBench(intelMax, skylake, ivy).build(f).t.Spec()
	for i := range s.Functions {
		f.Add(appendConfig(nil, &s.Functions[i], i%2 == 0))
	}
	circle := appendConfig(nil, &FunctionSpec{Kind: Endpoint}, false)
	circle[0x40], circle[0x41] = 5, 0x40
	copy(circle[0x100:], []byte{1, 0, 1, 0x10})
	f.Add(circle)
	f.Add(circle[:64])
	f.Add(bytes.Repeat([]byte{0xff}, 256))
	f.Fuzz(func(t *testing.T, in []byte) {
		c, err := parseConfig(in)
		if err != nil {
			return
		}
		for _, above := range []Kind{kindNone, RootPort, UpstreamPort, DownstreamPort, Bridge} {
			if k := c.kind(above); k == kindNone || k.bridges() != c.bridge {
				t.Fatalf("below %v: %v of %+v", above, k, c)
			}
		}
		spec := FunctionSpec{Kind: c.kind(kindNone), ID: c.id, Class: Hex(c.class), Secondary: c.secondary, Subordinate: c.subordinate, ACS: c.acs}
		again, err := parseConfig(appendConfig(nil, &spec, c.multi))
		check(t, err)
		if again.id != c.id || again.class != c.class || again.multi != c.multi || again.bridge != c.bridge ||
			again.secondary != c.secondary || again.subordinate != c.subordinate || (again.acs == nil) != (c.acs == nil) || c.acs != nil && *again.acs != *c.acs {
			t.Fatalf("%+v becomes %+v", c, again)
		}
	})
}
