package perf

import (
	"context"
	"errors"
	"net"

	"github.com/verbena-rdma/verbena/verbs"
)

// Local measures between two devices of this process, as Initiate does.
func Local(ctx context.Context, initiator, target *verbs.Device, p Params, notify func(stage string)) (*Result, error) {
	here, there := net.Pipe()
	served := make(chan error, 1)
	go func() {
		side := NewSideChannel(ctx, there)
		_, err := Serve(target, side)
		served <- errors.Join(err, side.Close())
	}()
	side := NewSideChannel(ctx, here)
	res, err := Initiate(initiator, side, p, notify)
	err = errors.Join(err, side.Close())
	// If the target failed first, the initiator's error is only that its peer is gone:
	// the target's error is the cause.
	if targetErr := <-served; err == nil || targetErr != nil && errors.Is(err, ErrPeerGone) {
		err = targetErr
	}
	return res, err
}
