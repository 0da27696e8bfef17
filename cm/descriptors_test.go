package cm

import (
	"context"
	"errors"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/verbs"
)

// Without a descriptor for the socket that requests are sent from, a connection fails with EMFILE. The
// request does not count as one that was lost on the way.
func TestDialWithoutDescriptors(t *testing.T) {
	var limit syscall.Rlimit
	check(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	for _, c := range []struct {
		name string
		f    func(ctx context.Context, address string, cfg *Config) error
	}{
		{"Dial", func(ctx context.Context, address string, cfg *Config) error {
			_, err := Dial(ctx, address, cfg)
			return err
		}},
		{"Resolve", func(ctx context.Context, address string, cfg *Config) error {
			_, err := Resolve(ctx, address, cfg)
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := device(t, verbs.LinkUDP)
			to := d.Addr().Next() // of no device: a request that is sent gets no answer
			check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 0, Max: limit.Max}))
			err := c.f(within(t), to.String()+":7", &Config{Device: d})
			check(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit))
			if !errors.Is(err, syscall.EMFILE) {
				t.Errorf("%v, want EMFILE", err)
			}
		})
	}
}
