package main

// Starting the process that tells peers when a program has died.

import (
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
)

// watcherVar names the watcher's socket to the program; "off" starts none.
const watcherVar = "VERBENA_WATCHER"

// hasWatcher reports whether there is a watcher of this name, or none is wanted. One that another exec has
// started may have ended since, with its program.
func hasWatcher(name string) bool {
	switch name {
	case "":
		return false
	case "off":
		return true
	}
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: name, Net: "unixpacket"})
	if err != nil {
		return false
	}
	_ = c.Close() // nothing was sent
	return true
}

// startWatcher starts a watcher for this process, which becomes the program, and returns the name of
// its socket. The watcher is in a session of its own, and no child of this process.
func startWatcher(dir string) (name string, err error) {
	name = "@verbena-watcher-" + rand.Text()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: name, Net: "unixpacket"})
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }() // the watcher has it
	socket, err := l.File()
	if err != nil {
		return "", err
	}
	defer func() { _ = socket.Close() }()
	self, err := sys.OwnPidfd()
	if err != nil {
		return "", err
	}
	defer func() { _ = self.Close() }()
	cmd := exec.Command(filepath.Join(dir, "verbena-watcher"), "start")
	cmd.ExtraFiles = []*os.File{socket, self}
	cmd.Dir, cmd.Env = "/", []string{}
	sys.OwnSession(cmd)
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w", cmd.Path, err)
	}
	return name, nil
}
