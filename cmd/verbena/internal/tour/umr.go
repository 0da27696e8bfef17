package tour

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// indirectSteps are a tour of indirect memory keys.
var indirectSteps = []step{
	{"RC", "CONFIGURE_MKEY, list", listStep},
	{"RC", "matrix transpose", transposeStep},
	{"RC", "halo exchange", haloStep},
	{"RC", "keys of keys", nestStep},
	{"RC", "LOCAL_INV and anew", anewStep},
}

// bench is what the steps work on: memory of both devices and indirect keys made of it.
type bench struct {
	*lab
	*pair
	here, there []byte
	hereMR      *verbs.MR
	thereMR     *verbs.MR
	keys        []*verbs.MKey
}

// withBench runs a step with n bytes on either side.
func withBench(l *lab, n int, f func(w *bench) (string, error)) (string, error) {
	return l.withPair(verbs.RC, func(p *pair) (detail string, err error) {
		w := &bench{lab: l, pair: p, here: make([]byte, n), there: make([]byte, n)}
		for i := range w.here {
			w.here[i] = byte(l.rand.Uint32())
		}
		if w.hereMR, err = l.a.pd.RegMR(w.here, verbs.AccessLocalWrite); err != nil {
			return "", err
		}
		if w.thereMR, err = l.b.pd.RegMR(w.there, verbs.AccessLocalWrite); err != nil { // nothing for peers
			return "", errors.Join(err, w.hereMR.Close())
		}
		detail, err = f(w)
		for i := len(w.keys) - 1; i >= 0; i-- { // a key that is made of others goes first
			err = errors.Join(err, w.keys[i].Close())
		}
		return detail, errors.Join(err, w.hereMR.Close(), w.thereMR.Close())
	})
}

// key makes an indirect key of a device and configures it.
func (w *bench) key(n *node, pieces int, c func(k *verbs.MKey) *verbs.MKeyConfig) (*verbs.MKey, error) {
	k, err := n.pd.CreateMKey(pieces)
	if err != nil {
		return nil, err
	}
	w.keys = append(w.keys, k)
	return k, w.configure(n, c(k))
}

func (w *bench) configure(n *node, c *verbs.MKeyConfig) error {
	qp := w.pair.a
	if n == w.lab.b {
		qp = w.pair.b
	}
	if err := post(qp, verbs.SendWR{Op: verbs.OpConfigureMKey, Configure: c}); err != nil {
		return err
	}
	_, err := w.expect(n.cq, verbs.WCConfigureMKey)
	return err
}

// write executes one WRITE from local to the beginning of a remote key, and returns how
// long it took.
func (w *bench) write(local verbs.SGE, rkey uint32) (time.Duration, error) {
	began := time.Now()
	if err := post(w.pair.a, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local}, RKey: rkey}); err != nil {
		return 0, err
	}
	_, err := w.expect(w.lab.a.cq, verbs.WCRDMAWrite)
	return time.Since(began), err
}

const opened = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead

// listStep scatters by one WRITE, and gathers by one READ.
func listStep(l *lab) (string, error) {
	return withBench(l, half, func(w *bench) (string, error) {
		pieces := []verbs.SGE{w.thereMR.SGE(40_000, 3001), w.thereMR.SGE(7, 5000), w.thereMR.SGE(20_000, 2000)}
		k, err := w.key(l.b, len(pieces), func(k *verbs.MKey) *verbs.MKeyConfig { return k.List(opened, pieces...) })
		if err != nil {
			return "", err
		}
		if _, err := w.write(w.hereMR.SGE(0, length), k.RKey()); err != nil {
			return "", err
		}
		at := 0
		for i, off := range []int{40_000, 7, 20_000} {
			n := int(pieces[i].Length)
			if err := same(w.there[off:off+n], w.here[at:at+n]); err != nil {
				return "", fmt.Errorf("piece %d: %w", i, err)
			}
			at += n
		}
		if err := post(w.pair.a, verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{w.hereMR.SGE(half/2, length)}, RKey: k.RKey()}); err != nil {
			return "", err
		}
		if _, err := w.expect(l.a.cq, verbs.WCRDMARead); err != nil {
			return "", err
		}
		if err := same(w.here[half/2:][:length], w.here[:length]); err != nil {
			return "", fmt.Errorf("READ: %w", err)
		}
		if err := w.thereMR.Close(); !errors.Is(err, syscall.EBUSY) {
			return "", fmt.Errorf("closing the region under the key: %v", err)
		}
		return fmt.Sprintf("%d bytes to %d places by one WRITE, back by one READ; closing the region: EBUSY", length, len(pieces)), nil
	})
}

// transposeStep transposes a matrix by one WRITE.
func transposeStep(l *lab) (string, error) {
	const rows, cols, width = 96, 128, 4
	return withBench(l, rows*cols*width, func(w *bench) (string, error) {
		columns, err := w.key(l.b, cols, func(k *verbs.MKey) *verbs.MKeyConfig {
			var sources []verbs.Stride
			for c := range cols {
				sources = append(sources, w.thereMR.Stride(c*rows*width, width, 0))
			}
			return k.Interleaved(opened, rows, sources...)
		})
		if err != nil {
			return "", err
		}
		took, err := w.write(w.hereMR.SGE(0, len(w.here)), columns.RKey())
		if err != nil {
			return "", err
		}
		for r := range rows {
			for c := range cols {
				if err := same(w.there[(c*rows+r)*width:][:width], w.here[(r*cols+c)*width:][:width]); err != nil {
					return "", fmt.Errorf("element %d, %d: %w", r, c, err)
				}
			}
		}
		return fmt.Sprintf("%d × %d elements of %d bytes by one WRITE, in %v", rows, cols, width, took.Round(time.Microsecond)), nil
	})
}

