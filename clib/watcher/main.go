// Verbena-watcher is the process that "verbena exec" leaves beside a program. It tells the peers of
// the program's connections when the program dies, as the kernel would, and ends with the program.
//
//	verbena-watcher start    starts "verbena-watcher serve", and ends: so that the program has no child
//	                         that it does not know
//	verbena-watcher serve    watches
//
// Descriptor 3 is a listening socket (unixpacket), by which the program's processes call it, and 4 a
// pidfd of the program that does not block.
package main

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/verbena-rdma/verbena/internal/device"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "verbena-watcher:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	socket, program := os.NewFile(3, "socket"), os.NewFile(4, "program")
	if len(args) != 1 || socket == nil || program == nil {
		return errors.New(`it is started by "verbena exec"`)
	}
	switch args[0] {
	case "start":
		self, err := os.Executable()
		if err != nil {
			return err
		}
		_, err = os.StartProcess(self, []string{os.Args[0], "serve"}, &os.ProcAttr{
			Dir: "/", Env: []string{}, Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, socket, program}})
		return err
	case "serve":
		return serve(socket, program)
	}
	return fmt.Errorf("%q: unknown", args[0])
}

func serve(socket, program *os.File) error {
	l, err := net.FileListener(socket)
	if err != nil {
		return err
	}
	if err := socket.Close(); err != nil {
		return err
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return errors.New("descriptor 3 is not a unix socket")
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = device.AwaitExit(program) // without it the program counts as ended
	}()
	return device.ServeWatcher(u, ended)
}
