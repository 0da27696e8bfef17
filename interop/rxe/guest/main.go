// Command guest runs in the virtual machine of the kernel tests. It has two network
// namespaces, puts Linux's soft RoCE device (rxe) at one end of a pair of interfaces and
// ours at the other, and runs cases between them.
//
// Stages:
//
//  1. The machine's init starts it. It makes the network (network.go) and starts itself
//     again in our namespace, as "drive".
//  2. drive reads the order from the shared directory and runs its cases, one after the
//     other (drive.go), or compares speeds (speed.go).
//  3. A case (the files cases_*.go, listed in table.go) brings two parties
//     together: ours.go and kernel.go behind the interface in party.go.
//  4. Each result is a line in the shared directory; a failed case leaves its
//     packets there.
//
// "victim" is a peer that exists to be killed (victim.go), "holder" one with memory of a PCI device (cases_p2pmem.go).
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
)

// Where things are in the guest.
const (
	share      = "/share"
	kverbsPath = "/tmp/kverbs"
	cmPeer     = "/tmp/cmpeer"
	udpFloor   = "/tmp/udpfloor"
	regFD      = "/tmp/regfd"
	wholeDir   = "/tmp/whole"
	verbena    = "/tmp/verbena"
	library    = "/tmp/lib" // where verbena looks for it
	scratch    = "/tmp/scratch"
)

func main() {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
	}
	var err error
	switch role {
	case "":
		err = setup()
	case "drive":
		err = drive()
	case "holder":
		err = hold()
	case "victim":
		err = victim(os.Args[2:])
	default:
		err = fmt.Errorf("unknown role %q", role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
		if role == "" || role == "drive" {
			if err := report(result.Line{Fatal: err.Error()}); err != nil {
				fmt.Fprintln(os.Stderr, "guest: this error cannot be reported to the host:", err)
			}
		}
		os.Exit(1)
	}
}

// setup makes the network, and starts "drive" in our namespace.
func setup() error {
	if err := os.MkdirAll(scratch, 0o755); err != nil {
		return err
	}
	for name, to := range map[string]string{"kverbs": kverbsPath, "cmpeer": cmPeer, "udpfloor": udpFloor, "regfd": regFD, "verbena": verbena} {
		if err := copyFile(filepath.Join(share, name), to); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(library, 0o755); err != nil {
		return err
	}
	for _, name := range result.Library {
		if err := copyFile(filepath.Join(share, name), filepath.Join(library, name)); err != nil {
			return err
		}
	}
	if err := os.CopyFS(wholeDir, os.DirFS(filepath.Join(share, result.WholeDir))); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := makeNetwork(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return passThrough("ip", "netns", "exec", oursNS, self, "drive")
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o755)
}

// readOrder reads the host's order.
func readOrder() (*result.Order, error) {
	b, err := os.ReadFile(filepath.Join(share, result.OrderFile))
	if err != nil {
		return nil, err
	}
	o := new(result.Order)
	return o, json.Unmarshal(b, o)
}

// report adds a line to the results.
func report(l result.Line) error {
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(share, "results.jsonl"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	return errors.Join(err, f.Close())
}
