package main

// Objects of other processes. A context has a name, which the front writes into the file
// behind cmd_fd. A process that gets this descriptor imports the context, and then its
// protection domains and regions by the numbers of their handles:
//
//  1. vbe_name returns the name. A process that has it can ask for objects (find).
//  2. vbe_import, in the importing process, opens the same device there. It makes an
//     ordinary context with the name of the original.
//  3. vbe_import_pd and vbe_import_mr make a domain or region in the importing process, which
//     stands for the original.
//  4. vbe_unimport closes the import alone; so does closing its context. vbe_destroy first
//     destroys the original (abolish).

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

// find returns an object of the context for another process; 0 is the context itself.
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
	if errors.Is(err, syscall.ENOENT) { // EINVAL, as for a closed context of this process
		err = ib.Errorf(op, syscall.EINVAL, "the context is closed, or its process is gone")
	}
	if err != nil {
		return failed(err)
	}
	_ = o.Close() // it only had to be found
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
	s, err := acquireListed(all[i])
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
		_ = p.origin.Close() // objects are left: the domain stays until its context is closed, the import ends here
	}
	return result(err)
}

// close closes a domain, and ends its import.
func (o *protectionDomain) close() error {
	err := o.Close()
	if err == nil && o.origin != nil {
		err = o.origin.Close()
	}
	return err
}

// abolish destroys the original domain, unless it or the import is in use.
func (o *protectionDomain) abolish() error {
	if o.origin == nil {
		return nil
	}
	if err := o.PD.(*device.PD).Idle(); err != nil {
		return err
	}
	return o.origin.Destroy()
}

// abolish destroys the original region, for all processes that have imported it.
func (o *memoryRegion) abolish() error {
	if o.origin == nil {
		return nil
	}
	return o.origin.Destroy()
}
