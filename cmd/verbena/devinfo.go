package main

// How a device gets to the screen: Run opens each device and describes it (describe);
// printDevices prints the description with the names of ibv_devinfo, or encoding/json
// does.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/verbs"
)

type devinfoCmd struct {
	Name    string `arg:"" optional:"" help:"A device, an interface or an address of this host. Default: all devices."`
	Verbose bool   `short:"v" help:"Show all limits and capabilities."`
	JSON    bool   `name:"json" help:"Print a JSON array of devices, with everything."`
	PCAP    string `name:"pcap" type:"path" placeholder:"FILE" help:"Write the packets that reach the device while it is looked at to FILE. It needs the name of one device."`
}

// Help is shown below the flags.
func (devinfoCmd) Help() string {
	return `The lines have the names that ibv_devinfo gives them, as far as they exist there. The others are special to a device in software: its links, the kernel's offloads that they use, how pinned memory is locked, how the device notices that registered memory was unmapped, whether dma-bufs may move while they are registered (dmabuf: dynamic, or pinned), and what makes dma-bufs on this host without hardware (dmabuf_exporters). The last ones are what on-demand paging uses here: how changes of mappings are reported (odp_notifier; without one the device sweeps for them), how pages are found that went away without a report (odp_scan), how mappings are looked up (odp_mappings), and how pages are brought in (odp_fetch; those that can be swapped out are always touched, one by one).

A device whose address another user, or another program, has taken is shown without the links that need it.

Examples:

    verbena devinfo
    verbena devinfo -v verbena0
    verbena devinfo 127.77.0.1
    verbena devinfo eth0 --json`
}

// device is what devinfo shows of a device: the JSON object.
type device struct {
	HCAID        string   `json:"hca_id"`
	Transport    string   `json:"transport"`
	FWVer        string   `json:"fw_ver"`
	NodeGUID     string   `json:"node_guid"`
	SysImageGUID string   `json:"sys_image_guid"`
	VendorID     uint32   `json:"vendor_id"`
	VendorPartID uint32   `json:"vendor_part_id"`
	HWVer        uint32   `json:"hw_ver"`
	PhysPortCnt  int      `json:"phys_port_cnt"`
	Caps         []string `json:"device_cap_flags"`
	AtomicCap    string   `json:"atomic_cap"`
	Limits       []limit  `json:"-"`
	// Max holds Limits by name.
	Max map[string]uint64 `json:"limits"`

	Links       []string `json:"links"`
	Offloads    []string `json:"offloads"`
	MemoryLock  string   `json:"memory_lock"`
	StalePinned string   `json:"stale_pinned_range"`
	DMABuf      string   `json:"dmabuf"`
	Exporters   []string `json:"dmabuf_exporters"`
	ODP         odp      `json:"odp"`
	Note        string   `json:"note,omitempty"`
	Ports       []port   `json:"ports"`
}

// odp is what on-demand paging the device does, and by what means of the kernel.
type odp struct {
	General  []string `json:"general_odp_caps"`
	RC       []string `json:"rc_odp_caps"`
	UC       []string `json:"uc_odp_caps"`
	UD       []string `json:"ud_odp_caps"`
	XRC      []string `json:"xrc_odp_caps"`
	Notifier string   `json:"notifier"`
	Scan     string   `json:"scan"`
	Mappings string   `json:"mappings"`
	Fetch    string   `json:"fetch"`
}

// limit is one number in the order of ibv_devinfo.
type limit struct {
	name  string
	value uint64
}

type port struct {
	Port         int      `json:"port"`
	State        string   `json:"state"`
	StateNumber  int      `json:"state_number"`
	MaxMTU       int      `json:"max_mtu"`
	ActiveMTU    int      `json:"active_mtu"`
	maxMTUCode   int      // as ibv_devinfo prints it in parentheses
	activeCode   int      // as ibv_devinfo prints it in parentheses
	LinkLayer    string   `json:"link_layer"`
	Interface    string   `json:"interface"`
	MaxMsgSize   uint32   `json:"max_msg_sz"`
	BadPKeyCntr  uint32   `json:"bad_pkey_cntr"`
	QKeyViolCntr uint32   `json:"qkey_viol_cntr"`
	PKeyTblLen   int      `json:"pkey_tbl_len"`
	GIDTblLen    int      `json:"gid_tbl_len"`
	physState    string   // as ibv_devinfo prints it
	GIDs         []string `json:"gids"`
}

