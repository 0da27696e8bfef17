package main

// Objects of other processes. A context has a name, which its cmd_fd says; another process
// that gets the descriptor imports the context, and then domains and regions of it by their
// numbers:
//
//  1. vbe_name tells the name. Whoever has it asks this process for objects (find).
//  2. vbe_import, in the other process, opens the same device there. The context it makes
//     is an ordinary one, but that it knows whose objects are imported in it.
//  3. vbe_import_pd and vbe_import_mr make a domain or region of that process's own, which
//     stands for the original.
//  4. vbe_unimport lets go of it. vbe_destroy has the original destroyed first (abolish).
//     What is left when a context is closed is let go of.

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
)

//export vbe_name
func vbe_name(h C.uint64_t, to *C.char, room C.int64_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	if len(c.name) >= int(room) {
		return failed(ib.Errorf("open_device", syscall.ENAMETOOLONG, "%q", c.name))
	}
	setChars(view(to, int(room)), c.name)
	return 0
}

// find is asked by another process for an object of the context; 0 is the context.
func (c *openContext) find(object uint64) (device.Published, error) {
	if object == 0 {
		return device.Published{Destroy: func() error { return errStale }}, nil
	}
	p := device.Published{Destroy: func() error { return c.destroy(object) }}
	if ownerOf(object) == c {
		switch object >> 32 {
		case C.VBE_PD:
			return p, nil
		case C.VBE_MR:
			if r := mrs.get(object); r != nil {
				p.MR = r.MR
				return p, nil
			}
		}
	}
	return p, fmt.Errorf("the context has no object %#x: %w", object, syscall.ENOENT)
}

//export vbe_import
func vbe_import(name *C.char, cookie C.uint64_t, is *C.struct_vbe_device) C.int64_t {
	const op = "import_device"
	from := goString(name)
	o, err := device.Import(op, from, 0)
	if errors.Is(err, syscall.ENOENT) { // as with a context of this process that is closed
		err = ib.Errorf(op, syscall.EINVAL, "the context is closed, or its process is gone")
	}
	if err != nil {
		return failed(err)
	}
	_ = o.Close() // it was there, which was the question
	all, err := list()
	if err != nil {
		return failed(err)
	}
	at, _, _ := strings.Cut(from, "/")
	addr, err := netip.ParseAddr(at)
	i := slices.IndexFunc(all, func(d listed) bool { return err == nil && slices.Contains(d.config.Addrs, addr) })
	if i < 0 {
		return failed(ib.Errorf(op, syscall.ENODEV, "this process has no device at %s", at))
	}
	s, err := acquire(all[i].name)
	if err != nil {
		return failed(err)
	}
	*is = cDevice(&all[i])
	c := newContext(s, cookie)
	c.name = from
	return c.enter()
}

//export vbe_import_pd
func vbe_import_pd(h C.uint64_t, number C.uint32_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	o, err := device.Import("import_pd", c.name, C.VBE_PD<<32|uint64(number))
	if err != nil {
		return failed(err)
	}
	p, err := c.shared.dev.AllocPD()
	if err != nil {
		_ = o.Close() // the first error says more
		return failed(err)
	}
	return newHandle(&pds, c, &protectionDomain{inContext{c}, p, o})
}

//export vbe_import_mr
func vbe_import_mr(h C.uint64_t, number C.uint32_t, m *C.struct_vbe_mr) C.int64_t {
	pd := pds.get(uint64(h))
	if pd == nil {
		return failed(errStale)
	}
	r, o, err := pd.PD.(*device.PD).ImportMR(pd.ctx.name, C.VBE_MR<<32|uint64(number))
	if err != nil {
		return failed(err)
	}
	n := newHandle(&mrs, pd.ctx, &memoryRegion{inContext{pd.ctx}, r, o})
	if n > 0 {
		m.length, m.lkey, m.rkey = C.uint64_t(r.Length()), C.uint32_t(r.LKey()), C.uint32_t(r.RKey())
	}
	return n
}

//export vbe_unimport
func vbe_unimport(h C.uint64_t) C.int64_t {
	c := ownerOf(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	err := c.destroy(uint64(h))
	if p := pds.get(uint64(h)); err != nil && p != nil && p.origin != nil {
		_ = p.origin.Close() // objects are left in it: it ends with the context, the import now
	}
	return result(err)
}

// close closes a domain, and lets go of the one that it stands for.
func (o *protectionDomain) close() error {
	err := o.Close()
	if err == nil && o.origin != nil {
		err = o.origin.Close()
	}
	return err
}

// abolish destroys the domain that it stands for, unless either of them is in use.
func (o *protectionDomain) abolish() error {
	if o.origin == nil {
		return nil
	}
	if err := o.PD.(*device.PD).Idle(); err != nil {
		return err
	}
	return o.origin.Destroy()
}

// abolish destroys the region that it stands for, for all who have it.
func (o *memoryRegion) abolish() error {
	if o.origin == nil {
		return nil
	}
	return o.origin.Destroy()
}
