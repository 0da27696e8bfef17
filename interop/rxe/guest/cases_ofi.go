package main

// libfabric, of Debian trixie: on our side it registers a dma-buf of the kernel (FI_MR_DMABUF), on the kernel's
// side ordinary memory. The programs (interop/programs/testdata/ofi.c) read, write, send and receive, and
// compare every byte.

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
)

func libfabric() []*testCase {
	return onlyV4(everyWay(testCase{name: "ofi/dmabuf/udmabuf"}, (*scene).libfabric)) // the program takes no other address
}

func (s *scene) libfabric() error {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	program := func(libraries, role, memory string) []string {
		return []string{filepath.Join(ofiDir, result.Loader), "--library-path", libraries, filepath.Join(ofiDir, "ofi"), role, s.serverAddr().String(), memory}
	}
	ours := func(role string) []string {
		// libfabric 2.1 has dma-bufs on devices of this name only.
		return append([]string{"env", "VERBENA_NAME=mlx5_", verbena, "exec", "--log", "--addr", families[s.family].ours.String(), "--"},
			program(library+":"+ofiDir, role, "udmabuf")...)
	}
	kernels := func(role string) []string { return inKernelNS(program(ofiDir, role, "plain")...) }
	serve, connect := ours("server"), kernels("client")
	if s.weInit {
		serve, connect = kernels("server"), ours("client")
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
