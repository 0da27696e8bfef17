package mem_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Memory that is not there: zeros come out, wherever and whatever went in.
func TestNull(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{MaxRegions: 4})
	r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: math.MaxUint64, Backing: mem.NewNull()})
	if err != nil {
		t.Fatal(err)
	}
	noise := bytes.Repeat([]byte("noise"), 40000)
	for _, addr := range []uint64{0, 1, 65535, 1 << 47, math.MaxUint64 - 300000} {
		l := nullList(table, r, addr, len(noise))
		l.Access = ib.AccessLocalWrite
		if fault, side := mem.Copy(l, &mem.List{Raw: [][]byte{noise}}, uint64(len(noise)), true); !fault.OK() {
			t.Fatalf("%#x, written to: %v: %v", addr, side, fault)
		}
		l.Access = 0
		got := bytes.Clone(noise)
		if fault, side := mem.Copy(&mem.List{Raw: [][]byte{got}}, l, uint64(len(got)), true); !fault.OK() {
			t.Fatalf("%#x, read from: %v: %v", addr, side, fault)
		}
		if !bytes.Equal(got, make([]byte, len(got))) {
			t.Errorf("%#x: not zero", addr)
		}
	}
	for _, remote := range []ib.Access{ib.AccessRemoteRead, ib.AccessRemoteWrite} {
		l := nullList(table, r, 0, 8)
		l.Access = remote
		if fault := mem.Check(l, 8); fault.Kind != mem.FaultAccess {
			t.Errorf("a peer gets %v", fault)
		}
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func nullList(table *mem.Table, r *mem.Region, addr uint64, n int) *mem.List {
	return &mem.List{Table: table, Actor: mem.Actor{PD: 1}, SGEs: []ib.SGE{{Addr: addr, Length: uint32(n), LKey: r.Key()}}}
}

// What a peer writes through an indirect key into memory that is not there is gone:
// neither the next reader nor another protection domain sees it.
func TestNullBelowIndirectKeyDiscardsPeersWrites(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{MaxRegions: 8})
	null := func(pd uint32) *mem.Region {
		r, err := table.Register(mem.RegionConfig{PD: pd, Access: ib.AccessLocalWrite, Length: math.MaxUint64, Backing: mem.NewNull()})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	mine, theirs := null(1), null(2)
	key, err := table.CreateMKey(1, 1)
	if err != nil {
		t.Fatal(err)
	}
	const access = ib.AccessRemoteWrite | ib.AccessRemoteRead | ib.AccessRemoteAtomic
	f := table.Configure(&mem.Layout{Key: key.Key(), Access: access, Repeat: 1, Pieces: []ib.Stride{{Addr: 4096, Bytes: 4096, LKey: mine.Key()}}}, mem.Actor{PD: 1})
	if !f.OK() {
		t.Fatal(f)
	}
	secret := []byte("SECRET of the writing peer")
	n := uint64(len(secret))
	dst := &mem.List{Table: table, Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteWrite, SGEs: []ib.SGE{{Length: uint32(n), LKey: key.Key()}}}
	if f, side := mem.Copy(dst, &mem.List{Raw: [][]byte{secret}}, n, true); !f.OK() {
		t.Fatal(side, f)
	}
	if _, f := mem.Atomic(table, mem.Actor{PD: 1}, key.Key(), 64, mem.FetchAdd, 0, 42); !f.OK() {
		t.Fatal(f)
	}
	for _, from := range []struct {
		who  string
		list mem.List
	}{
		{"another domain", mem.List{Actor: mem.Actor{PD: 2}, SGEs: []ib.SGE{{Length: 128, LKey: theirs.Key()}}}},
		{"the same domain", mem.List{Actor: mem.Actor{PD: 1}, SGEs: []ib.SGE{{Addr: 4096, Length: 128, LKey: mine.Key()}}}},
		{"a peer", mem.List{Actor: mem.Actor{PD: 1}, Access: ib.AccessRemoteRead, SGEs: []ib.SGE{{Length: 128, LKey: key.Key()}}}},
	} {
		from.list.Table = table
		got := bytes.Repeat([]byte{1}, 128)
		if f, side := mem.Copy(&mem.List{Raw: [][]byte{got}}, &from.list, 128, false); !f.OK() {
			t.Fatal(from.who, side, f)
		}
		if !bytes.Equal(got, make([]byte, 128)) {
			t.Errorf("%s reads %q", from.who, got)
		}
	}
}
