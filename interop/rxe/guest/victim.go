package main

// A process of ours that a case kills. The two talk over pipes.

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

const victimBytes = 1 << 20

// victimHello is what the victim tells the case.
type victimHello struct {
	verbs.Endpoint
	Addr uint64
	RKey uint32
}

// victimProcess is a victim, as the case sees it.
type victimProcess struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	hello victimHello
	once  sync.Once
}

func startVictim(addr netip.Addr) (*victimProcess, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	v := &victimProcess{cmd: exec.Command(self, "victim", addr.String())}
	v.cmd.Stderr = os.Stderr
	if v.in, err = v.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := v.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	v.out = bufio.NewReader(out)
	if err := v.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := v.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &v.hello)
	}
	if err != nil {
		v.kill()
	}
	return v, err
}

// connect tells the victim its peer, and waits until it is connected.
func (v *victimProcess) connect(to verbs.Endpoint) error {
	if err := json.NewEncoder(v.in).Encode(to); err != nil {
		return err
	}
	_, err := v.out.ReadBytes('\n')
	return err
}

// kill kills the process; it may be called again.
func (v *victimProcess) kill() {
	v.once.Do(func() {
		_ = v.cmd.Process.Kill() // it may have ended by itself
		_ = v.cmd.Wait()
	})
}

// victim is the main program of the process.
func victim(args []string) error {
	if len(args) != 1 {
		return errors.New("victim: want an address")
	}
	dev, err := verbs.Open(args[0], &verbs.Config{Link: verbs.LinkUDP})
	if err != nil {
		return err
	}
	pd, err := dev.AllocPD()
	if err != nil {
		return err
	}
	cq, err := dev.CreateCQ(16, nil)
	if err != nil {
		return err
	}
	mr, err := pd.RegMR(make([]byte, victimBytes), allRights)
	if err != nil {
		return err
	}
	qp, err := pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1}})
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(victimHello{Endpoint: qp.Endpoint(), Addr: mr.Addr(), RKey: mr.RKey()}); err != nil {
		return err
	}
	var peer verbs.Endpoint
	if err := json.NewDecoder(os.Stdin).Decode(&peer); err != nil {
		return err
	}
	if err := qp.Connect(peer, &verbs.ConnectConfig{MTU: verbs.MTU1024}); err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode("connected"); err != nil {
		return err
	}
	time.Sleep(defaultLimit)
	return errors.New("victim: it was not killed")
}
