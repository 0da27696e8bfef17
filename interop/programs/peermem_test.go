package programs

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// sharedObject builds a shared object of testdata.
func sharedObject(t testing.TB, name string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), name+".so")
	cmd := exec.Command("cc", "-std=gnu11", "-Wall", "-Werror", "-Wno-unused-function", "-O1", "-fPIC", "-shared", "-I", root+"/clib/include",
		"-o", out, filepath.Join("testdata", name+".c"), "-lpthread")
	if msg, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, msg)
	}
	return out
}

// PeerDirect clients in C: a program's own, and a shared object.
func TestPeerMem(t *testing.T) {
	bin := compile(t, "peermem")
	for _, how := range []string{"program", "plugin", "hang"} {
		t.Run(how, func(t *testing.T) {
			if how == "hang" && !full {
				t.Skip("full: a client that does not answer for 12 seconds")
			}
			env := []string{"VERBENA_ADDR=" + address()}
			if how == "plugin" {
				env = append(env, "VERBENA_PEER_MEM="+sharedObject(t, "peerclient"))
			}
			if out := run(t, side{args: []string{bin, how}, env: env}); !strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// Shared objects that are no clients are named, and the program goes on without them.
func TestPeerMemWrong(t *testing.T) {
	other := sharedObject(t, "noclient")
	out := run(t, side{args: []string{compile(t, "rereg")}, env: []string{"VERBENA_ADDR=" + address(), "VERBENA_PEER_MEM=:/does/not/exist.so::" + other + ":"}})
	for _, want := range []string{"/does/not/exist.so", "noclient.so: it has no function verbena_peer_mem_init", "ok\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

// /proc/kallsyms has the symbols by which libfabric recognises dma-bufs and PeerDirect, as far as there
// are any.
func TestKernelSymbols(t *testing.T) {
	bin, client := compile(t, "kallsyms"), sharedObject(t, "peerclient")
	const buffers, peers = "ib_umem_dmabuf_get", "ib_register_peer_memory_client"
	for _, c := range []struct {
		args []string
		env  string
	}{
		{[]string{buffers, "-" + peers}, "VERBENA_PEER_MEM="},
		{[]string{buffers, peers}, "VERBENA_PEER_MEM=" + client},
		{[]string{"-" + buffers, "-" + peers}, "VERBENA_HIDE=odp, dmabuf ,xrc"},
		{[]string{buffers}, "VERBENA_HIDE=odp,xrc"},
	} {
		if out := run(t, side{args: append([]string{bin}, c.args...), env: []string{"VERBENA_ADDR=" + address(), c.env}}); !strings.HasSuffix(out, "ok\n") {
			t.Errorf("%v: it says\n%s", c, out)
		}
	}
}
