package main

import (
	"fmt"
	"os"
	"time"

	"github.com/verbena-rdma/verbena/internal/benchsuite/internal/child"
)

// peerArg makes a process a peer of the suite instead of the suite.
const peerArg = "benchsuite-peer"

func isPeer(args []string) bool { return len(args) == 2 && args[1] == peerArg }

// peer is a peer process, as this process sees it.
type peer struct{ *child.Peer }

// replyLimit is how long a reply may take: longer than anything a peer does.
const replyLimit = time.Minute

// newPeer starts a peer process. The group stops it.
func (b *bench) newPeer() (*peer, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c, err := child.StartPeer(exe, peerArg)
	if err != nil {
		return nil, err
	}
	b.later(c.Stop)
	return &peer{c}, nil
}

func (p *peer) call(q request) (reply, error) {
	var r reply
	if err := p.Call(q, &r, replyLimit); err != nil {
		return r, fmt.Errorf("peer process, %s: %w", q.Op, err)
	}
	if r.Err != "" {
		return r, fmt.Errorf("peer process, %s: %s", q.Op, r.Err)
	}
	return r, nil
}
