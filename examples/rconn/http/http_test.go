package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Bodies of many sizes go there and come back, by several requests at a time.
func TestBodies(t *testing.T) {
	l, err := listen(t.Context(), "127.77.35.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		if _, err := io.Copy(h, r.Body); err != nil {
			t.Error(err)
		}
		fmt.Fprintf(w, "%x", h.Sum(nil))
	})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	client := newClient()
	client.Timeout = time.Minute
	var all sync.WaitGroup
	for i, size := range []int{0, 1, 4095, 256 << 10, 256<<10 + 1, 3 << 20} {
		all.Go(func() {
			body := bytes.Repeat([]byte{byte(i), 1, 2}, size/3+1)[:size]
			resp, err := client.Post("http://"+l.Addr().String(), "application/octet-stream", bytes.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			got, err := io.ReadAll(resp.Body)
			if want := fmt.Sprintf("%x", sha256.Sum256(body)); err != nil || string(got) != want {
				t.Errorf("%d bytes: %s, %v; want %s", size, got, err, want)
			}
			if err := resp.Body.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	client.CloseIdleConnections()
	if err := server.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-served; err != http.ErrServerClosed {
		t.Error(err)
	}
}

func TestProgram(*testing.T) { main() } // it ends the process with an error if something fails
