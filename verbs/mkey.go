package verbs

import "github.com/verbena-rdma/verbena/internal/provider"

// MKey is an indirect memory key: one key, with addresses from 0 on, whose bytes
// are those of other regions in an order that the program chooses. A peer's WRITE of
// contiguous data to it scatters them over those regions, a READ gathers them. As a
// local key it does the same for the program's own requests. Hardware calls the making
// of such keys user-mode memory registration (UMR); see mlx5dv_create_mkey(3) and
// mlx5dv_wr_post(3).
//
// A new key is free: it gives access to nothing. A request [OpConfigureMKey] makes it
// of regions of any kind in the same protection domain, or of other indirect keys, up
// to 8 on each other; not of memory windows. The request is posted to a send queue,
// executed in order, and sends no packet. It describes a list of pieces, of any length
// and alignment ([MKey.List]), or an interleaved pattern ([MKey.Interleaved]), which
// takes the same space for a million elements as for one. The rights of an access are
// those of the key, not those of the regions; but a key that can be written needs
// regions with [AccessLocalWrite].
//
// While a key is configured, the regions and keys that it is made of can be neither
// closed nor registered again (EBUSY), nor invalidated. To configure the key anew,
// first make it free, by [OpLocalInv] or by the peer's [OpSendInv]; or post the request
// with [MKeyInPlace]. When that request is done, no access reaches what the key was
// made of before. The key's number stays the same: the program must be sure that no
// peer still means the old bytes by it.
//
// A configuration that is refused ends in [WCMWBindErr], whose VendorErr says why
// (docs/errors.md), and moves the queue pair to the error state; the key is then free.
type MKey struct {
	p provider.MKey
}

func (k *MKey) ok() bool { return k != nil && k.p != nil }

// CreateMKey makes an indirect key for up to so many pieces, or sources of an
// interleaved pattern. The new key is free. See mlx5dv_create_mkey(3).
//
// Errors: EINVAL for less than 1 or more than 16,777,216 pieces, or for a domain that is
// nil or closed; ENOMEM if the device has no more regions (MaxMR in [DeviceAttr]);
// ENODEV if the device is closed.
func (pd *PD) CreateMKey(pieces int) (*MKey, error) {
	if !pd.ok() {
		return nil, invalid("create_mkey", "nil protection domain")
	}
	p, err := pd.p.CreateMKey(pieces)
	if err != nil {
		return nil, err
	}
	return &MKey{p}, nil
}

// LKey returns the key as local requests name it, in their [SGE]s.
func (k *MKey) LKey() uint32 { return k.p.Key() }

// RKey returns the key as peers name it.
func (k *MKey) RKey() uint32 { return k.p.Key() }

// List returns the description of a key that is the concatenation of pieces, for the
// Configure field of an [OpConfigureMKey]. It checks nothing and changes nothing.
func (k *MKey) List(access Access, pieces ...SGE) *MKeyConfig {
	return &MKeyConfig{MKey: k.LKey(), Access: access, List: pieces}
}

// Interleaved returns the description of a key that is made of repeat rounds. Each
// round takes the next Bytes of every source, one source after the other, and skips
// Skip bytes of it. Like List, it checks nothing and changes nothing.
func (k *MKey) Interleaved(access Access, repeat uint64, sources ...Stride) *MKeyConfig {
	return &MKeyConfig{MKey: k.LKey(), Access: access, Repeat: repeat, Interleaved: sources}
}

// Close destroys the key, configured or not. When it has returned, no access goes
// through the key any more, and it keeps no region from being closed. It is
// idempotent. See mlx5dv_destroy_mkey(3).
//
// Errors: EBUSY while another indirect key is made of it; EINVAL for a nil key.
func (k *MKey) Close() error {
	if !k.ok() {
		return invalid("destroy_mkey", "nil indirect key")
	}
	return k.p.Close()
}

// Stride returns a source of an interleaved pattern: n bytes of the region from
// offset off on in the first round; in each further round n bytes again, after
// skipping skip. It checks nothing.
func (mr *MR) Stride(off, n, skip int) Stride {
	return Stride{Addr: mr.p.Addr() + uint64(off), Bytes: uint64(n), Skip: uint64(skip), LKey: mr.p.LKey()}
}
