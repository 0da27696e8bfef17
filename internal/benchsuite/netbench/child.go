package main

import (
	"fmt"
	"os"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/child"
)

// peerArg makes a process one end of a path.
const peerArg = "netbench-peer"

// peer is such a process, as the judge sees it.
type peer struct{ *child.Peer }

// replyLimit is how long a reply may take: a run, and draining it on a bad path.
const replyLimit = 3 * time.Minute

// newPeer starts a peer process in a namespace.
func newPeer(p *path, end int) (*peer, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := p.in(p.ns[end], exe, peerArg)
	c, err := child.StartPeer(args[0], args[1:]...)
	if err != nil {
		return nil, err
	}
	return &peer{c}, nil
}

func (p *peer) call(q request) (reply, error) {
	var r reply
	if err := p.Call(q, &r, replyLimit+q.For); err != nil {
		return r, fmt.Errorf("peer process, %s: %w", q.Op, err)
	}
	if r.Err != "" {
		return r, fmt.Errorf("peer process, %s: %s", q.Op, r.Err)
	}
	return r, nil
}
