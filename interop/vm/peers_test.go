package vm

import (
	"os"
	"path/filepath"
	"testing"
)

// What a controller has used is told apart by address and by time.
func TestPeerUses(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(peerRange, `{"Start":4096000,"Size":8192}`) // 0x3e8000 to 0x3ea000
	write(peerTrace, `pci_nvme_map_addr addr 0x1 len 7
pci_nvme_io_cmd cid 1 nsid 0x2 sqid 1 opc 0x2 opname 'NVME_NVM_CMD_READ'
pci_nvme_map_addr addr 0x3ea000 len 512
12@34.56:pci_nvme_map_addr addr 0x3e8000 len 4096
pci_nvme_map_addr addr 0x3e9fff len 1
pci_nvme_io_cmd cid 1 nsid 0x3 sqid 1 opc 0x1 opname 'NVME_NVM_CMD_WRITE'
pci_nvme_map_addr addr 0x100000000 len 4096
pci_nvme_io_cmd cid 1 nsid 0x2 sqid 1 opc 0x1 opname 'NVME_NVM_CMD_WRITE'
pci_nvme_map_addr addr 0x3e7000 len 2
pci_nvme_io_cmd cid 1 nsid 0xffffffff sqid 1 opc 0x0 opname 'NVME_NVM_CMD_FLUSH'
pci_nvme_map_addr addr 0x3e7000 len 2
`)
	used, err := PeerUses(dir)
	if err != nil {
		t.Fatal(err)
	}
	for number, want := range map[int]PeerUse{PeerCMB: {}, PeerNear: {Memory: 4097, Before: 512, After: 2}, PeerFar: {Before: 4096}} {
		if *used[number] != want {
			t.Errorf("controller %d: %+v, should be %+v", number, *used[number], want)
		}
	}
	for _, bad := range []string{"", "{"} {
		write(peerRange, bad)
		if _, err := PeerUses(dir); err == nil {
			t.Errorf("%q is no range", bad)
		}
	}
}
