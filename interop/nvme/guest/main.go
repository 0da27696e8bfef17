// Command guest is the program of the virtual machine: it takes the emulator's NVMe controllers by vfio and puts them
// through package drivertest. Each line of its results is a JSON object.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/driver/drivertest"
	"github.com/verbena-rdma/verbena/nvme/vfio"
)

// Line is a line of the results. One field is set besides Controller.
type Line struct {
	Controller string // its serial number
	Info       *driver.Info
	Part       string // of drivertest.Data
	Err        string // what was wrong with it, or with everything
	Outcomes   []drivertest.Outcome
	Done       bool
}

// Seed is what data is made from.
const seed = 7

func main() {
	f, err := os.OpenFile("/share/results.jsonl", os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	tell := func(l Line) {
		b, err := json.Marshal(l)
		if err == nil {
			_, err = f.Write(append(b, '\n'))
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	list, err := addresses()
	if err != nil {
		tell(Line{Err: err.Error()})
		return
	}
	for _, address := range list {
		if err := try(address, tell); err != nil {
			tell(Line{Err: fmt.Sprintf("%s: %v", address, err)})
			return
		}
	}
	tell(Line{Done: true})
}

// addresses gives the emulator's NVMe controllers to vfio and returns where they are.
func addresses() ([]string, error) {
	const bus = "/sys/bus/pci/drivers/vfio-pci"
	if err := os.WriteFile(bus+"/new_id", []byte("1b36 0010"), 0); err != nil && !errors.Is(err, syscall.EEXIST) {
		return nil, err
	}
	all, err := filepath.Glob(bus + "/0000:*")
	if err != nil {
		return nil, err
	}
	for i := range all {
		all[i] = filepath.Base(all[i])
	}
	if len(all) == 0 {
		return nil, errors.New("no NVMe controller")
	}
	slices.Sort(all)
	return all, nil
}

// try puts a controller through everything.
func try(address string, tell func(Line)) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	dev, err := vfio.Open(address)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	c, err := driver.Open(dev, dev, &driver.Config{MapBAR: dev.MapBAR})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	info := c.Info()
	name := info.Serial
	tell(Line{Controller: name, Info: &info})
	list, err := c.Namespaces(ctx)
	if err != nil {
		return err
	}
	if len(list) != 1 {
		return fmt.Errorf("namespaces %+v", list)
	}
	r := &drivertest.Rig{C: c, DMA: dev, NS: list[0], Seed: seed, QuietResets: true}
	outcomes, err := drivertest.Outcomes(ctx, r)
	if err != nil {
		return err
	}
	tell(Line{Controller: name, Outcomes: outcomes})
	drivertest.Data(ctx, r, func(part string, err error) {
		l := Line{Controller: name, Part: part}
		if err != nil {
			l.Err = strings.TrimSpace(err.Error())
		}
		tell(l)
	})
	return nil
}
