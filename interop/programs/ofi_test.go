package programs

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// libfabric of Debian trixie registers dma-bufs that move (FI_MR_DMABUF, FI_HMEM), and moves data between
// them, between two namespaces. Without dma-bufs it offers no FI_HMEM.
func TestLibfabricDMABuf(t *testing.T) {
	r := newRelease(t, "trixie", false, "libfabric-dev", "libfabric-bin")
	lib := filepath.Dir(oneFile(t, r.tree+"/usr/lib/*/libfabric.so"))
	bin := compileWith(t, "ofi", "-I", r.tree+"/usr/include", "-L", built(t)+"/lib", "-libverbs", "-L", lib, "-lfabric", "-Wl,--allow-shlib-undefined")
	ns := newNetwork(t)
	in := func(i int, role string, env ...string) side {
		return side{args: append(append([]string{}, r.loader...), bin, role, "10.79.0.1"), wrap: []string{"ip", "netns", "exec", ns[i]},
			env: append(env, fmt.Sprintf("VERBENA_ADDR=10.79.0.%d", i+1), "VERBENA_NAME=mlx5_")} // libfabric 2.1 has dma-bufs on devices of that name only
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := start(ctx, t, in(0, "server"))
	s.await("listening\n")
	c := start(ctx, t, in(1, "client"))
	out := c.finish(t)
	if t.Failed() {
		cancel() // the server may wait for ever
	}
	for who, out := range map[string]string{"client": out, "server": s.finish(t)} {
		if !strings.HasSuffix(out, "libfabric 2.1\nok\n") {
			t.Errorf("the %s says\n%s", who, out)
		}
		t.Logf("%s: %s", who, out)
	}
	if out := run(t, in(0, "none", "VERBENA_HIDE=dmabuf")); !strings.HasSuffix(out, "ok\n") {
		t.Errorf("without dma-bufs it says\n%s", out)
	}
}
