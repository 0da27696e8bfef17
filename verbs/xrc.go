package verbs

import (
	"os"

	"github.com/verbena-rdma/verbena/internal/provider"
)

// XRCDConfig is which XRC domain [Device.OpenXRCD] opens. See ibv_open_xrcd(3).
type XRCDConfig struct {
	// File names the domain: all processes that open a domain of the device with the
	// same file have the same domain. The file may be closed afterwards. Nil: the
	// domain has no name, and Create must be set.
	File *os.File

	Create    bool // make the domain if there is none
	Exclusive bool // with Create: fail if there is one
}

// XRCD is an XRC domain. Extended reliable connections save connections: an
// initiator ([XRCSend]) is connected to one target ([XRCRecv]) and reaches through
// it all shared receive queues of the target's domain, naming one in each request
// (RemoteSRQN in [SendWR]). Without XRC, each of the programs that have those queues
// would need a connection of its own.
//
// The target has no queues, no completion queue and no protection domain. A request
// uses those of the shared receive queue that it names: its receives, its completion
// queue, and the memory of its protection domain. The completion of a receive names
// the target in QPN.
//
// Processes that share the device share its domains: a target made in one of them
// serves the shared receive queues that others have made in the domain that the same
// file names. Each process executes the requests that name its own queues, with its
// own memory and rights, and answers them. When a process ends, its queues are gone.
// The connection stays for the others, unless the process ended while it was executing
// a message.
//
//	xrcd, err := dev.OpenXRCD(&verbs.XRCDConfig{Create: true})
//	srq, err := pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 64, MaxSGE: 1, XRCD: xrcd, CQ: cq})
//	target, err := xrcd.CreateQP() // to be connected to the peer's XRCSend queue pair
type XRCD struct {
	p   provider.XRCD
	dev *Device
}

func (x *XRCD) ok() bool { return x != nil && x.p != nil }

// OpenXRCD opens an XRC domain: the one that a file names, or a new one without a
// name. A nil cfg makes a new one without a name. See ibv_open_xrcd(3).
//
// Errors: EINVAL if there is neither a File nor Create, Exclusive is set without
// Create, or Exclusive is set and the domain exists; EAGAIN if the domain does not
// exist and Create is not set; ENOMEM if the device has no more domains (as many as
// MaxPD in [DeviceAttr]); EBADF if the file is closed; EMFILE and ENFILE if there is
// no descriptor left; ENODEV if the device is closed; EINVAL for a nil device.
func (d *Device) OpenXRCD(cfg *XRCDConfig) (*XRCD, error) {
	if !d.ok() {
		return nil, invalid("open_xrcd", "nil device")
	}
	pc := provider.XRCDConfig{Create: true}
	if cfg != nil {
		pc = provider.XRCDConfig(*cfg)
	}
	p, err := d.p.OpenXRCD(pc)
	if err != nil {
		return nil, err
	}
	return &XRCD{p: p, dev: d}, nil
}

// CreateQP makes a queue pair of type [XRCRecv], in state [QPReset]: a target. It
// receives for the shared receive queues of the domain. See ibv_create_qp_ex(3).
//
// Errors: ENOMEM if the device has no more queue pairs (MaxQP in [DeviceAttr]);
// ENODEV if the device is closed; EINVAL for a domain that is nil or closed.
func (x *XRCD) CreateQP() (*QP, error) {
	if !x.ok() {
		return nil, invalid("create_qp", "nil XRC domain")
	}
	p, err := x.p.CreateQP()
	if err != nil {
		return nil, err
	}
	return &QP{p: p, dev: x.dev, psn: randomPSN()}, nil
}

// OpenQP opens a target of the domain again, by its number, and returns another QP for
// the same queue pair. Both can be used; the queue pair is gone when both are closed.
// Only the process that made a target can open it. See ibv_open_qp(3).
//
// Errors: EINVAL if the domain has no such target; EOPNOTSUPP if another process made
// it; EINVAL for a domain that is nil or closed.
func (x *XRCD) OpenQP(number uint32) (*QP, error) {
	if !x.ok() {
		return nil, invalid("open_qp", "nil XRC domain")
	}
	p, err := x.p.OpenQP(number)
	if err != nil {
		return nil, err
	}
	return &QP{p: p, dev: x.dev, psn: randomPSN()}, nil
}

// Close closes the domain. The domain ends when all that have it open have closed it.
// Close is idempotent. See ibv_close_xrcd(3).
//
// Errors: EBUSY while queue pairs or shared receive queues that were made with this
// XRCD are open; EINVAL for a nil domain.
func (x *XRCD) Close() error {
	if !x.ok() {
		return invalid("close_xrcd", "nil XRC domain")
	}
	return x.p.Close()
}
