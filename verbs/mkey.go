package verbs

import "github.com/verbena-rdma/verbena/internal/provider"

// MKey is an indirect memory key: one key, with addresses from 0 on, whose bytes
// are those of other regions in an order that the program chooses. An RDMA WRITE of
// contiguous data to it scatters them there, a READ gathers them; as a local key it
// does the same here. Hardware calls the making of such keys user-mode memory
// registration (UMR); see mlx5dv_create_mkey(3) and mlx5dv_wr_post(3).
//
// A key is made once and is then free: it opens nothing. A request
// [OpConfigureMKey] in a send queue, executed in its turn and without a packet,
// makes it of regions of any kind, in the same protection domain, or of other
// indirect keys, up to 8 on each other; not of memory windows. The description is a
// list of pieces, of any length and alignment ([MKey.List]), or an interleaved
// pattern ([MKey.Interleaved]), which describes a million elements in the space of
// one. The key's own rights count, for peers and for the program; a key that can be
// written needs regions with [AccessLocalWrite], and nothing else of them.
//
// While a key is configured, what it stands on can be neither closed nor registered
// again (EBUSY), nor invalidated. To be configured anew it must be free again:
// invalidated by [OpLocalInv], by the peer's [OpSendInv], or new; or the request says
// [MKeyInPlace], and perhaps what the key keeps. When that is done, no access to what
// it was before happens any more. The key itself stays the same, so the program must
// be sure that no peer still means the old bytes by it.
//
// A configuration that does not fit ends in [WCMWBindErr], whose VendorErr says why
// (docs/errors.md), and the queue pair with it; the key is then free.
type MKey struct {
	p provider.MKey
}

func (k *MKey) ok() bool { return k != nil && k.p != nil }

// CreateMKey makes an indirect key that can have so many pieces, or sources of an
// interleaved pattern. It is free. See mlx5dv_create_mkey(3).
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

// LKey returns the key that local requests name it by, in their [SGE]s.
func (k *MKey) LKey() uint32 { return k.p.Key() }

// RKey returns the key that peers name it by.
func (k *MKey) RKey() uint32 { return k.p.Key() }

// List says that the key is to be the concatenation of pieces. It checks nothing,
// and does nothing before it is posted, in the Configure field of an
// [OpConfigureMKey].
func (k *MKey) List(access Access, pieces ...SGE) *MKeyConfig {
	return &MKeyConfig{MKey: k.LKey(), Access: access, List: pieces}
}

// Interleaved says that the key is to be made of repeat rounds, each of which takes
// from every source in turn: Bytes of it, and then leaves Skip out. Like List it
// checks and does nothing.
func (k *MKey) Interleaved(access Access, repeat uint64, sources ...Stride) *MKeyConfig {
	return &MKeyConfig{MKey: k.LKey(), Access: access, Repeat: repeat, Interleaved: sources}
}

// Close destroys the key, configured or not. When it has returned, nobody accesses
// memory through it any more, and the regions are free of it. It is idempotent. See
// mlx5dv_destroy_mkey(3).
//
// Errors: EBUSY while another indirect key stands on it; EINVAL for a nil key.
func (k *MKey) Close() error {
	if !k.ok() {
		return invalid("destroy_mkey", "nil indirect key")
	}
	return k.p.Close()
}

// Stride returns a source of an interleaved pattern: n bytes of the region from
// offset off on, and in every further round the next n behind skip others. It
// checks nothing.
func (mr *MR) Stride(off, n, skip int) Stride {
	return Stride{Addr: mr.p.Addr() + uint64(off), Bytes: uint64(n), Skip: uint64(skip), LKey: mr.p.LKey()}
}
