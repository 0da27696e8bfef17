//go:build cgo

package main

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
)

// cmCall is a command on a channel. in is its body, whose length was checked; at most room
// bytes of the answer have a place.
type cmCall struct {
	files   *cmFiles
	channel *cmChannel
	in      []byte
	room    int
	other   *cmChannel // MIGRATE_ID: the channel that the id is on; nil: there is none
	hasRead bool       // GET_EVENT: the caller has read the channel's descriptor
}

// cmCommand is a command of enum rdma_ucm_cmds.
type cmCommand struct {
	size int // of its body, without optional parts
	room int // of its answer, without optional parts
	do   func(*cmCall) ([]byte, error)
}

// cmGetEvent is the number of GET_EVENT.
const cmGetEvent = 12

// cmCommands are the commands by number. GET_OPTION, 13, is missing, as in the kernel.
var cmCommands = [25]cmCommand{
	0:          {24, 4, (*cmCall).createID},
	1:          {16, 4, (*cmCall).destroyID},
	2:          {40, 0, (*cmCall).bindIP},
	3:          {64, 0, (*cmCall).resolveIP},
	4:          {8, 0, (*cmCall).resolveRoute},
	5:          {16, sizeRouteOld, (*cmCall).queryRoute},
	6:          {280, 0, (*cmCall).connect},
	7:          {8, 0, (*cmCall).listen},
	8:          {288, 0, (*cmCall).accept},
	9:          {264, 0, (*cmCall).reject},
	10:         {4, 0, (*cmCall).disconnect},
	11:         {16, sizeQPAttr, (*cmCall).initQPAttr},
	cmGetEvent: {8, sizeEventResp - 12, (*cmCall).getEvent},
	14:         {24, 0, (*cmCall).setOption},
	15:         {8, 0, (*cmCall).notify},
	16:         {48, 4, (*cmCall).joinIP},
	17:         {16, 4, (*cmCall).leave},
	18:         {16, 4, (*cmCall).migrateID},
	19:         {16, 0, (*cmCall).query},
	20:         {136, 0, (*cmCall).bind},
	21:         {272, 0, (*cmCall).resolveAddr},
	22:         {152, 4, (*cmCall).joinAny},
	23:         {88, 0, (*cmCall).resolveService},
	24:         {320, 0, (*cmCall).writeEvent},
}

// command executes a command, and returns its answer.
func (f *cmFiles) command(number uint32, c *cmCall) ([]byte, error) {
	if number >= uint32(len(cmCommands)) {
		return nil, syscall.EINVAL
	}
	cmd := &cmCommands[number]
	switch {
	case cmd.do == nil:
		return nil, syscall.ENOSYS
	case c.room < cmd.room:
		return nil, syscall.ENOSPC
	case len(c.in) < cmd.size:
		return nil, syscall.EINVAL
	}
	c.files = f
	out, err := cmd.do(c)
	if err != nil {
		return nil, err
	}
	return out[:min(len(out), c.room)], nil
}

// u32 returns a number of the body.
func (c *cmCall) u32(at int) uint32 { return native.Uint32(c.in[at:]) }

// id returns the id whose number is in the body.
func (c *cmCall) id(at int) (*cmID, error) { return c.files.find(c.channel, c.u32(at)) }

func answer(n uint32) []byte { return native.AppendUint32(nil, n) }

// --- ids ---

// cmType returns the type of queue pairs of a port space.
func cmType(ps cma.PortSpace, wanted uint8) (ib.QPType, error) {
	types := map[uint8]ib.QPType{2: ib.RC, 3: ib.UC, 4: ib.UD, 9: ib.XRCSend, 10: ib.XRCRecv}
	switch t := types[wanted]; {
	case ps == cma.PSTCP:
		return ib.RC, nil
	case ps == cma.PSUDP || ps == cma.PSIPoIB:
		return ib.UD, nil
	case ps == cma.PSIB && t != 0:
		return t, nil
	}
	return 0, syscall.EINVAL
}