// physState returns what ibv_devinfo prints for an interface that is up, or down.
func physState(s verbs.PortState) string {
	if s == verbs.PortActive {
		return "LINK_UP (5)"
	}
	return "DISABLED (3)"
}

func (c *devinfoCmd) Run(context.Context) error {
	if c.PCAP != "" && c.Name == "" {
		return usagef("--pcap: which device? Give its name")
	}
	names := []string{c.Name}
	if c.Name == "" {
		list, err := verbs.Devices()
		if err != nil {
			return err
		}
		if len(list) == 0 {
			return errors.New("no device: no network interface of this host is up and has an address")
		}
		names = names[:0]
		for _, d := range list {
			names = append(names, d.Name)
		}
	}
	devices, failed := []device{}, []error(nil)
	for _, name := range names {
		d, err := inspect(name, c.PCAP)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
			continue
		}
		devices = append(devices, d)
	}
	if c.JSON {
		enc := json.NewEncoder(os.Stdout)
		enc.SetIndent("", "  ")
		if err := enc.Encode(devices); err != nil {
			return err
		}
	} else {
		printDevices(os.Stdout, devices, c.Verbose)
	}
	return errors.Join(failed...)
}

// inspect opens a device for a moment. If its address is in use, inspect opens it
// without sockets: then only what the sockets would show is missing.
func inspect(name, pcap string) (d device, err error) {
	note := ""
	dev, err := verbs.Open(name, &verbs.Config{PCAP: pcap})
	if errors.Is(err, syscall.EADDRINUSE) {
		note = "its address is in use, so the udp link is not shown: " + err.Error()
		dev, err = verbs.Open(name, &verbs.Config{Link: verbs.LinkLoop, PCAP: pcap})
	}
	if err != nil {
		return d, err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	d, err = describe(dev)
	d.Note = note
	return d, err
}

func describe(dev *verbs.Device) (device, error) {
	a := dev.Attr()
	d := device{
		HCAID: a.Name, Transport: "InfiniBand (0)", FWVer: a.FWVersion,
		NodeGUID: formatGUID(a.NodeGUID), SysImageGUID: formatGUID(a.SysImageGUID),
		VendorID: a.VendorID, VendorPartID: a.VendorPartID, HWVer: a.HWVersion, PhysPortCnt: a.PhysPortCnt,
		Caps: capNames(a.Caps), AtomicCap: a.AtomicCap.String(),
		Links: nonNil(a.Links), Offloads: nonNil(a.Offloads),
		MemoryLock: a.MemoryLock.String(), StalePinned: a.StalePinnedRange,
		DMABuf: a.DMABuf, Exporters: exporters("/dev"),
		Limits: []limit{
			{"max_mr_size", a.MaxMRSize}, {"page_size_cap", a.PageSizeCap},
			{"max_qp", num(a.MaxQP)}, {"max_qp_wr", num(a.MaxQPWR)}, {"max_sge", num(a.MaxSGE)}, {"max_sge_rd", num(a.MaxSGERd)},
			{"max_inline_data", num(a.MaxInlineData)}, {"max_cq", num(a.MaxCQ)}, {"max_cqe", num(a.MaxCQE)},
			{"max_mr", num(a.MaxMR)}, {"max_mw", num(a.MaxMW)}, {"max_pd", num(a.MaxPD)}, {"max_qp_rd_atom", num(a.MaxQPRDAtom)},
			{"max_res_rd_atom", num(a.MaxResRDAtom)}, {"max_qp_init_rd_atom", num(a.MaxQPInitRDAtom)}, {"max_ah", num(a.MaxAH)},
			{"max_srq", num(a.MaxSRQ)}, {"max_srq_wr", num(a.MaxSRQWR)}, {"max_srq_sge", num(a.MaxSRQSGE)},
			{"max_mcast_grp", num(a.MaxMcastGrp)}, {"max_mcast_qp_attach", num(a.MaxMcastQPAttach)},
			{"max_total_mcast_qp_attach", num(a.MaxTotalMcastQPAttach)},
			{"max_pkeys", num(a.MaxPKeys)}, {"local_ca_ack_delay", num(a.LocalCAAckDelay)},
			{"max_dm_size", a.MaxDMSize},
		},
		Max: make(map[string]uint64),
	}
	for _, l := range d.Limits {
		d.Max[l.name] = l.value
	}
	paging, err := dev.QueryODPCaps()
	if err != nil {
		return d, err
	}
	d.ODP = describeODP(&paging)
	for n := 1; n <= a.PhysPortCnt; n++ {
		p, err := dev.Port(n)
		if err != nil {
			return d, err
		}
		d.Ports = append(d.Ports, port{
			Port: n, State: p.State.String(), StateNumber: int(p.State),
			MaxMTU: p.MaxMTU.Bytes(), ActiveMTU: p.ActiveMTU.Bytes(), maxMTUCode: int(p.MaxMTU), activeCode: int(p.ActiveMTU),
			LinkLayer: p.LinkLayer, Interface: p.Interface, MaxMsgSize: p.MaxMsgSize,
			BadPKeyCntr: p.BadPKeyCntr, QKeyViolCntr: p.QKeyViolCntr,
			PKeyTblLen: p.PKeyTableLen, GIDTblLen: p.GIDTableLen, physState: physState(p.State), GIDs: gidStrings(dev.GIDs()),
		})
	}
	return d, nil
}

// exporters returns what dma-bufs can come from here that need no hardware: package dmabuf, the device's own
// memory, and devices of the kernel that this user may open.
func exporters(dev string) []string {
	names := []string{"verbena", "device_memory"}
	paths, _ := filepath.Glob(filepath.Join(dev, "dma_heap", "*")) // the pattern is good
	for _, path := range append([]string{filepath.Join(dev, "udmabuf")}, paths...) {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		_ = f.Close()                      // it was only opened
		name, _ := filepath.Rel(dev, path) // it is below
		names = append(names, name)
	}
	return names
}

// describeODP uses the names of ibv_devinfo.
func describeODP(c *verbs.ODPCaps) odp {
	operations := func(caps verbs.ODPTransportCaps) []string {
		names := []string{}
		for _, n := range caps.Names() {
			if n == "srq-recv" {
				n = "srq" // its name there
			}
			names = append(names, "SUPPORT_"+strings.ToUpper(strings.ReplaceAll(n, "-", "_")))
		}
		return names
	}
	o := odp{General: []string{}, RC: operations(c.RC), UC: operations(c.UC), UD: operations(c.UD), XRC: operations(c.XRC),
		Notifier: c.Notifier, Scan: c.Scan, Mappings: c.Mappings, Fetch: c.Fetch}
	if c.Supported {
		o.General = append(o.General, "ODP_SUPPORT")
	}
	if c.Implicit {
		o.General = append(o.General, "ODP_SUPPORT_IMPLICIT")
	}
	return o
}

// num converts a limit, which is never negative.
func num(n int) uint64 { return uint64(max(n, 0)) }

// nonNil makes an empty list appear as [] in JSON.
func nonNil(s []string) []string { return append([]string{}, s...) }

func gidStrings(gids []verbs.GID) []string {
	s := make([]string, len(gids))
	for i, g := range gids {
		s[i] = g.String()
	}
	return s
}

// formatGUID writes a GUID in four groups, as ibv_devinfo does.
func formatGUID(g uint64) string {
	return fmt.Sprintf("%04x:%04x:%04x:%04x", g>>48, g>>32&0xffff, g>>16&0xffff, g&0xffff)
}

func capNames(caps verbs.DeviceCap) []string {
	names := []string{}
	for _, c := range []struct {
		bit  verbs.DeviceCap
		name string
	}{
		{verbs.CapSRQResize, "SRQ_RESIZE"}, {verbs.CapRCRNRNak, "RC_RNR_NAK_GEN"},
		{verbs.CapBadPKeyCntr, "BAD_PKEY_CNTR"}, {verbs.CapBadQKeyCntr, "BAD_QKEY_CNTR"},
		{verbs.CapCurrQPState, "CURR_QP_STATE_MOD"}, {verbs.CapPortActiveEvent, "PORT_ACTIVE_EVENT"},
		{verbs.CapSysImageGUID, "SYS_IMAGE_GUID"}, {verbs.CapUDIPCsum, "UD_IP_CSUM"},
		{verbs.CapMemMgtExtensions, "MEM_MGT_EXTENSIONS"}, {verbs.CapXRC, "XRC"}, {verbs.CapAtomicWrite, "ATOMIC_WRITE"},
		{verbs.CapMemWindow, "MEM_WINDOW"}, {verbs.CapMemWindowType2B, "MEM_WINDOW_TYPE_2B"},
		{verbs.CapFlushGlobal, "FLUSH_GLOBAL"}, {verbs.CapFlushPersistent, "FLUSH_PERSISTENT"},
	} {
		if caps&c.bit != 0 {
			names = append(names, c.name)
		}
	}
	return names
}

// printDevices writes devices as ibv_devinfo does: a key, a colon, a value, in
// columns; -v adds the limits.
func printDevices(w io.Writer, devices []device, verbose bool) {
	for i, d := range devices {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "hca_id: %s\n", d.HCAID)
		line := func(key, format string, args ...any) {
			fmt.Fprintf(w, "    %-24s %s\n", key+":", fmt.Sprintf(format, args...))
		}
		line("transport", "%s", d.Transport)
		line("fw_ver", "%s", d.FWVer)
		line("node_guid", "%s", d.NodeGUID)
		line("sys_image_guid", "%s", d.SysImageGUID)
		line("vendor_id", "%#06x", d.VendorID)
		line("vendor_part_id", "%d", d.VendorPartID)
		line("hw_ver", "%#x", d.HWVer)
		line("phys_port_cnt", "%d", d.PhysPortCnt)
		if verbose {
			for _, l := range d.Limits {
				if l.name == "max_mr_size" || l.name == "page_size_cap" {
					line(l.name, "%#x", l.value)
				} else {
					line(l.name, "%d", l.value)
				}
			}
			line("device_cap_flags", "%s", orNone(d.Caps))
			line("atomic_cap", "%s", d.AtomicCap)
			line("general_odp_caps", "%s", orNone(d.ODP.General))
			line("rc_odp_caps", "%s", orNone(d.ODP.RC))
			line("uc_odp_caps", "%s", orNone(d.ODP.UC))
			line("ud_odp_caps", "%s", orNone(d.ODP.UD))
			line("xrc_odp_caps", "%s", orNone(d.ODP.XRC))
		}
		line("links", "%s", orNone(d.Links))
		line("offloads", "%s", orNone(d.Offloads))
		line("memory_lock", "%s", d.MemoryLock)
		line("stale_pinned_range", "%s", d.StalePinned)
		line("dmabuf", "%s", d.DMABuf)
		line("dmabuf_exporters", "%s", orNone(d.Exporters))
		line("odp_notifier", "%s", d.ODP.Notifier)
		line("odp_scan", "%s", d.ODP.Scan)
		line("odp_mappings", "%s", d.ODP.Mappings)
		line("odp_fetch", "%s", d.ODP.Fetch)
		if d.Note != "" {
			line("note", "%s", d.Note)
		}
		for _, p := range d.Ports {
			printPort(w, p, verbose)
		}
	}
}

