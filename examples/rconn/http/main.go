// Command http is a server of net/http and a client of it over RDMA, in one process. Beside what net/http wants anyway, each
// has one line that is about RDMA.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/verbena-rdma/verbena/rconn"
)

// listen is where the server differs: rconn.Listen instead of net.Listen.
func listen(ctx context.Context, address string) (net.Listener, error) {
	return rconn.Listen(ctx, address, nil)
}

// newClient returns a client that dials by RDMA.
func newClient() *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: (&rconn.Dialer{}).DialContext}}
}

func main() {
	l, err := listen(context.Background(), "127.77.1.1:0")
	check(err)
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "hello, %s", r.URL.Path[1:])
	})}
	served := make(chan error)
	go func() { served <- server.Serve(l) }()

	client := newClient()
	resp, err := client.Get("http://" + l.Addr().String() + "/Alice")
	check(err)
	body, err := io.ReadAll(resp.Body)
	check(err)
	check(resp.Body.Close())
	fmt.Println(resp.Status, string(body))

	client.CloseIdleConnections()
	check(server.Shutdown(context.Background()))
	fmt.Println(<-served)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
