package device

import (
	"fmt"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/enginetest"
)

// BenchmarkStaged compares WRITEs and READs between memory of an engine, or of an engine and
// the host, with the engine alone. The engine takes its time, but moves nothing: no CPU here
// copies as fast.
func BenchmarkStaged(b *testing.B) {
	config := slowEngine
	config.Idle, config.Reaches = true, true
	for _, c := range []struct {
		size, depth int
	}{{64 << 10, 16}, {1 << 20, 8}, {64 << 20, 2}} {
		b.Run(fmt.Sprintf("%d/engine", c.size), func(b *testing.B) {
			g := enginetest.New(config)
			m := g.Alloc(uint64(2 * c.size))
			b.Cleanup(m.Free)
			table := mem.NewTable(mem.TableConfig{})
			r, err := table.Register(mem.RegionConfig{PD: 1, Access: allRemote, Length: uint64(2 * c.size), Backing: m})
			if err != nil {
				b.Fatal(err)
			}
			defer r.Close()
			list := func(at int, acc ib.Access) *mem.List {
				return &mem.List{Table: table, Actor: mem.Actor{PD: 1}, Access: acc, SGEs: []ib.SGE{{Addr: uint64(at), Length: uint32(c.size), LKey: r.Key()}}}
			}
			var s mem.Stream
			var under []*mem.Transfer
			b.SetBytes(int64(c.size))
			for b.Loop() {
				t := &mem.Transfer{Dst: list(0, ib.AccessLocalWrite), Src: list(c.size, 0), N: uint64(c.size), Stream: &s}
				if f, _ := t.Begin(); !f.OK() {
					b.Fatal(f)
				}
				if under = append(under, t); len(under) == c.depth {
					under[0].Wait()
					under = under[1:]
				}
			}
			for _, t := range under {
				t.Wait()
			}
		})
		for _, way := range []string{linkLoop, linkRings, "named", linkUDP} {
			for _, where := range []string{"ab", "a-", "-b"} {
				for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead} {
					b.Run(fmt.Sprintf("%d/%s/%s/%v", c.size, way, where, op), func(b *testing.B) {
						x, y := openWay(b, way), openWay(b, way)
						g := newEngine(b, way, config)
						i := 0
						from, to := connected(b, x, y, ib.RC, c.size, func(e *end) {
							if where[i] != '-' {
								e.onEngine(g)
							}
							i++
							e.mtu, e.rd = ib.MTU4096, 16
						})
						wr := from.write(to, 0, c.size)
						wr.Op, wr.Flags = op, ib.SendSignaled
						wrs := []ib.SendWR{wr}
						b.SetBytes(int64(c.size))
						posted, done := 0, 0
						var wcs [16]ib.WC
						for b.Loop() {
							if _, err := from.qp.PostSend(wrs); err != nil { // post would look for its caller
								b.Fatal(err)
							}
							posted++
							for posted-done == c.depth {
								n, err := from.cq.Poll(wcs[:])
								if err != nil {
									b.Fatal(err)
								}
								for i := range n {
									if wcs[i].Status != ib.WCSuccess {
										b.Fatal(wcs[i].Status)
									}
								}
								done += n
							}
						}
						for done < posted {
							n, _ := from.cq.Poll(wcs[:])
							done += n
						}
					})
				}
			}
		}
	}
}
