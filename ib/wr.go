package ib

import (
	"errors"
	"time"
)

// SGE is one piece of a scatter/gather list.
type SGE struct {
	Addr   uint64 // address of the first byte, or an offset in a zero-based region
	Length uint32 // bytes
	LKey   uint32 // local key of the region that the piece lies in
}

// Opcode is what a send work request does.
type Opcode uint8

const (
	OpSend           Opcode = iota + 1 // SEND to the peer's receive queue
	OpSendImm                          // SEND with 4 bytes of immediate data
	OpSendInv                          // SEND that invalidates a key of the peer
	OpRDMAWrite                        // WRITE to the peer's memory
	OpRDMAWriteImm                     // WRITE that also consumes a receive there
	OpRDMARead                         // READ of the peer's memory
	OpAtomicCmpSwap                    // compare 8 bytes with CompareAdd and, if equal, store Swap
	OpAtomicFetchAdd                   // add CompareAdd to 8 bytes
	OpAtomicWrite                      // store 8 bytes in one step, after all earlier requests
	OpFlush                            // make what was written visible to all, or persistent
	OpBindMW                           // bind a type 2 memory window
	OpLocalInv                         // invalidate a key of this device: a type 2 memory window, an indirect key
	OpConfigureMKey                    // make an indirect key of other regions
	OpWaitFence                        // begin what follows when Fence is signalled
	OpSignalFence                      // signal Fence when all earlier requests are done
	numOpcodes
)

// NumOpcodes is one more than the largest opcode: the size of a table by opcode.
const NumOpcodes = int(numOpcodes)

var opcodeNames = [NumOpcodes]string{
	OpSend: "SEND", OpSendImm: "SEND_WITH_IMM", OpSendInv: "SEND_WITH_INV",
	OpRDMAWrite: "RDMA_WRITE", OpRDMAWriteImm: "RDMA_WRITE_WITH_IMM", OpRDMARead: "RDMA_READ",
	OpAtomicCmpSwap: "ATOMIC_CMP_AND_SWP", OpAtomicFetchAdd: "ATOMIC_FETCH_AND_ADD",
	OpAtomicWrite: "ATOMIC_WRITE", OpFlush: "FLUSH", OpBindMW: "BIND_MW", OpLocalInv: "LOCAL_INV",
	OpConfigureMKey: "CONFIGURE_MKEY", OpWaitFence: "WAIT_FENCE", OpSignalFence: "SIGNAL_FENCE",
}

// String returns the name without the prefix IBV_WR_.
func (o Opcode) String() string { return nameOf(opcodeNames[:], int(o), "Opcode") }

// SendFlags modify a send work request.
type SendFlags uint8

const (
	SendSignaled  SendFlags = 1 << iota // make a completion when done (failures always make one)
	SendSolicited                       // raise the peer's solicited completion event
	SendFence                           // wait for earlier READs and atomics of this queue; BIND_MW, LOCAL_INV and CONFIGURE_MKEY: for all earlier requests
)

// FlushType is what a FLUSH ensures for the bytes, with the bits of IBV_FLUSH_*.
type FlushType uint8

const (
	FlushGlobal     FlushType = 1 << 0 // the bytes are visible to all that can see the memory
	FlushPersistent FlushType = 1 << 1 // the bytes survive the loss of power
)

// FlushLevel is which bytes a FLUSH is about.
type FlushLevel uint8

const (
	FlushRange FlushLevel = iota + 1 // RemoteLength bytes at RemoteAddr
	FlushMR                          // all of the region; RemoteAddr and RemoteLength are ignored
)

// SendWR is a work request for a send queue. The queue copies it: slices may be
// reused once PostSend returns. The memory that SGL names must stay as it is
// until the request completes.
type SendWR struct {
	ID     uint64 // comes back in the completion
	Op     Opcode
	Flags  SendFlags
	SGL    []SGE  // what to send, or where READ and atomic results go
	Inline []byte // instead of SGL for SEND, WRITE and ATOMIC WRITE: copied when posted, needs no region

	Imm           uint32 // OpSendImm, OpRDMAWriteImm
	InvalidateKey uint32 // OpSendInv: the peer's rkey; OpLocalInv: one of this device
	Bind          MWBind // OpBindMW

	Configure *MKeyConfig // OpConfigureMKey

	Fence   Fence         // OpWaitFence, OpSignalFence
	Timeout time.Duration // OpWaitFence: how long to wait; 0: DefaultFenceTimeout

	RemoteAddr uint64 // WRITE, READ, atomics and FLUSH: where in the peer's region
	RKey       uint32 // WRITE, READ, atomics and FLUSH: the peer's region

	RemoteLength uint32     // FLUSH of a range: how many bytes there
	FlushType    FlushType  // FLUSH: at least one bit
	FlushLevel   FlushLevel // FLUSH

	CompareAdd uint64 // atomics: value to compare with, or to add
	Swap       uint64 // compare-and-swap: value to store

	RemoteSRQN uint32 // XRC: the number of the shared receive queue there, in every request

	AH         *AH    // UD: whom to send to
	RemoteQPN  uint32 // UD: which queue pair there
	RemoteQKey uint32 // UD: with the top bit set, the queue pair's own Q_Key is sent instead
}

// Fence is work that ends some time. A *[dmabuf.Fence] is one.
//
// [dmabuf.Fence]: https://pkg.go.dev/github.com/verbena-rdma/verbena/dmabuf#Fence
type Fence interface {
	// Done returns a channel that is closed when the fence is signalled.
	Done() <-chan struct{}
	// Signal ends the work that the fence stands for; err is not nil if the work failed. It
	// reports whether the fence was pending.
	Signal(err error) bool
}

// QueuedFence is a Fence that is told which queues wait for it and signal it, so that waits can be found that never
// end.
type QueuedFence interface {
	Fence
	// Queued is called when a request is posted that waits for the fence, or signals it. queue is the queue's identity,
	// name is for people, limit is how long a wait may last. An error refuses the request: [EDEADLK] if its signal
	// could never come.
	//
	// [EDEADLK]: https://man7.org/linux/man-pages/man3/errno.3.html
	Queued(queue any, name string, signals bool, limit time.Duration) error
}

// DefaultFenceTimeout is how long a request waits for a fence if it does not say so itself.
const DefaultFenceTimeout = 10 * time.Second

// ErrFenceFlushed is what the fence of a request is signalled with that will not be executed: the
// queue pair has failed, or was reset or closed.
var ErrFenceFlushed = errors.New("the queue pair has failed or was closed before the work was done")

// RecvWR is a work request for a receive queue or a shared receive queue.
type RecvWR struct {
	ID  uint64 // comes back in the completion
	SGL []SGE  // where the message goes; UD messages need 40 bytes more in front
}

// GRHLength is the number of bytes in front of every UD message: the routing
// header, or for IPv4 peers 20 undefined bytes and the IPv4 header.
const GRHLength = 40