func (c *cmCall) createID() ([]byte, error) {
	ps := cma.PortSpace(native.Uint16(c.in[16:]))
	typ, err := cmType(ps, c.in[18])
	if err != nil {
		return nil, err
	}
	conn, err := c.files.start().newID(ps, typ, c.files.deliver)
	if err != nil {
		return nil, err
	}
	id := &cmID{uid: native.Uint64(c.in), channel: c.channel, conn: conn, ps: ps, typ: typ}
	c.files.mu.Lock()
	closed := c.channel.closed
	if !closed {
		c.files.enterLocked(id)
	}
	c.files.mu.Unlock()
	if closed {
		_ = conn.Close() // the program gets EBADF in any case
		return nil, syscall.EBADF
	}
	return answer(id.number), nil
}

func (c *cmCall) destroyID() ([]byte, error) {
	c.files.mu.Lock()
	id, err := c.files.findLocked(c.channel, c.u32(8))
	if err == nil {
		c.files.forgetLocked(id)
	}
	c.files.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return answer(c.files.destroy(id)), nil
}

func (c *cmCall) migrateID() ([]byte, error) {
	if c.other == nil {
		return nil, syscall.ENOENT
	}
	n, err := c.files.migrate(c.u32(8), c.other, c.channel)
	if err != nil {
		return nil, err
	}
	return answer(n), nil
}

// --- addresses ---

// bindTo binds an id to a socket address.
func (c *cmCall) bindTo(id *cmID, addr []byte) error {
	to, native := sockaddr(addr)
	if native == nil {
		return id.conn.Bind(to)
	}
	return c.bindNative(id, native)
}

// bindNative binds an id to an address of family AF_IB, which can only be none: devices of RoCE are not
// found by their GIDs. librdmacm does so in order to find out whether it may. Only listening makes
// such an id need a port.
func (c *cmCall) bindNative(id *cmID, a *ibAddr) error {
	switch {
	case id.conn.Info().Src.IsValid() || c.familyOf(id) == afIB:
		return syscall.EINVAL // it is bound
	case !a.gid().IsZero() && a.gid() != ib.GID(netip.IPv6Loopback().As16()):
		return syscall.ENODEV
	case !a.isOf(id.ps):
		return syscall.EPROTONOSUPPORT
	}
	c.files.mu.Lock()
	id.native.src = a
	c.files.mu.Unlock()
	return nil
}

// familyOf returns afIB if the id is bound to an address of that family, else 0.
func (c *cmCall) familyOf(id *cmID) uint16 {
	c.files.mu.Lock()
	defer c.files.mu.Unlock()
	if id.native.src != nil {
		return afIB
	}
	return 0
}

func (c *cmCall) bindIP() ([]byte, error) {
	addr := c.in[8:36]
	if n := addrSize(addr); n == 0 || n > len(addr) {
		return nil, syscall.EINVAL
	}
	id, err := c.id(36)
	if err != nil {
		return nil, err
	}
	return nil, c.bindTo(id, addr)
}

func (c *cmCall) bind() ([]byte, error) {
	size, reserved, addr := native.Uint16(c.in[4:]), native.Uint16(c.in[6:]), c.in[8:]
	if reserved != 0 || size == 0 || int(size) != addrSize(addr) {
		return nil, syscall.EINVAL
	}
	id, err := c.id(0)
	if err != nil {
		return nil, err
	}
	return nil, c.bindTo(id, addr)
}

// resolve finds the way to a socket address.
func (c *cmCall) resolve(id *cmID, src, dst []byte, timeout uint32) error {
	from, fromIB := sockaddr(src)
	to, toIB := sockaddr(dst)
	bound := c.familyOf(id) == afIB || id.conn.Info().Src.IsValid()
	switch {
	case bound && (c.familyOf(id) == afIB) != (toIB != nil),
		!bound && native.Uint16(src) != 0 && (fromIB != nil) != (toIB != nil):
		return syscall.EINVAL // one address of family AF_IB, one of another
	case !bound && toIB != nil:
		if fromIB == nil {
			fromIB = &ibAddr{}
			native.PutUint16(fromIB[:], afIB)
			copy(fromIB[2:4], toIB[2:4]) // the P_Key
		}
		if err := c.bindNative(id, fromIB); err != nil {
			return err
		}
		from = netip.AddrPort{}
	}
	if err := id.conn.ResolveAddr(from, to, time.Duration(timeout)*time.Millisecond); err != nil {
		return err
	}
	c.files.mu.Lock()
	defer c.files.mu.Unlock()
	id.native.dst = toIB
	return nil
}

