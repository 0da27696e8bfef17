package main

// What the kernel's UDP alone costs between two processes that spin: no device that
// lives in a process can answer sooner. It stands beside the two that are compared.

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	floorPort  = 4792
	floorBytes = 52 // of an 8-byte WRITE: headers, payload, checksum
	floorTrips = 5000
	floorLimit = 30 * time.Second
	floorPause = 2 * time.Second
)

// floorLatency is half of the median round trip, in µs.
func floorLatency() (float64, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	out, err := couple(ns(speedNS[0], self, "pong", speedTarget, speedInitiator), ns(speedNS[1], self, "ping", speedInitiator, speedTarget))
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(out, 64)
}

// pingPong is one of the two processes: the pinger prints the figure.
func pingPong(pings bool, own, peer string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	address := func(s string) *unix.SockaddrInet4 {
		return &unix.SockaddrInet4{Port: floorPort, Addr: netip.MustParseAddr(s).As4()}
	}
	if err := unix.Bind(fd, address(own)); err != nil {
		return err
	}
	if err := unix.Connect(fd, address(peer)); err != nil {
		return err
	}
	if pings {
		return ping(fd)
	}
	return pong(fd)
}

// ping sends and waits, and prints the figure.
func ping(fd int) error {
	var b [floorBytes]byte
	for deadline := time.Now().Add(floorLimit); ; { // until the other side is up
		_, _ = unix.Write(fd, b[:]) // it may be refused yet
		if spin(fd, b[:], floorPause) == nil {
			break
		}
		if time.Now().After(deadline) {
			return errors.New("the other side is not there")
		}
	}
	var took []time.Duration
	for range floorTrips {
		start := time.Now()
		if _, err := unix.Write(fd, b[:]); err != nil {
			return err
		}
		if err := spin(fd, b[:], floorLimit); err != nil {
			return err
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	fmt.Print(float64(took[len(took)/2]) / 2 / 1e3)
	return nil
}

// pong answers until nothing comes any more.
func pong(fd int) error {
	var b [floorBytes]byte
	if err := spin(fd, b[:], floorLimit); err != nil {
		return err
	}
	for {
		if _, err := unix.Write(fd, b[:]); err != nil {
			return err
		}
		if spin(fd, b[:], floorPause) != nil {
			return nil
		}
	}
}

// spin reads until something comes, for so long.
func spin(fd int, b []byte, patience time.Duration) error {
	end := time.Now().Add(patience)
	for n := 0; ; n++ {
		_, err := unix.Read(fd, b)
		if err == nil || !errors.Is(err, unix.EAGAIN) {
			return err
		}
		if n%1024 == 1023 && time.Now().After(end) {
			return errors.New("the other side does not answer")
		}
	}
}