// haloStep exchanges the faces of a grid without packing them.
func haloStep(l *lab) (string, error) {
	const n, width = 24, 8 // points in each direction, bytes of a point
	return withBench(l, n*n*n*width, func(w *bench) (string, error) {
		at := func(x, y, z int) int { return ((z*n+y)*n + x) * width }
		var took time.Duration
		for _, f := range []struct {
			name        string
			from        int
			bytes, skip int
			repeat      uint64
		}{
			{"x", at(n-2, 0, 0), width, (n - 1) * width, n * n},
			{"y", at(0, n-2, 0), n * width, (n*n - n) * width, n},
			{"z", at(0, 0, n-2), n * n * width, 0, 1},
		} {
			clear(w.there)
			gather, err := w.key(l.a, 1, func(k *verbs.MKey) *verbs.MKeyConfig {
				return k.Interleaved(0, f.repeat, w.hereMR.Stride(f.from, f.bytes, f.skip))
			})
			if err != nil {
				return "", err
			}
			scatter, err := w.key(l.b, 1, func(k *verbs.MKey) *verbs.MKeyConfig {
				return k.Interleaved(opened, f.repeat, w.thereMR.Stride(0, f.bytes, f.skip))
			})
			if err != nil {
				return "", err
			}
			t, err := w.write(verbs.SGE{Length: n * n * width, LKey: gather.LKey()}, scatter.RKey())
			if err != nil {
				return "", err
			}
			took += t
			want := make([]byte, len(w.there))
			for r := range int(f.repeat) {
				off := r * (f.bytes + f.skip)
				copy(want[off:off+f.bytes], w.here[f.from+off:])
			}
			if err := same(w.there, want); err != nil {
				return "", fmt.Errorf("face across %s: %w", f.name, err)
			}
		}
		return fmt.Sprintf("three faces of a grid of %d³ points, one WRITE each, in %v together", n, took.Round(time.Microsecond)), nil
	})
}

// nestStep makes keys of keys, as deep as is allowed, and then one too many.
func nestStep(l *lab) (string, error) {
	return withBench(l, half, func(w *bench) (string, error) {
		const n = 8000
		below := verbs.Stride{Addr: w.thereMR.Addr(), Bytes: 4, Skip: 4, LKey: w.thereMR.LKey()}
		k, err := w.key(l.b, 1, func(k *verbs.MKey) *verbs.MKeyConfig { return k.Interleaved(opened, n/4, below) })
		if err != nil {
			return "", err
		}
		depth := 1
		for ; depth < 8; depth++ { // each shows the halves of the one below, exchanged
			under := k.LKey()
			k, err = w.key(l.b, 2, func(k *verbs.MKey) *verbs.MKeyConfig {
				return k.List(opened, verbs.SGE{Addr: n / 2, Length: n / 2, LKey: under}, verbs.SGE{Length: n / 2, LKey: under})
			})
			if err != nil {
				return "", err
			}
		}
		if _, err := w.write(w.hereMR.SGE(0, n), k.RKey()); err != nil {
			return "", err
		}
		for i := range n {
			from := (i + n/2*(depth-1)) % n
			if w.there[i/4*8+i%4] != w.here[from] {
				return "", fmt.Errorf("byte %d is not byte %d of the source", i, from)
			}
		}
		last, err := l.b.pd.CreateMKey(1)
		if err != nil {
			return "", err
		}
		defer func() { _ = last.Close() }() // it is free
		if err := post(w.pair.b, verbs.SendWR{Op: verbs.OpConfigureMKey, Configure: last.List(opened, verbs.SGE{Length: n, LKey: k.LKey()})}); err != nil {
			return "", err
		}
		if err := w.expectStatus(l.b.cq, verbs.WCMWBindErr); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d on each other; one more: %q", depth, verbs.WCMWBindErr), nil
	})
}

// anewStep configures a key again and again, each time with other pieces, and finally
// tries to use it while it is free.
func anewStep(l *lab) (string, error) {
	return withBench(l, half, func(w *bench) (string, error) {
		k, err := l.b.pd.CreateMKey(2)
		if err != nil {
			return "", err
		}
		w.keys = append(w.keys, k)
		const rounds = 100
		var took time.Duration
		for i := range rounds {
			c := k.List(opened, w.thereMR.SGE(i*64, 32), w.thereMR.SGE(half/2+i*64, 32))
			began := time.Now()
			if err := w.configure(l.b, c); err != nil {
				return "", err
			}
			took += time.Since(began)
			if _, err := w.write(w.hereMR.SGE(i, 64), k.RKey()); err != nil {
				return "", err
			}
			if err := errors.Join(same(w.there[i*64:][:32], w.here[i:i+32]), same(w.there[half/2+i*64:][:32], w.here[i+32:i+64])); err != nil {
				return "", err
			}
			if err := post(w.pair.b, verbs.SendWR{Op: verbs.OpLocalInv, InvalidateKey: k.LKey()}); err != nil {
				return "", err
			}
			if _, err := w.expect(l.b.cq, verbs.WCLocalInv); err != nil {
				return "", err
			}
		}
		if err := post(w.pair.a, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{w.hereMR.SGE(0, 8)}, RKey: k.RKey()}); err != nil {
			return "", err
		}
		if err := w.expectStatus(l.a.cq, verbs.WCRemAccessErr); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d times, configured in %v each; through the free key: %q", rounds, took/rounds, verbs.WCRemAccessErr), nil
	})
}
