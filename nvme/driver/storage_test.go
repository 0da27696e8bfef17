package driver

import (
	"bytes"
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/nvme/pci"
)

// A Storage has the bytes that were written to it, wherever they came from, and counts what the controller has moved itself.
func TestStorage(t *testing.T) {
	for _, c := range []struct {
		name string
		cmb  bool
	}{{"host memory", false}, {"controller memory buffer", true}} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 4<<20)}}, Config{})
			s := must(r.c.Storage(longTime(t), r.ns, StorageConfig{Queues: 3, CMB: c.cmb}))(t)
			defer func() { check(t, s.Close()) }()
			if s.Size() != 8<<20 || s.BlockSize() != 512 || s.ReadOnly() {
				t.Fatalf("%d bytes in blocks of %d", s.Size(), s.BlockSize())
			}
			near, release, err := s.Alloc(1 << 20)
			check(t, err)
			defer release()
			rnd := seeded(t)
			var all sync.WaitGroup
			for g := range 4 {
				seed := rnd.Uint64()
				all.Go(func() {
					part := 2 << 20
					base, model := int64(g*part), make([]byte, part)
					mine := near[g<<18 : (g+1)<<18]
					far := make([]byte, 1<<20)
					state := seed
					next := func(n int) int { // a generator of its own
						state = state*6364136223846793005 + 1442695040888963407
						return int(state >> 33 % uint64(n))
					}
					for i := range 80 {
						b := mine
						if next(2) == 0 {
							b = far
						}
						n := (1 + next(len(b)/512)) * 512
						off := next((part-n)/512+1) * 512
						start := next((len(b)-n)/4+1) * 4
						b = b[start : start+n]
						switch next(4) {
						case 0:
							clear(model[off : off+n])
							if err := s.Discard(base+int64(off), int64(n)); err != nil {
								t.Error(err)
								return
							}
						case 1, 2:
							for j := range b {
								b[j] = byte(i*7 + j*13 + g)
							}
							copy(model[off:], b)
							if _, err := s.WriteAt(b, base+int64(off)); err != nil {
								t.Error(err)
								return
							}
						default:
							if _, err := s.ReadAt(b, base+int64(off)); err != nil || !bytes.Equal(b, model[off:off+n]) {
								t.Errorf("%d bytes at %d: %v, or other bytes", n, off, err)
								return
							}
						}
					}
				})
			}
			all.Wait()
			check(t, s.Flush())
			if st := s.Stats(); st.Direct == 0 || st.Copied == 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}

func TestStorageRefuses(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	if _, err := r.c.Storage(longTime(t), r.ns, StorageConfig{CMB: true}); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("no buffer: %v", err)
	}
	odd := r.ns
	odd.Metadata = 8
	if _, err := r.c.Storage(longTime(t), odd, StorageConfig{}); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("metadata: %v", err)
	}
	s := must(r.c.Storage(longTime(t), r.ns, StorageConfig{}))(t)
	defer func() { check(t, s.Close()) }()
	b := make([]byte, 1024)
	for _, off := range []int64{-512, 1, 8 << 20, 8<<20 - 512, 1 << 62} {
		if _, err := s.ReadAt(b, off); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("reading at %d: %v", off, err)
		}
		if err := s.Discard(off, 1024); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("discarding at %d: %v", off, err)
		}
	}
	if _, err := s.WriteAt(b[:100], 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("100 bytes: %v", err)
	}
}
