package fabrics

import (
	"context"
	"fmt"
	"syscall"

	"github.com/verbena-rdma/verbena/nvme"
)

// Disk is a namespace of a target, as its host sees it. It is an nvme.Namespace: a target can serve it on. Its calls wait
// for the target, until the host is closed or gets no answer to its keep-alive: then they end with ErrEnded.
type Disk struct {
	h     *Host
	nsid  uint32
	size  int64
	block int
}

// Namespace returns a namespace of the subsystem.
//
// Errors: a *StatusError if there is none; ErrEnded; the context's error.
func (h *Host) Namespace(ctx context.Context, nsid uint32) (*Disk, error) {
	b := make([]byte, page)
	if _, err := h.admin.run(ctx, "identify namespace", nvme.Command{Opcode: nvme.AdminIdentify, NSID: nsid, CDW10: identifyNamespace}, b, nvme.ToHost); err != nil {
		return nil, err
	}
	blocks, format := le.Uint64(b), b[26]&0xf
	shift := b[128+4*int(format)+2]
	switch {
	case blocks == 0:
		return nil, &StatusError{Command: "identify namespace", Status: nvme.StatusInvalidNamespace}
	case shift < 9 || shift > 16 || 1<<shift > h.transfer || blocks > 1<<(62-shift):
		return nil, fmt.Errorf("nvme: a namespace of %d blocks of 2^%d bytes: %w", blocks, shift, syscall.EINVAL)
	}
	return &Disk{h: h, nsid: nsid, block: 1 << shift, size: int64(blocks) << shift}, nil //nolint:gosec // checked above
}

// Size returns the number of bytes.
func (d *Disk) Size() int64 { return d.size }

// BlockSize returns the length of a block. Offsets and lengths are multiples of it.
func (d *Disk) BlockSize() int { return d.block }

// ReadAt reads blocks.
//
// Errors: EINVAL for what are not whole blocks of the disk; *StatusError; ErrEnded.
func (d *Disk) ReadAt(p []byte, off int64) (int, error) {
	return d.move("read", nvme.IORead, p, off, nvme.ToHost)
}

// WriteAt writes blocks. Errors: those of ReadAt.
func (d *Disk) WriteAt(p []byte, off int64) (int, error) {
	return d.move("write", nvme.IOWrite, p, off, nvme.FromHost)
}

func (d *Disk) check(n, off int64) error {
	if off < 0 || n < 0 || off > d.size || n > d.size-off || off%int64(d.block) != 0 || n%int64(d.block) != 0 {
		return fmt.Errorf("nvme: %d bytes at %d are not blocks of the disk: %w", n, off, syscall.EINVAL)
	}
	return nil
}

// move reads or writes, by as many commands as are needed.
func (d *Disk) move(name string, opcode uint8, p []byte, off int64, dir nvme.Direction) (int, error) {
	if err := d.check(int64(len(p)), off); err != nil {
		return 0, err
	}
	most := d.h.transfer / d.block * d.block
	for done := 0; done < len(p); {
		n := min(len(p)-done, most)
		cmd := nvme.Command{Opcode: opcode, NSID: d.nsid}
		cmd.SetLBA(uint64(off+int64(done))/uint64(d.block), n/d.block) //nolint:gosec // inside the disk
		if err := d.run(name, cmd, p[done:done+n], dir); err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

func (d *Disk) run(name string, cmd nvme.Command, data []byte, dir nvme.Direction) error {
	c, err := d.h.IO(context.Background(), cmd, data, dir) // the host ends it
	if err == nil && c.Status != nvme.StatusSuccess {
		err = &StatusError{Command: name, Status: c.Status, Result: c.Result}
	}
	return err
}

// Flush returns when everything that was written before is on stable storage.
func (d *Disk) Flush() error {
	return d.run("flush", nvme.Command{Opcode: nvme.IOFlush, NSID: d.nsid}, nil, nvme.NoData)
}

// Discard gives blocks back.
func (d *Disk) Discard(off, n int64) error {
	if err := d.check(n, off); err != nil {
		return err
	}
	for block := int64(d.block); n > 0; {
		part := min(n, (1<<32-1)*block)
		var r [16]byte
		le.PutUint32(r[4:], uint32(part/block)) //nolint:gosec // fits
		le.PutUint64(r[8:], uint64(off/block))  //nolint:gosec // inside the disk
		if err := d.run("dataset management", nvme.Command{Opcode: nvme.IODatasetManagement, NSID: d.nsid, CDW11: nvme.CDW11Deallocate}, r[:], nvme.FromHost); err != nil {
			return err
		}
		off, n = off+part, n-part
	}
	return nil
}