func (c *cmCall) resolveIP() ([]byte, error) {
	src, dst := c.in[:28], c.in[28:56]
	from, to := addrSize(src), addrSize(dst)
	if native.Uint16(src) != 0 && from == 0 || from > len(src) || to == 0 || to > len(dst) {
		return nil, syscall.EINVAL
	}
	id, err := c.id(56)
	if err != nil {
		return nil, err
	}
	return nil, c.resolve(id, src, dst, c.u32(60))
}

func (c *cmCall) resolveAddr() ([]byte, error) {
	from, to, reserved := int(native.Uint16(c.in[8:])), int(native.Uint16(c.in[10:])), c.u32(12)
	src, dst := c.in[16:16+sizeStorage], c.in[16+sizeStorage:]
	if reserved != 0 || from != 0 && from != addrSize(src) || to == 0 || to != addrSize(dst) {
		return nil, syscall.EINVAL
	}
	id, err := c.id(0)
	if err != nil {
		return nil, err
	}
	if from == 0 {
		src = make([]byte, sizeStorage)
	}
	return nil, c.resolve(id, src, dst, c.u32(4))
}

func (c *cmCall) resolveRoute() ([]byte, error) {
	id, err := c.id(0)
	if err != nil {
		return nil, err
	}
	c.files.mu.Lock()
	native := id.native.dst != nil
	c.files.mu.Unlock()
	if native && id.conn.Info().Dev != nil && c.u32(4) != 0 {
		return nil, syscall.ENODEV // a GID alone leads nowhere on RoCE: no IP address says through which interface
	}
	return nil, id.conn.ResolveRoute(time.Duration(c.u32(4)) * time.Millisecond)
}

// resolveService is for subnets with a subnet manager, which RoCE does not have.
func (c *cmCall) resolveService() ([]byte, error) {
	id, err := c.id(0)
	if err != nil {
		return nil, err
	}
	if id.conn.Info().Dev == nil {
		return nil, syscall.EINVAL
	}
	return nil, syscall.EOPNOTSUPP
}

// --- connections ---

func (c *cmCall) listen() ([]byte, error) {
	id, err := c.id(0)
	if err != nil {
		return nil, err
	}
	c.files.mu.Lock()
	src := id.native.src
	c.files.mu.Unlock()
	if src != nil && !id.conn.Info().Src.IsValid() {
		if err := id.conn.Bind(netip.AddrPortFrom(netip.IPv6Unspecified(), src.port())); err != nil {
			return nil, err
		}
	}
	return nil, id.conn.Listen(int(int32(c.u32(4))))
}

// usesQKey reports whether an id has a Q_Key of the program's: one with addresses of family
// AF_IB.
func (c *cmCall) usesQKey(id *cmID) bool {
	c.files.mu.Lock()
	defer c.files.mu.Unlock()
	return id.native.src != nil
}

func (c *cmCall) connect() ([]byte, error) {
	id, err := c.id(sizeConnParam)
	if err != nil {
		return nil, err
	}
	p, valid := connParam(c.in, c.usesQKey(id))
	if !valid {
		return nil, syscall.EINVAL
	}
	p.ECE = ece(c.in, sizeConnParam+8)
	return nil, id.conn.Connect(p)
}

