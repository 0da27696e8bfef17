package main

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestDevinfoText(t *testing.T) {
	short := succeed(t, "devinfo", "127.77.0.200").stdout
	for _, want := range []string{
		`(?m)^hca_id: \S+$`,
		`(?m)^    transport: +InfiniBand \(0\)$`,
		`(?m)^    fw_ver: +\S+$`,
		`(?m)^    node_guid: +([0-9a-f]{4}:){3}[0-9a-f]{4}$`,
		`(?m)^    sys_image_guid: +([0-9a-f]{4}:){3}[0-9a-f]{4}$`,
		`(?m)^    vendor_id: +0x[0-9a-f]{6}$`,
		`(?m)^    phys_port_cnt: +1$`,
		`(?m)^    links: +loop local udp$`,
		`(?m)^    offloads: +\S`,
		`(?m)^    memory_lock: +\S`,
		`(?m)^    stale_pinned_range: +\S`,
		`(?m)^    dmabuf: +dynamic$`,
		`(?m)^    dmabuf_exporters: +verbena device_memory\b`,
		`(?m)^    odp_notifier: +\S`,
		`(?m)^    odp_scan: +(PAGEMAP_SCAN|pagemap)$`,
		`(?m)^    odp_mappings: +(PROCMAP_QUERY|maps)$`,
		`(?m)^    odp_fetch: +(MADV_POPULATE|touch)$`,
		`(?m)^        port: 1$`,
		`(?m)^            state: +PORT_ACTIVE \(4\)$`,
		`(?m)^            max_mtu: +4096 \(5\)$`,
		`(?m)^            active_mtu: +(256|512|1024|2048|4096) \([1-5]\)$`,
		`(?m)^            link_layer: +Ethernet$`,
		`(?m)^            GID\[  0\]: +::ffff:127\.77\.0\.200, RoCE v2$`,
	} {
		if !regexp.MustCompile(want).MatchString(short) {
			t.Errorf("no line like %s in\n%s", want, short)
		}
	}
	if strings.Contains(short, "max_qp") {
		t.Error("limits are shown without -v")
	}
	verbose := succeed(t, "devinfo", "-v", "127.77.0.200").stdout
	for _, want := range []string{"max_mr_size", "page_size_cap", "max_qp", "max_qp_wr", "device_cap_flags", "max_sge", "max_cq",
		"max_cqe", "max_mr", "max_mw", "max_pd", "max_qp_rd_atom", "max_qp_init_rd_atom", "atomic_cap", "max_ah", "max_srq", "max_srq_wr",
		"max_srq_sge", "max_pkeys", "local_ca_ack_delay", "max_msg_sz", "bad_pkey_cntr", "qkey_viol_cntr", "pkey_tbl_len", "gid_tbl_len"} {
		if !regexp.MustCompile(`(?m)^ +` + want + `: +\S+`).MatchString(verbose) {
			t.Errorf("no line %s in\n%s", want, verbose)
		}
	}
	const reliable = "SUPPORT_SEND SUPPORT_RECV SUPPORT_WRITE SUPPORT_READ SUPPORT_ATOMIC SUPPORT_SRQ SUPPORT_FLUSH SUPPORT_ATOMIC_WRITE"
	for key, caps := range map[string]string{
		"general_odp_caps": "ODP_SUPPORT ODP_SUPPORT_IMPLICIT", "rc_odp_caps": reliable, "xrc_odp_caps": reliable,
		"uc_odp_caps": "SUPPORT_SEND SUPPORT_RECV SUPPORT_WRITE", "ud_odp_caps": "SUPPORT_SEND SUPPORT_RECV SUPPORT_SRQ",
	} {
		if !regexp.MustCompile(`(?m)^    ` + key + `: +` + caps + `$`).MatchString(verbose) {
			t.Errorf("%s is not %s in\n%s", key, caps, verbose)
		}
	}
}

// The exporters are those whose files the user can open.
func TestExporters(t *testing.T) {
	dev := t.TempDir()
	if got := exporters(dev); !slices.Equal(got, []string{"verbena", "device_memory"}) {
		t.Errorf("without devices of the kernel: %q", got)
	}
	if err := os.Mkdir(filepath.Join(dev, "dma_heap"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"udmabuf", "dma_heap/system", "dma_heap/reserved"} {
		if err := os.WriteFile(filepath.Join(dev, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("nowhere", filepath.Join(dev, "dma_heap", "gone")); err != nil {
		t.Fatal(err)
	}
	if got := exporters(dev); !slices.Equal(got, []string{"verbena", "device_memory", "udmabuf", "dma_heap/reserved", "dma_heap/system"}) {
		t.Errorf("with some: %q", got)
	}
}

// A capture of a device that nobody sends to is a good file without packets.
func TestDevinfoPCAP(t *testing.T) {
	file := filepath.Join(t.TempDir(), "devinfo.pcapng")
	succeed(t, "devinfo", "127.77.0.201", "--pcap", file)
	if out := tshark(t, file); out != "" {
		t.Errorf("packets:\n%s", out)
	}
}

// Without a name all devices are shown: the loopback interface is always one.
func TestDevinfoJSON(t *testing.T) {
	var devices []device
	if err := json.Unmarshal([]byte(succeed(t, "devinfo", "--json").stdout), &devices); err != nil {
		t.Fatal(err)
	}
	loopback := slices.IndexFunc(devices, func(d device) bool { return d.Ports[0].Interface == "lo" })
	if loopback < 0 {
		t.Fatalf("no device on lo: %+v", devices)
	}
	d := devices[loopback]
	if !slices.Contains(d.Ports[0].GIDs, netip.MustParseAddr("::ffff:127.0.0.1").String()) {
		t.Errorf("its GIDs are %v", d.Ports[0].GIDs)
	}
	if d.Max["max_qp"] == 0 || d.Max["max_mr_size"] == 0 || d.AtomicCap == "" || len(d.Caps) == 0 || !slices.Contains(d.ODP.General, "ODP_SUPPORT") || d.ODP.Notifier == "" {
		t.Errorf("the device is %+v", d)
	}
	// The name that it goes by opens it.
	if out := succeed(t, "devinfo", d.HCAID).stdout; !strings.Contains(out, "hca_id: "+d.HCAID) {
		t.Errorf("devinfo %s shows\n%s", d.HCAID, out)
	}
}
