package programs

// What the front keeps about memory of CUDA (clib/front/cuda.c), seen by a backend of our own.

import (
	"context"
	"os"
	"os/exec"
	"testing"
)

// The front passes the address of a dma-buf that CUDA has exported on, as long as the memory is there, and tells the
// backend what is gone.
func TestCUDAExports(t *testing.T) {
	need(t, prebuilt == "", "the guest has no compiler")
	backend := compileWith(t, "cudabackend", "-shared", "-fPIC", "testdata/cudabackend_rest.c")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, compile(t, "cudarecords"))
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+built(t)+"/lib", "VERBENA_BACKEND="+backend)
	out, err := cmd.CombinedOutput()
	const want = `# before, a copy, another file
registered 100000 10000
registered 100000 10000
registered 0 0
changed 100000 10000
registered 100000 10000
# an allocation and what lies beside it, below, within
told 1 200000 10000
registered 1f0000 10000
registered 0 0
registered 210000 10000
# a range, in the middle of an export
told 2 218000 1000
registered 1f0000 10000
registered 0 0
# memory of the host, a release
told 5 100000 10000
told 6 0 0
registered 100000 10000
registered 1f0000 10000
# an allocation of unknown size
told 1 200000 0
registered 100000 10000
registered 0 0
# exported again
registered 300000 1000
# a context, a device
told 3 55 0
registered 0 0
told 4 1 0
registered 0 0
# the last 1024
registered 100000 10000
registered 0 0
registered 400000 1000
# a child
registered 0 0
registered 400000 1000
`
	if err != nil || string(out) != want {
		t.Errorf("%v, it prints\n%s\nand should\n%s", err, out, want)
	}
}
