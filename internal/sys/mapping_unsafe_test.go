package sys

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapsSources are both ways to find mappings; the first exists on new kernels only.
func mapsSources(t testing.TB) map[string]mapsSource {
	t.Helper()
	s, err := mapsFile()
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]mapsSource{"text": {fd: s.fd}}
	if s.query {
		sources["query"] = s
	}
	return sources
}

func TestMappingKinds(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.name, func(t *testing.T) {
			start, end := kind.make(t)
			for name, s := range mapsSources(t) {
				for _, addr := range []uintptr{start, start + 1, start + (end-start)/2, end - 1} {
					m, err := s.find(addr, false)
					if err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					huge := kind.name == "hugetlb, private" || kind.name == "hugetlb, shared"
					if m.Start != start || m.End != end || m.File != kind.file || m.Shared != kind.shared || m.Write != kind.write ||
						m.Read != (kind.name != "without rights") || m.Exec != (kind.name == "text of a program") ||
						(m.Inode != 0) != kind.file || m.Offset != 0 || huge != (m.PageSize == hugePage) || !huge && m.PageSize != pageSize {
						t.Errorf("%s, at %#x of %#x to %#x: %+v", name, addr, start, end, m)
					}
				}
			}
		})
	}
}

// TestMappingSearch: both ways find the same, in mappings and between them.
func TestMappingSearch(t *testing.T) {
	p := pageSize
	fd := tempFile(t, 16)
	a := mapFile(t, 16, readWrite, unix.MAP_PRIVATE, fd)
	munmapRange(t, a+2*p, a+4*p)
	syscall6(t, unix.SYS_MPROTECT, a+6*p, p, unix.PROT_READ)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	part := func(from, to uintptr, write bool) Mapping {
		return Mapping{
			Start: a + from*p, End: a + to*p, Read: true, Write: write,
			File: true, Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev), Inode: st.Ino, Offset: uint64(from * p), PageSize: p,
		}
	}
	for name, s := range mapsSources(t) {
		for _, c := range []struct {
			page   uintptr
			orNext bool
			want   Mapping
			err    error
		}{
			{0, false, part(0, 2, true), nil},
			{1, true, part(0, 2, true), nil},
			{2, false, Mapping{}, unix.ENOENT},
			{2, true, part(4, 6, true), nil},
			{3, true, part(4, 6, true), nil},
			{6, false, part(6, 7, false), nil},
			{7, false, part(7, 16, true), nil},
			{15, true, part(7, 16, true), nil},
		} {
			if m, err := s.find(a+c.page*p, c.orNext); m != c.want || err != c.err {
				t.Errorf("%s, page %d, or next %v: %+v, %v, should be %+v, %v", name, c.page, c.orNext, m, err, c.want, c.err)
			}
		}
		if _, err := s.find(^uintptr(0)&^(p-1), true); err != unix.ENOENT {
			t.Errorf("%s: at the end of everything: %v", name, err)
		}
		if m, err := s.find(0, true); err != nil || m.Start == 0 {
			t.Errorf("%s: from the start: %+v, %v", name, m, err)
		}
		m := part(4, 6, true)
		if got := s.name(&m); got == "" || unix.Stat(got, &st) != nil || st.Ino != m.Inode {
			t.Errorf("%s: the file is called %q", name, got)
		}
	}
	var seen []Mapping
	if err := Mappings(a+p, a+7*p, func(m *Mapping) bool { seen = append(seen, *m); return true }); err != nil {
		t.Fatal(err)
	}
	if want := []Mapping{part(0, 2, true), part(4, 6, true), part(6, 7, false)}; !slices.Equal(seen, want) {
		t.Errorf("%+v, should be %+v", seen, want)
	}
	calls := 0
	if err := Mappings(0, ^uintptr(0), func(*Mapping) bool { calls++; return calls < 3 }); err != nil || calls != 3 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

// TestMappingAgree: both ways say the same about every mapping of this process.
func TestMappingAgree(t *testing.T) {
	sources := mapsSources(t)
	if len(sources) < 2 {
		t.Skip("this kernel has no PROCMAP_QUERY")
	}
	// The runtime may map something meanwhile: then once more.
	for range 20 {
		lists := make(map[string][]Mapping)
		for name, s := range sources {
			var list []Mapping
			for m, err := s.find(0, true); err == nil && m.End < 1<<47; m, err = s.find(m.End, true) {
				list = append(list, m)
			}
			lists[name] = list
		}
		if slices.Equal(lists["text"], lists["query"]) && len(lists["text"]) > 10 {
			return
		}
	}
	t.Error("they differ")
}

