package host

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// The directory's layout.
//
// This is sound: the segment is as long as the layout, which openDirectory
// checks, page-aligned, and mapped for as long as the directory is used. All
// fields that change are atomics, so that another process's writes are no data
// race; the others are written before the segment is passed on. What is read from
// it is used as an index only after a check, since a process of the same user may
// have written anything.
type layout struct {
	magic  uint64
	id     [2]uint64
	key    mem.PermKey
	limits [NumObjects]uint64
	addr   [16]byte // the device's first address, by which its processes are named
	v4     bool

	claimed atomic.Uint32 // the entry that was taken last
	_       [64]byte
	turns   [placesLocks]atomic.Uint32 // how often each of the locks was taken: see directory.lock
	_       [64]byte
	// ids are the processes that have the entries; 0: the entry is free. They stand together, since
	// each object that is made asks for all of them: see directory.total.
	ids     [MaxProcesses]atomic.Uint64
	process [MaxProcesses]entry
	place   [sys.NumPlaces]placeEntry
	// Records of connections, in chunks, and the process that has each chunk: see lastwords.go.
	chunkHolder [maxChunks]atomic.Uint64
	chunk       [maxChunks][chunkRecords]record

	// ports are portWords, by port space, address and port. Most pages of it are never touched,
	// and take no memory.
	ports [NumPortSpaces][maxAddrs][1 << 16]atomic.Uint64
}

// entry is one process, which holds the lock of the file's byte with the entry's number as long as
// it lives. The process itself writes it. Its word of layout.ids any process takes away from one
// that is dead.
type entry struct {
	ready   atomic.Uint64 // the process's identity, once what follows is the process's
	packets atomic.Uint32 // not 0: it wants packets, see Config.Packets
	listens atomic.Uint32 // not 0: it listens on ports
	watched atomic.Uint32 // 0: it has no connections that its peers must hear of; else 1 and how many watch it
	count   [NumObjects]atomic.Uint64
	domains [MaxDomains]domainEntry
	// binding are the inodes of sockets that are being bound, by address, from before they are on
	// the shelf until their place is entered. Those that a dead process has left, the next process
	// with the entry takes: see Member.orphans.
	binding [maxAddrs]atomic.Uint64
	_       [64]byte
}

// placeEntry is one place: see places.go.
type placeEntry struct {
	holder atomic.Uint64           // identity of the process that has the place; 0: no process
	socket [maxAddrs]atomic.Uint64 // inodes of the sockets, by address; 0: there is none yet
	next   atomic.Uint32           // counts the ranges of slots that were leased
	comms  atomic.Uint32           // counts the communication ids
	quiet  atomic.Uint32           // not 0: the sockets receive nothing, see sys.Quiet
}

// record is a connection: see LastWords.
type record struct {
	state atomic.Uint64 // 0: none; else its state, the index of its address from bit 8 on, the peer's queue pair from bit 32 on
	ids   atomic.Uint64 // the local communication id from bit 32 on, the peer's
	peer  [2]atomic.Uint64
}

// domainEntry is an XRC domain that a process has open, if used is not 0.
type domainEntry struct {
	used atomic.Uint32
	name [2]atomic.Uint64
}

const layoutMagic = 0x7665726265_6e61_0b // "verbena", version 11

var errDirectory = errors.New("the directory of the device is damaged, or of another version")

// directory is a directory that this process has mapped.
type directory struct {
	fd   int
	mem  []byte
	perm mem.Perm24
	*layout
}

const layoutSize = int(unsafe.Sizeof(layout{}))

func createDirectory(a netip.Addr, key mem.PermKey, id [2]uint64, limits [NumObjects]uint64) (*directory, error) {
	fd, err := sys.NewMemfd("verbena-directory", layoutSize)
	if err != nil {
		return nil, err
	}
	d, err := mapDirectory(fd)
	if err != nil {
		return nil, err
	}
	d.id, d.key, d.limits, d.magic = id, key, limits, layoutMagic
	d.addr, d.v4 = a.As16(), a.Is4()
	d.perm = mem.NewPerm24(key)
	return d, nil
}

// openDirectory maps a directory that another process has passed. It takes the
// descriptor over.
func openDirectory(fd int) (*directory, error) {
	if fd < 0 {
		return nil, errDirectory
	}
	d, err := mapDirectory(fd)
	if err != nil {
		return nil, err
	}
	if d.magic != layoutMagic {
		return nil, errors.Join(errDirectory, d.close())
	}
	d.perm = mem.NewPerm24(d.key)
	return d, nil
}

func mapDirectory(fd int) (*directory, error) {
	b, err := sys.MapMemfd(fd, layoutSize)
	if err != nil {
		return nil, errors.Join(err, sys.CloseFD(fd))
	}
	return &directory{fd: fd, mem: b, layout: (*layout)(unsafe.Pointer(unsafe.SliceData(b)))}, nil
}

// close unmaps the directory. No goroutine may use it any more.
func (d *directory) close() error { return errors.Join(sys.Unmap(d.mem), sys.CloseFD(d.fd)) }
