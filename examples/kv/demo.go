package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/examples/kv/store"
	"github.com/verbena-rdma/verbena/verbs"
)

// demo is a server and two clients in this process, each on a device of its own.
func demo() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	path := filepath.Join(dir, "table")

	table := try(store.OpenTable(path, 1)) // one bucket: four keys
	dev := try(verbs.Open("", nil))
	server := try(store.Listen(ctx, dev.Addr().String()+":0", table, dev))
	address := server.Addr()
	alice, bob := try(store.Dial(ctx, address, device())), try(store.Dial(ctx, address, device()))

	fmt.Println("Alice puts colour=green: version", try(alice.Put(ctx, "colour", []byte("green"))))
	value, version, err := bob.Get(ctx, "colour")
	check(err)
	fmt.Printf("Bob gets colour: %q, version %d\n", value, version)
	fmt.Println("Bob puts colour=blue: version", try(bob.Put(ctx, "colour", []byte("blue"))))

	before := server.Requests()
	for range 1000 {
		value, version, err = alice.Get(ctx, "colour")
		check(err)
	}
	fmt.Printf("Alice gets colour a thousand times: %q, version %d; messages to the server: %d\n", value, version, server.Requests()-before)

	_, err = alice.Put(ctx, "colour", []byte(strings.Repeat("x", store.MaxValue+1)))
	fmt.Println("Alice puts a value of 193 bytes:", err)
	for _, key := range []string{"size", "shape", "price", "weight"} {
		_, err = alice.Put(ctx, key, []byte("?"))
	}
	fmt.Println("Alice puts a fifth key into the bucket:", err)
	fmt.Println("Alice deletes size: version", try(alice.Delete(ctx, "size")))
	_, _, err = bob.Get(ctx, "size")
	fmt.Println("Bob gets size:", err)

	// The server ends, and another one takes the file and the address.
	check(server.Close())
	check(table.Close())
	table = try(store.OpenTable(path, 1))
	server = try(store.Listen(ctx, address, table, dev))
	value, version, err = bob.Get(ctx, "colour")
	check(err)
	fmt.Printf("After a restart Bob gets colour: %q, version %d, by connection %d\n", value, version, bob.Connections())

	check(alice.Close())
	check(bob.Close())
	check(server.Close())
	return table.Close()
}

// device opens a device on a free loopback address. It stays open until the program ends.
func device() *verbs.Device { return try(verbs.Open("", nil)) }

// try returns v, or ends the program if err is not nil.
func try[T any](v T, err error) T {
	check(err)
	return v
}
