package p2p

import (
	"bytes"
	"encoding/json"
	"testing"
)

// Whatever JSON is taken makes verdicts for all pairs, and is taken again when it is written.
func FuzzJSON(f *testing.F) {
	top := newBench(intelMax, skylake, ivy).build(f).t
	b, err := json.Marshal(top)
	check(f, err)
	f.Add(b)
	s := small(f)
	s.Links = []Link{{"XGMI", [2]Address{addr(f, "01:00.0"), addr(f, "04:00.0")}, 50e9}}
	s.IOMMU, s.Kernel = true, Linux612
	b, err = json.Marshal(s)
	check(f, err)
	f.Add(b)
	f.Add([]byte(`{"host_bridges":[{"bus":0}],"functions":[{"address":"0000:00:00.0","kind":"endpoint","id":"8086:2030"}]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		top, err := ParseJSON(in)
		if err != nil {
			return
		}
		all := top.Functions()
		if len(all) > 64 {
			all = all[:64]
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