func printPort(w io.Writer, p port, verbose bool) {
	fmt.Fprintf(w, "        port: %d\n", p.Port)
	line := func(key, format string, args ...any) {
		fmt.Fprintf(w, "            %-16s %s\n", key+":", fmt.Sprintf(format, args...))
	}
	line("state", "%s (%d)", p.State, p.StateNumber)
	line("max_mtu", "%d (%d)", p.MaxMTU, p.maxMTUCode)
	line("active_mtu", "%d (%d)", p.ActiveMTU, p.activeCode)
	for _, key := range []string{"sm_lid", "port_lid", "port_lmc"} {
		line(key, "0") // RoCE has neither LIDs nor a subnet manager
	}
	line("link_layer", "%s", p.LinkLayer)
	line("interface", "%s", p.Interface)
	if verbose {
		line("max_msg_sz", "%#x", p.MaxMsgSize)
		line("bad_pkey_cntr", "%#x", p.BadPKeyCntr)
		line("qkey_viol_cntr", "%#x", p.QKeyViolCntr)
		line("pkey_tbl_len", "%d", p.PKeyTblLen)
		line("gid_tbl_len", "%d", p.GIDTblLen)
		line("phys_state", "%s", p.physState)
	}
	for i, g := range p.GIDs {
		line(fmt.Sprintf("GID[%3d]", i), "%s, RoCE v2", g)
	}
}

func orNone(s []string) string {
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, " ")
}
