package cuda

// The GPU's queues. The driver hands work to the GPU by a number of queues, to which it assigns
// streams as they have something to do: CUDA_DEVICE_MAX_CONNECTIONS of them, 8 if that is not
// set, and 2 with MPS. Work in a queue waits for what is before it, whatever its stream: so a copy
// may wait for a kernel of the program's that waits for another kernel, and if that one waits for
// the bytes of the copy, none of them ever ends. (Seen on an H200: NCCL's kernels, queued one
// behind the other, with MPS.)
//
// Queues of the copy engines are not shared with kernels. The driver uses them for copies to the
// host, and for copies from the host of 32 KiB and more, or of several rows; not for shorter ones,
// which it puts into the queue themselves, nor for copies within the GPU. So
//
//   - short copies from the host are made of two rows. (Even with 32 queues one of them has
//     waited for a kernel when copies to the host came in between.) A store of eight bytes is
//     therefore two of four, the first half first;
//   - copies within the GPU have a stream of their own, and go through the host where there are
//     few queues.

import (
	"os"
	"strconv"
)

const (
	// roomFor is the number of queues from which on kernels do not take all of them.
	roomFor = 8
	// inQueue is the length up to which the driver may put bytes into the queue.
	inQueue = 64 << 10
	// bounce is how many page-locked bytes a worker has for copies that go by the host.
	bounce = 256 << 10
)

// hasRoom reports whether there are queues enough for the program's kernels and for copies.
func hasRoom(getenv func(string) string) bool {
	if n, err := strconv.Atoi(getenv("CUDA_DEVICE_MAX_CONNECTIONS")); err == nil {
		return n >= roomFor
	}
	pipe := getenv("CUDA_MPS_PIPE_DIRECTORY")
	if pipe == "" {
		pipe = "/tmp/nvidia-mps"
	}
	_, err := os.Stat(pipe + "/control")
	return err != nil // no MPS: 8 queues
}

// store queues a copy from the host.
func (w *worker) store(to uint64, from []byte, stream uintptr) Result {
	d := w.card.drv
	if len(from) >= inQueue || len(from) == 1 {
		return d.copyIn(to, from, stream)
	}
	even := len(from) &^ 1
	r := d.copyRows(to, from[:even], stream)
	if r == success && even < len(from) { // the byte before the last one has its value already
		r = d.copyRows(to+uint64(even)-1, from[even-1:], stream)
	}
	if r == notSupported {
		return d.copyIn(to, from, stream)
	}
	return r
}

// throughHost queues copies by which bytes go from one place of the GPU's memory to another. They
// come one after the other, so they can use the same bytes of the host.
func (w *worker) throughHost(to, from, n uint64, stream uintptr) Result {
	for n > 0 {
		b := w.word[:min(n, bounce)]
		if r := w.card.drv.copyOut(b, from, stream); r != success {
			return r
		}
		if r := w.store(to, b, stream); r != success {
			return r
		}
		k := uint64(len(b))
		to, from, n = to+k, from+k, n-k
	}
	return success
}
