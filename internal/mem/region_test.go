package mem_test

import (
	"errors"
	"math"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

func host(t *testing.T, n int) *mem.Host {
	t.Helper()
	h, err := mem.NewHostBytes(make([]byte, n), ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// wantErrno checks that an error is an OpError of reg_mr with an errno and that
// its text contains says.
func wantErrno(t *testing.T, err error, errno syscall.Errno, says string) {
	t.Helper()
	var op *ib.OpError
	if !errors.As(err, &op) || op.Op != "reg_mr" || !errors.Is(err, errno) || !strings.Contains(err.Error(), says) {
		t.Errorf("error is %v, should be reg_mr: …%s…: %v", err, says, errno)
	}
}

func TestRegisterRefuses(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{MaxRegions: 2})
	for _, c := range []struct {
		name  string
		cfg   mem.RegionConfig
		errno syscall.Errno
		says  string
	}{
		{"remote write alone", mem.RegionConfig{Access: ib.AccessRemoteWrite}, syscall.EINVAL, "local write"},
		{"remote atomic alone", mem.RegionConfig{Access: ib.AccessRemoteAtomic | ib.AccessRemoteRead}, syscall.EINVAL, "local write"},
		{"unknown access", mem.RegionConfig{Access: 1 << 7}, syscall.EINVAL, "0x80"},
		{"on demand", mem.RegionConfig{Access: ib.AccessOnDemand}, syscall.EINVAL, "on-demand"},
		{"wrapping", mem.RegionConfig{IOVA: math.MaxUint64 - 99, Length: 100}, syscall.EINVAL, "address space"},
		{"wrapping far", mem.RegionConfig{IOVA: 8, Length: math.MaxUint64}, syscall.EINVAL, "address space"},
		{"longer than the backing", mem.RegionConfig{Length: 101}, syscall.EINVAL, "101"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.Backing = host(t, 100)
			_, err := table.Register(c.cfg)
			wantErrno(t, err, c.errno, c.says)
		})
	}
	var regions []*mem.Region
	for range 2 {
		r, err := table.Register(mem.RegionConfig{IOVA: math.MaxUint64 - 100, Length: 100, Backing: host(t, 100)})
		if err != nil {
			t.Fatal(err)
		}
		regions = append(regions, r)
	}
	_, err := table.Register(mem.RegionConfig{Length: 1, Backing: host(t, 1)})
	wantErrno(t, err, syscall.ENOMEM, "2 regions")
	regions[0].Close()
	r, err := table.Register(mem.RegionConfig{Length: 1, Backing: host(t, 1)})
	if err != nil {
		t.Fatalf("after a Close: %v", err)
	}
	r.Close()
	regions[1].Close()
}

func TestRegionFields(t *testing.T) {
	const access = ib.AccessLocalWrite | ib.AccessRemoteRead | ib.AccessRelaxedOrdering | ib.AccessMWBind
	table := mem.NewTable(mem.TableConfig{})
	h := host(t, 100)
	r, err := table.Register(mem.RegionConfig{PD: 5, Access: access, IOVA: 0x1234, Length: 99, Backing: h})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if is, ok := r.Snapshot(); !ok || is.PD != 5 || r.Access() != access || r.IOVA() != 0x1234 || r.Length() != 99 || r.Backing() != h || !r.Alive() {
		t.Errorf("%+v", r)
	}
	if table.Len() != 1 || table.Lookup(r.Key()) != r || table.Lookup(r.Key()^1) != nil {
		t.Error("the table does not find the region by its key alone")
	}
}

// Keys are not to be guessed: tags differ from allocation to allocation, and so
// do the indexes of two tables. With a seed they repeat.
func TestKeys(t *testing.T) {
	keys := func(seed uint64) (keys [64]uint32) {
		table := mem.NewTable(mem.TableConfig{Seed: seed})
		for i := range keys {
			r, err := table.Register(mem.RegionConfig{Length: 1, Backing: host(t, 1)})
			if err != nil {
				t.Fatal(err)
			}
			keys[i] = r.Key()
		}
		return keys
	}
	if first, again := keys(7), keys(7); first != again {
		t.Error("the same seed gives different keys")
	}
	a, b := keys(0), keys(0)
	same, tags, rising := 0, make(map[uint32]bool), 0
	for i := range a {
		if a[i] == 0 {
			t.Error("key 0 was given out")
		}
		tags[a[i]&0xff] = true
		if a[i]>>8 == b[i]>>8 {
			same++
		}
		if i > 0 && a[i] > a[i-1] {
			rising++
		}
	}
	if same > 4 || len(tags) < 32 || rising < 12 || rising > 51 {
		t.Errorf("of 64 keys %d are the same in another table, %d tags differ, %d rise", same, len(tags), rising)
	}
}

func TestFaultStrings(t *testing.T) {
	for kind := range mem.FaultNotInvalidatable + 1 {
		if s := kind.String(); s == "" || strings.Contains(s, "FaultKind") {
			t.Errorf("kind %d is %q", kind, s)
		}
	}
	f := mem.Fault{Kind: mem.FaultBounds, Key: 0x123, Extent: mem.Extent{0xff00, 9}}
	if got, want := f.String(), "out of bounds: key 0x00000123, 9 bytes at 0xff00"; got != want {
		t.Errorf("%q, should be %q", got, want)
	}
	for _, got := range []string{mem.Fault{}.String(), mem.FaultKind(99).String(), mem.Kind(99).String(), mem.KindPinned.String(), mem.Src.String(), mem.Side(9).String()} {
		if got == "" {
			t.Error("an empty name")
		}
	}
}

// A list that remembers its region follows the key: to nothing when the region is closed,
// to a region that gets the same key later, to that of another table, and from one key to the
// next when the region is registered again.
func TestMemo(t *testing.T) {
	table := mem.NewTable(mem.TableConfig{Seed: 7})
	register := func(b []byte) *mem.Region {
		h, err := mem.NewHostBytes(b, ib.AccessLocalWrite, ib.LockOff)
		if err != nil {
			t.Fatal(err)
		}
		r, err := table.Register(mem.RegionConfig{Access: ib.AccessLocalWrite, Length: uint64(len(b)), Backing: h})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	var memo mem.Memo
	put := func(key uint32, what byte) mem.FaultKind {
		to := &mem.List{Table: table, Access: ib.AccessLocalWrite, SGEs: []ib.SGE{{Length: 1, LKey: key}}, Memo: &memo}
		f, _ := mem.Copy(to, &mem.List{Raw: [][]byte{{what}}}, 1, true)
		return f.Kind
	}
	first, second := make([]byte, 1), make([]byte, 1)
	r := register(first)
	key := r.Key()
	put(key, 1)
	one := table
	table = mem.NewTable(mem.TableConfig{Seed: 7})
	if twin := register(second); twin.Key() != key {
		t.Fatal("tables of one seed have different keys")
	}
	if k := put(key, 8); k != mem.FaultNone || first[0] != 1 || second[0] != 8 {
		t.Errorf("another table's: %v, %v, %v", k, first, second)
	}
	table = one
	if k := put(key, 1); k != mem.FaultNone || first[0] != 1 {
		t.Fatalf("%v, %v", k, first)
	}
	r.Close()
	if k := put(key, 2); k != mem.FaultKey {
		t.Errorf("closed: %v", k)
	}
	r = register(first)
	for put(r.Key(), 3); r.Key() != key; r = register(second) {
		r.Close()
	}
	first[0] = 0
	if k := put(key, 4); k != mem.FaultNone || first[0] != 0 || second[0] != 4 {
		t.Errorf("the key is another region's: %v, %v, %v", k, first, second)
	}
	cfg, _ := r.Snapshot()
	if err := r.Rereg(cfg); err != nil {
		t.Fatal(err)
	}
	if k := put(key, 5); k != mem.FaultKey {
		t.Errorf("the old key: %v", k)
	}
	if k := put(r.Key(), 6); k != mem.FaultNone || second[0] != 6 {
		t.Errorf("the new key: %v, %v", k, second)
	}
	r.Close()
}

// The keys of implicit regions are even: some versions of UCX take one for flags, and crash by the lowest bit (Table.add).
func TestImplicitKeysAreEven(t *testing.T) {
	needNotifier(t)
	table := mem.NewTable(mem.TableConfig{})
	odd := 0
	for range 300 {
		b, err := mem.NewImplicit(ib.AccessLocalWrite|ib.AccessOnDemand, table.Paging())
		if err != nil {
			t.Fatal(err)
		}
		r, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite | ib.AccessOnDemand, Length: b.Len(), Backing: b})
		if err != nil {
			t.Fatal(err)
		}
		if r.Key()&1 != 0 {
			t.Fatalf("a key is %#x", r.Key())
		}
		other, err := table.Register(mem.RegionConfig{PD: 1, Access: ib.AccessLocalWrite, Length: 1, Backing: mem.NewNull()})
		if err != nil {
			t.Fatal(err)
		}
		odd += int(other.Key() & 1)
		r.Close()
		other.Close()
	}
	if odd == 0 || odd == 300 {
		t.Errorf("%d of 300 keys of other regions are odd", odd)
	}
}
