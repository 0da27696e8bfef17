package main

// libfabric, of Debian trixie: on our side it registers a dma-buf of the kernel (FI_MR_DMABUF), on the kernel's
// side ordinary memory. The programs (interop/programs/testdata/ofi.c) read, write, send and receive, and
// compare every byte.

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
)

func libfabric() []*testCase {
	rows := onlyV4(everyWay(testCase{name: "ofi/dmabuf/udmabuf"}, func(s *scene) error { return s.libfabric(false) })) // the program takes no other address
	// Two processes of ours, through shared memory: their mappings of the kernel's dma-bufs are none that one could
	// read of the other, or watch.
	return append(rows, &testCase{name: "ofi/dmabuf/udmabuf/local/v4/we", family: "v4", run: func(s *scene) error { return s.libfabric(true) }})
}

func (s *scene) libfabric(local bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	addrs, to := families[s.family], s.serverAddr()
	if local {
		to = addrs.victim
	}
	program := func(libraries, role, memory string) []string {
		return []string{filepath.Join(wholeDir, result.Loader), "--library-path", libraries, filepath.Join(wholeDir, "ofi"), role, to.String(), memory}
	}
	ours := func(role string, at netip.Addr, link string) []string {
		// libfabric 2.1 has dma-bufs on devices of this name only.
		return append([]string{"env", "VERBENA_NAME=mlx5_", "VERBENA_LINK=" + link, verbena, "exec", "--log", "--addr", at.String(), "--"},
			program(library+":"+wholeDir, role, "udmabuf")...)
	}
	kernels := func(role string) []string { return inKernelNS(program(wholeDir, role, "plain")...) }
	serve, connect := ours("server", addrs.ours, "any"), kernels("client")
	switch {
	case local:
		serve, connect = ours("server", addrs.victim, "local"), ours("client", addrs.ours, "local")
	case s.weInit:
		serve, connect = kernels("server"), ours("client", addrs.ours, "any")
	}
	server, err := begin(ctx, serve)
	if err != nil {
		return err
	}
	for !strings.Contains(server.said.String(), "listening\n") {
		select {
		case err := <-server.done:
			return fmt.Errorf("%s: %w\n%s", strings.Join(serve, " "), err, server.said.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
	client, err := begin(ctx, connect)
	if err != nil {
		server.kill()
		return err
	}
	err = <-client.done
	if err != nil {
		server.kill()
	} else {
		err = <-server.done
	}
	for _, r := range []*running{server, client} {
		if said := r.said.String(); err == nil && !strings.HasSuffix(said, "libfabric 2.1\nok\n") {
			err = fmt.Errorf("%s does not end well", strings.Join(r.cmd.Args, " "))
		}
	}
	if err != nil {
		return fmt.Errorf("%w\nthe server said:\n%s\nthe client said:\n%s", err, server.said.String(), client.said.String())
	}
	return nil
}
