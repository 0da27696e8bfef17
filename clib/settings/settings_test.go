package settings

import (
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func from(env map[string]string) func(string) string {
	return func(name string) string { return env[name] }
}

func TestParse(t *testing.T) {
	none, err := Parse(from(nil), 1)
	if err != nil || none.Addrs != nil || none.Devices != nil || none.Link != "" || none.Lock != "off" || none.Identity != "verbena" || none.Log || len(none.CUDA) != 0 || none.GPU != (GPU{1, 1 << 30, 0}) {
		t.Errorf("without variables: %+v, %v", none, err)
	}
	s, err := Parse(from(map[string]string{
		"VERBENA_ADDR": " 127.0.0.1 , ::1 ;::ffff:10.0.0.1;", "VERBENA_DEVICES": "eth0,,verbena3", "VERBENA_NAME": "mlx5_", "VERBENA_LINK": "udp", "VERBENA_LOCK": "strict",
		"VERBENA_WINDOW": "7", "VERBENA_RECEIVERS": "3", "VERBENA_LIMITS": "qp=3,srq_wr=9", "VERBENA_HIDE": "odp,xrc", "VERBENA_CUDA": "driver, peermem", "VERBENA_IDENTITY": "mlx5", "VERBENA_DMABUF": "pinned",
		"VERBENA_PCAP": "/tmp/%p.pcap", "VERBENA_STATS": "stderr", "VERBENA_LOG": "1", "VERBENA_GPU": "count=3,vram=2G,bar=256M",
	}), 42)
	if err != nil {
		t.Fatal(err)
	}
	a := netip.MustParseAddr
	want := &Settings{Addrs: [][]netip.Addr{{a("127.0.0.1"), a("::1")}, {a("10.0.0.1")}}, Devices: []string{"eth0", "verbena3"}, Name: "mlx5_", Link: "udp",
		Lock: "strict", Window: 7, Receivers: 3, Limits: map[string]int{"qp": 3, "srq_wr": 9}, Hide: map[string]bool{"odp": true, "xrc": true}, CUDA: map[string]bool{"driver": true, "peermem": true},
		DMABuf: "pinned", Identity: "mlx5", PCAP: "/tmp/42.pcap", Stats: "stderr", Log: true, GPU: GPU{Count: 3, VRAM: 2 << 30, BAR: 256 << 20}}
	if !reflect.DeepEqual(s, want) {
		t.Errorf("%+v\nis not %+v", s, want)
	}
}

// A wrong value is reported with its variable; the other variables are read all the same.
func TestParseWrong(t *testing.T) {
	for name, value := range map[string]string{"VERBENA_ADDR": "10.0.0", "VERBENA_LINK": "tcp", "VERBENA_LOCK": "yes", "VERBENA_DMABUF": "moving", "VERBENA_DMABUF_STORM": "often", "VERBENA_DRM": "nouveau", "VERBENA_WINDOW": "0", "VERBENA_RECEIVERS": "9",
		"VERBENA_LIMITS": "qp=0", "VERBENA_HIDE": "everything", "VERBENA_CUDA": "peermem,on", "VERBENA_IDENTITY": "efa", "VERBENA_DM_SIZE": "1T", "VERBENA_GPU": "bar=3M", "VERBENA_NAME": "a/b", "VERBENA_SCATTER_TO_CQE": "yes", "VERBENA_PCI": "0000:1b:00.0,1b:00.0"} {
		s, err := Parse(from(map[string]string{name: value, "VERBENA_LOG": "1"}), 1)
		if err == nil || !strings.Contains(err.Error(), name) || !s.Log || s.Lock != "off" || s.Addrs != nil || s.Window != 0 {
			t.Errorf("%s=%s: %+v, %v", name, value, s, err)
		}
	}
}

// Addresses of PCI devices, as the kernel and NVIDIA's tools print them.
func TestPCI(t *testing.T) {
	for value, want := range map[string]bool{"0000:1b:00.0": true, "00000000:1B:1f.7": true, "0000:1b:00.0, 10000:e1:00.1": true, "": true,
		"1b:00.0": false, "0000:1b:00": false, "0000:1b:00.8": false, "0000:1b:20.0": false, "0000:1b:00.0;0000:1c:00.0": false, "/sys": false, "0000:1b:00.0/..": false} {
		if _, err := Parse(from(map[string]string{"VERBENA_PCI": value}), 1); (err == nil) != want {
			t.Errorf("%s: %v", value, err)
		}
	}
}

// The values of a storm are those that package dmabuf understands.
func TestStorm(t *testing.T) {
	for value, want := range map[string]bool{"1,100": true, "18446744073709551615,100000,1": true, "0x1f,1": true,
		"1": false, "1,0": false, "1,100001": false, "18446744073709551616,1": false, "-1,1": false, "1,1,0": false, "1,1,1,1": false, "1,x": false} {
		if _, err := Parse(from(map[string]string{"VERBENA_DMABUF_STORM": value}), 1); (err == nil) != want {
			t.Errorf("%s: %v", value, err)
		}
	}
}

// Every variable that is read is in the table, and every one in the table is read.
func TestVars(t *testing.T) {
	read := map[string]bool{"VERBENA_BACKEND": true, "VERBENA_WATCHER": true, "VERBENA_PEER_MEM": true} // by the C front and the device
	if _, err := Parse(func(name string) string { read[name] = true; return "" }, 1); err != nil {
		t.Fatal(err)
	}
	for _, v := range Vars {
		if !read[v.Name] {
			t.Errorf("nothing reads %s", v.Name)
		}
		delete(read, v.Name)
		if v.Help == "" || v.Default == "" {
			t.Errorf("%s is not explained", v.Name)
		}
	}
	for name := range read {
		t.Errorf("%s is not in the table", name)
	}
}

// Whatever the device and the library read from the environment is in the table.
func TestAllVarsListed(t *testing.T) {
	known := map[string]bool{}
	for _, v := range Vars {
		known[v.Name] = true
	}
	name := regexp.MustCompile(`"(VERBENA_[A-Z_]+)"`)
	found := 0
	for _, pattern := range []string{"../../internal/device/*.go", "../../internal/link/*.go", "../../internal/mem/*.go", "../../internal/host/*.go",
		"../../internal/shm/*.go", "../backend/*.go", "../front/*.c", "../files/*.c"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", pattern, len(files), err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range name.FindAllStringSubmatch(string(text), -1) {
				if found++; !known[m[1]] && !strings.HasSuffix(file, "_test.go") {
					t.Errorf("%s reads %s, which the table has not", file, m[1])
				}
			}
		}
	}
	if found == 0 {
		t.Error("no variable is read anywhere")
	}
}
