package dmabuf

import (
	"context"
	"runtime"
	"testing"
	"time"
)

// In a storm, buffers move without the program's doing, pinned ones do not, and the storm ends with
// the last buffer.
func TestStorm(t *testing.T) {
	t.Setenv(stormVar, "7,5000")
	before := runtime.NumGoroutine()
	moving, err := Alloc(MemoryConfig{Size: 8192, Segments: 2})
	if err != nil {
		t.Fatal(err)
	}
	pinned, err := Alloc(MemoryConfig{Size: 4096})
	if err != nil {
		t.Fatal(err)
	}
	a, err := pinned.Buffer().Attach(nil)
	if err != nil {
		t.Fatal(err)
	}
	r := pinned.Buffer().Reservation()
	r.Lock()
	table, err := a.Map(context.Background(), Bidirectional)
	at := pinned.Moves
	r.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	held := at()
	invalidations := 0
	d, err := moving.Buffer().DynamicAttach(nil, Importer{InvalidateMappings: func(*Attachment) { invalidations++ }})
	if err != nil {
		t.Fatal(err)
	}
	mr := moving.Buffer().Reservation()
	mr.Lock()
	told := invalidations
	mr.Unlock()
	from := moving.Moves() // it has moved before it had an importer
	if _, err := moving.WriteAt([]byte("in the storm"), 4090); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); moving.Moves() < from+20; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d moves in a minute", moving.Moves())
		}
	}
	got := make([]byte, 12)
	if _, err := moving.ReadAt(got, 4090); err != nil || string(got) != "in the storm" {
		t.Errorf("%q, %v", got, err)
	}
	if n := pinned.Moves(); n != held {
		t.Errorf("a pinned buffer has moved %d times", n-held)
	}
	mr.Lock()
	if n := invalidations - told; n < 20 {
		t.Errorf("an importer was told %d times", n)
	}
	mr.Unlock()
	d.Detach()
	r.Lock()
	a.Unmap(table, Bidirectional)
	r.Unlock()
	a.Detach()
	if err := moving.Close(); err != nil {
		t.Error(err)
	}
	if err := pinned.Close(); err != nil {
		t.Error(err)
	}
	for deadline := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the storm has not ended")
		}
	}
}

func TestParseStorm(t *testing.T) {
	for text, want := range map[string]stormConfig{
		"1,100": {1, 100, 0}, "0xff,1": {255, 1, 0}, "3,100000,9": {3, 100_000, 9},
		"": {}, "1": {}, "x,1": {}, "1,0": {}, "1,100001": {}, "1,1,0": {}, "1,1,1,1": {}, "-1,1": {},
	} {
		got, err := parseStorm(text)
		if ok := want.rate != 0; ok != (err == nil) || ok && got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}
