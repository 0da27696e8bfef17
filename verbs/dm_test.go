package verbs

import (
	"io"
	"testing"

	"github.com/verbena-rdma/verbena/internal/provider"
)

var (
	_ io.WriterAt = (*DM)(nil)
	_ io.ReaderAt = (*DM)(nil)
)

// What is asked for arrives, field by field.
func TestDM(t *testing.T) {
	f := newFake()
	d := &Device{p: f}
	dm := must(d.AllocDM(100, 6))
	if want := (provider.DMConfig{Length: 100, LogAlign: 6}); f.dm != want || dm.Length() != 100 || dm.Class() != DMPlain {
		t.Errorf("asked for %+v", f.dm)
	}
	dm = must(d.AllocDMWith(DMConfig{Length: 7, LogAlign: 2, Class: DMCoherent, Export: true}))
	if want := (provider.DMConfig{Length: 7, LogAlign: 2, Class: DMCoherent, Export: true}); f.dm != want || dm.Class() != DMCoherent {
		t.Errorf("asked for %+v", f.dm)
	}
	pd := must(d.AllocPD())
	mr := must(pd.RegDMMR(dm, 3, 4, AccessZeroBased))
	p := pd.p.(*fakePD)
	if p.iova != 3 || p.length != 4 || p.access != AccessZeroBased || mr.Length() != 4 {
		t.Errorf("registered %+v", p)
	}
	if err := dm.Close(); err != nil || dm.p.(*fakeDM).closed != 1 {
		t.Error(err)
	}
}