// accept sets the program's name of an id before its first event can come, and takes it back
// if the id is not accepted.
func (c *cmCall) accept() ([]byte, error) {
	id, err := c.id(8 + sizeConnParam)
	if err != nil {
		return nil, err
	}
	p, valid := connParam(c.in[8:], c.usesQKey(id))
	if !valid {
		return nil, id.conn.Accept(nil)
	}
	p.ECE = ece(c.in, 8+sizeConnParam+8)
	f := c.files
	f.mu.Lock()
	old := id.uid
	id.uid = native.Uint64(c.in)
	f.mu.Unlock()
	if err = id.conn.Accept(p); err == nil {
		return nil, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if id.uid = old; old == 0 {
		id.channel.dropLocked(func(e *cmEvent) bool { return e.of == id })
	}
	return nil, err
}

// Reasons of a rejection that a program may have.
const consumerDefined, vendorOption = 28, 35

func (c *cmCall) reject() ([]byte, error) {
	size, reason := int(c.in[4]), int(c.in[5])
	switch reason {
	case 0:
		reason = consumerDefined
	case consumerDefined, vendorOption:
	default:
		return nil, syscall.EINVAL
	}
	id, err := c.id(0)
	if err != nil {
		return nil, err
	}
	return nil, id.conn.Reject(reason, append([]byte(nil), c.in[8:8+size]...))
}

func (c *cmCall) disconnect() ([]byte, error) {
	id, err := c.id(0)
	if err != nil {
		return nil, err
	}
	err = id.conn.Disconnect()
	if errors.Is(err, syscall.ENOTCONN) {
		return nil, nil // the kernel's rdma_disconnect does not report this: programs disconnect twice
	}
	return nil, err
}

func (c *cmCall) notify() ([]byte, error) {
	id, err := c.id(0)
	if err != nil {
		return nil, err
	}
	for typ, n := range eventTypes {
		if uint32(n) == c.u32(4) {
			return nil, id.conn.Notify(typ)
		}
	}
	return nil, syscall.EINVAL
}

func (c *cmCall) initQPAttr() ([]byte, error) {
	const highest = 6 // IBV_QPS_ERR
	if c.u32(12) > highest {
		return nil, syscall.EINVAL
	}
	id, err := c.id(8)
	if err != nil {
		return nil, err
	}
	a, mask, err := id.conn.QPAttr(ib.QPState(c.u32(12) + 1))
	if err != nil {
		return nil, err
	}
	out := make([]byte, sizeQPAttr)
	putQPAttr(out, &a, mask)
	return out, nil
}

// --- options ---

func (c *cmCall) setOption() ([]byte, error) {
	const levelID, levelIB = 0, 1
	id, err := c.id(8)
	if err != nil {
		return nil, err
	}
	level, name, size := c.u32(12), c.u32(16), int(c.u32(20))
	value := c.in[24:]
	if len(value) < size {
		return nil, syscall.EFAULT // the front could not read it
	}
	value = value[:size]
	switch level {
	case levelID:
		return nil, setIDOption(id, cma.Option(name), value)
	case levelIB:
		return nil, setPath(id, name, value)
	}
	return nil, syscall.ENOSYS
}

func setIDOption(id *cmID, o cma.Option, value []byte) error {
	switch o {
	case cma.OptionTOS, cma.OptionACKTimeout:
		if len(value) != 1 {
			return syscall.EINVAL
		}
		return id.conn.SetOption(o, int(value[0]))
	case cma.OptionReuseAddr, cma.OptionAFOnly:
		if len(value) != 4 {
			return syscall.EINVAL
		}
		return id.conn.SetOption(o, int(flag(native.Uint32(value) != 0)))
	}
	return syscall.ENOSYS
}

// setPath sets the path, from a list of records of which one is the primary path's.
func setPath(id *cmID, name uint32, value []byte) error {
	const path = 1
	if name != path {
		return syscall.ENOSYS
	}
	if len(value) == 0 || len(value)%sizePathRecord != 0 {
		return syscall.EINVAL
	}
	for ; len(value) > 0; value = value[sizePathRecord:] {
		if native.Uint32(value) == pathPrimary {
			return id.conn.SetPath(pathRecord(value))
		}
	}
	return syscall.EINVAL
}

// --- groups ---

func (c *cmCall) joinIP() ([]byte, error) {
	addr := c.in[16:44]
	if n := addrSize(addr); n == 0 || n > len(addr) {
		return nil, syscall.EINVAL
	}
	return c.join(44, addr, false)
}

func (c *cmCall) joinAny() ([]byte, error) {
	const fullMember, sendOnly = 0, 1
	size, flags, addr := native.Uint16(c.in[20:]), native.Uint16(c.in[22:]), c.in[24:]
	if int(size) != addrSize(addr) || size == 0 || flags != fullMember && flags != sendOnly {
		return nil, syscall.EINVAL
	}
	return c.join(16, addr, flags == sendOnly)
}

func (c *cmCall) join(at int, addr []byte, sendOnly bool) ([]byte, error) {
	id, err := c.id(at)
	if err != nil {
		return nil, err
	}
	group, _ := sockaddr(addr)
	f := c.files
	f.mu.Lock()
	j := &cmJoin{number: f.numberLocked(), uid: native.Uint64(c.in[8:]), of: id, group: group.Addr()}
	f.joins[j.number] = j
	f.mu.Unlock()
	member, err := id.conn.join(j.group, sendOnly)
	f.mu.Lock()
	if err != nil {
		delete(f.joins, j.number)
	}
	j.member = member
	f.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return answer(j.number), nil
}

func (c *cmCall) leave() ([]byte, error) {
	f := c.files
	f.mu.Lock()
	j := f.joins[c.u32(8)]
	if j == nil || j.of.channel != c.channel || j.member == nil {
		f.mu.Unlock()
		if j == nil {
			return nil, syscall.ENOENT
		}
		return nil, syscall.EINVAL
	}
	delete(f.joins, j.number)
	f.mu.Unlock()
	_ = j.member.Leave() // the membership is gone in any case
	f.mu.Lock()
	defer f.mu.Unlock()
	j.of.channel.dropLocked(func(e *cmEvent) bool { return e.join == j })
	return answer(j.reported), nil
}

// --- events ---

func (c *cmCall) getEvent() ([]byte, error) {
	e := c.files.next(c.channel, c.hasRead)
	if e == nil {
		return nil, syscall.EAGAIN
	}
	if e.child != nil {
		e.child.conn.Seen()
	}
	return e.resp.bytes(), nil
}

// writeEvent makes an event by order of the program.
func (c *cmCall) writeEvent() ([]byte, error) {
	const user, internal = 18, 19
	event := c.u32(8)
	if event != user && event != internal {
		return nil, syscall.EINVAL
	}
	f := c.files
	f.mu.Lock()
	defer f.mu.Unlock()
	id, err := f.findLocked(c.channel, c.u32(0))
	if err != nil {
		return nil, err
	}
	id.channel.addLocked(&cmEvent{of: id, resp: eventResp{uid: id.uid, id: id.number, event: event, status: c.u32(12),
		arg: append([]byte(nil), c.in[16:24]...)}})
	return nil, nil
}

// --- queries ---

func (c *cmCall) query() ([]byte, error) {
	const addr, path, gid, service = 0, 1, 2, 3
	least := 0
	switch c.u32(12) {
	case addr, gid:
		least = sizeAddrRespOld
	case path, service:
		least = 8
	}
	id, err := c.id(8)
	if err != nil {
		return nil, err
	}
	if c.room < least {
		return nil, syscall.ENOSPC
	}
	switch c.u32(12) {
	case addr:
		return c.queryAddr(id), nil
	case path:
		return c.queryPath(id), nil
	case gid:
		return c.queryGID(id), nil
	case service:
		return nil, syscall.ENOENT
	}
	return nil, syscall.ENOSYS
}

// noPartition is the P_Key of all that is on RoCE.
const noPartition = 0xffff

// known returns what is known of an id, and its addresses of family AF_IB.
func (c *cmCall) known(id *cmID) (cma.Info, ibAddrs) {
	info := id.conn.Info()
	c.files.mu.Lock()
	defer c.files.mu.Unlock()
	return info, id.native
}

// addrResp begins a struct rdma_ucm_query_addr_resp.
func addrResp(info *cma.Info) []byte {
	out := make([]byte, sizeAddrResp)
	if info.Dev != nil {
		binary.BigEndian.PutUint64(out, info.GUID)
		out[8] = info.Port
		binary.BigEndian.PutUint16(out[10:], noPartition)
		native.PutUint32(out[272:], noIndex)
	}
	return out
}

func (c *cmCall) queryAddr(id *cmID) []byte {
	info, ibs := c.known(id)
	out := addrResp(&info)
	for i, addr := range [...]netip.AddrPort{info.Src, info.Dst} {
		to, given := out[16+i*sizeStorage:], [...]*ibAddr{ibs.src, ibs.dst}[i]
		size := 0
		if given != nil {
			size = copy(to, given[:])
			if addr.IsValid() {
				g := ib.GIDFromAddr(addr.Addr())
				copy(to[8:24], g[:])
			}
		} else {
			size = putSockaddr(to, addr)
		}
		native.PutUint16(out[12+2*i:], uint16(size))
	}
	return out
}

func (c *cmCall) queryGID(id *cmID) []byte {
	info, ibs := c.known(id)
	out := addrResp(&info)
	for i, addr := range [...]netip.AddrPort{info.Src, info.Dst} {
		to, given := out[16+i*sizeStorage:], [...]*ibAddr{ibs.src, ibs.dst}[i]
		native.PutUint16(out[12+2*i:], sizeIB)
		var g ib.GID
		switch {
		case len(info.Paths) > 0:
			g = [...]ib.GID{info.Paths[0].SGID, info.Paths[0].DGID}[i]
		case addr.IsValid():
			g = ib.GIDFromAddr(addr.Addr())
		}
		if given != nil {
			copy(to, given[:])
			if !g.IsZero() {
				copy(to[8:24], g[:])
			}
			continue
		}
		pkey := uint16(0)
		if info.Dev != nil {
			pkey = noPartition
		}
		putIBAddr(to, g, pkey, uint64(id.ps)<<16+uint64(addr.Port()))
	}
	return out
}

func (c *cmCall) queryPath(id *cmID) []byte {
	paths := id.conn.Info().Paths
	out := make([]byte, 8, 8+sizePathRecord*len(paths))
	native.PutUint32(out, uint32(len(paths)))
	for i := range paths {
		if len(out)+sizePathRecord > c.room {
			break
		}
		out = append(out, make([]byte, sizePathRecord)...)
		putPathRecord(out[len(out)-sizePathRecord:], &paths[i])
	}
	return out
}

func (c *cmCall) queryRoute() ([]byte, error) {
	id, err := c.id(8)
	if err != nil {
		return nil, err
	}
	info, _ := c.known(id)
	out := make([]byte, sizeRouteResp)
	putSockaddr(out[136:], info.Src)
	putSockaddr(out[164:], info.Dst)
	if info.Dev == nil {
		return out, nil
	}
	binary.BigEndian.PutUint64(out, info.GUID)
	native.PutUint32(out[192:], uint32(len(info.Paths)))
	out[196] = info.Port
	native.PutUint32(out[200:], noIndex)
	for i := range info.Paths[:min(len(info.Paths), 2)] {
		putUserPath(out[8+sizePath*i:], &info.Paths[i])
	}
	if len(info.Paths) == 0 {
		p := cma.Path{PKey: noPartition}
		if info.Src.IsValid() {
			p.SGID = ib.GIDFromAddr(info.Src.Addr())
		}
		if info.Dst.IsValid() {
			p.DGID = ib.GIDFromAddr(info.Dst.Addr())
		}
		copy(out[8:], p.DGID[:])
		copy(out[24:], p.SGID[:])
		binary.BigEndian.PutUint16(out[60:], p.PKey)
	}
	return out, nil
}