func TestMappingClip(t *testing.T) {
	small := Mapping{Start: 0x10000, End: 0x20000, PageSize: 0x1000}
	huge := Mapping{Start: 0x400000, End: 0xa00000, PageSize: 0x200000}
	last := Mapping{Start: ^uintptr(0) - 0xffff, End: ^uintptr(0) &^ 0xfff, PageSize: 0x1000}
	for _, c := range []struct {
		m                       *Mapping
		start, end, first, stop uintptr
	}{
		{&small, 0, ^uintptr(0), 0x10000, 0x20000},
		{&small, 0x11000, 0x12000, 0x11000, 0x12000},
		{&small, 0x11001, 0x11002, 0x11000, 0x12000},
		{&small, 0x1f001, 0x30000, 0x1f000, 0x20000},
		{&small, 0, 0x10000, 0, 0},
		{&small, 0x20000, 0x30000, 0, 0},
		{&huge, 0x401000, 0x402000, 0x400000, 0x600000},
		{&huge, 0x5ff000, 0x601000, 0x400000, 0x800000},
		{&huge, 0x900000, 0xb00000, 0x800000, 0xa00000},
		{&last, last.End - 1, ^uintptr(0), last.End - 0x1000, last.End},
	} {
		start, end := c.m.Clip(c.start, c.end)
		if start == end {
			start, end = 0, 0
		}
		if start != c.first || end != c.stop {
			t.Errorf("%#x to %#x of %+v: %#x to %#x", c.start, c.end, *c.m, start, end)
		}
	}
}

func TestParseMapping(t *testing.T) {
	for _, c := range []struct {
		line string
		want Mapping
		name string
		ok   bool
	}{
		{"00400000-0041d000 r-xp 0001d000 fe:10 12345                 /bin/a program (deleted)",
			Mapping{0x400000, 0x41d000, true, false, true, false, true, 0xfe, 0x10, 12345, 0x1d000, pageSize}, "/bin/a program (deleted)", true},
		{"7ffc0000-7ffd0000 rw-s 00000000 00:00 0 ",
			Mapping{0x7ffc0000, 0x7ffd0000, true, true, false, true, false, 0, 0, 0, 0, pageSize}, "", true},
		{"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]",
			Mapping{0xffffffffff600000, 0xffffffffff601000, false, false, true, false, false, 0, 0, 0, 0, pageSize}, "[vsyscall]", true},
		{"Rss:  4 kB", Mapping{}, "", false},
		{"", Mapping{}, "", false},
		{"10-0f rw-s 0 00:00 0", Mapping{}, "", false},
		{"10-20 rw 0 00:00 0", Mapping{}, "", false},
		{"10-20 rw-p 0 00 0", Mapping{}, "", false},
		{"10-112233445566778899 rw-p 0 00:00 0", Mapping{}, "", false},
	} {
		m, name, ok := parseMapping([]byte(c.line))
		if m != c.want || string(name) != c.name || ok != c.ok {
			t.Errorf("%q: %+v, %q, %v", c.line, m, name, ok)
		}
	}
}

func TestTextLines(t *testing.T) {
	size := len(*textBuffers.Get().(*[]byte))
	fd := memfd(t, 0, 0)
	line := slices.Repeat([]byte{'x'}, size/3)
	line = append(line, '\n')
	for range 10 { // across the ends of the buffer
		unix.Write(fd, line)
	}
	lines := 0
	if err := textLines(fd, func(l []byte) bool {
		lines++
		return len(l) == len(line)-1
	}); err != nil || lines != 10 {
		t.Errorf("%d lines, %v", lines, err)
	}
	unix.Write(fd, slices.Repeat([]byte{'y'}, 2*size))
	if err := textLines(fd, func([]byte) bool { return true }); !errors.Is(err, unix.E2BIG) {
		t.Errorf("a line without an end: %v", err)
	}
}

func TestMappingAllocs(t *testing.T) {
	s, err := mapsFile()
	if err != nil {
		t.Fatal(err)
	}
	if !s.query {
		t.Skip("this kernel has no PROCMAP_QUERY")
	}
	addr := uintptr(unsafe.Pointer(t))
	if n := testing.AllocsPerRun(100, func() { QueryMapping(addr); NextMapping(addr) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkQueryMapping(b *testing.B) {
	for name, s := range mapsSources(b) {
		b.Run(name, func(b *testing.B) {
			addr := uintptr(unsafe.Pointer(b))
			for b.Loop() {
				if _, err := s.find(addr, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A mapping that stays is found in the text whatever is mapped and unmapped below it
// meanwhile, and however many look at once.
func TestFindInTextWhileOthersChange(t *testing.T) {
	s, err := mapsFile()
	if err != nil {
		t.Fatal(err)
	}
	const others = 300 // several pages of text
	area := anonymous(t, (2*others+2)*int(pageSize))
	base := uintptr(unsafe.Pointer(unsafe.SliceData(area)))
	stays := base + 2*others*pageSize
	setRights := func(i int, rights int) {
		at := 2 * i * int(pageSize)
		if err := unix.Mprotect(area[at:at+int(pageSize)], rights); err != nil {
			t.Error(err)
		}
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	wg.Go(func() { // lines come and go below the one that is looked for
		for i := 0; !stop.Load(); i = (i + 1) % others {
			setRights(i, unix.PROT_READ)
			if i%3 == 0 {
				setRights((i+others/2)%others, unix.PROT_READ|unix.PROT_WRITE)
			}
		}
	})
	var looks sync.WaitGroup
	for range 3 {
		looks.Go(func() {
			for range 300 {
				if m, err := findInText(s.fd, stays, false); err != nil || m.Start > stays || m.End <= stays {
					t.Errorf("%#x: %+v, %v", stays, m, err)
					return
				}
			}
		})
	}
	looks.Wait()
}
