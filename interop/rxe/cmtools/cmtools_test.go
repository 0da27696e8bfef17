package cmtools

// Both sides are this package, on two devices of one process.

import (
	"context"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens a device, which is closed at the end.
func open(t *testing.T) *verbs.Device {
	t.Helper()
	dev, err := verbs.Open("", &verbs.Config{Link: verbs.LinkUDP})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Errorf("objects are left on the device: %v", err)
		}
	})
	return dev
}

// Each server serves its own client. With programs of others they meet in the virtual machine.
func TestPrograms(t *testing.T) {
	type side = func(context.Context, *Meeting) error
	for name, tt := range map[string]struct {
		server, client side
		port           string
		count, size    int
	}{
		"rping":        {RpingServer, RpingClient, RpingPort, 10, 0},
		"rping/long":   {RpingServer, RpingClient, RpingPort, 3, 60_000},
		"ucmatose":     {UcmatoseServer, UcmatoseClient, UcmatosePort, 5, 0},
		"udaddy":       {UdaddyServer, UdaddyClient, UdaddyPort, 1, 0},
		"rdma_client":  {RdmaServer, RdmaClientLeaves, RdmaServerPort, 1, 0},
		"rdma_server":  {RdmaServerLeaves, RdmaClient, RdmaServerPort, 1, 0},
		"cmtime":       {CmtimeServer, CmtimeClient, CmtimePort, 20, 0},
		"cmtime/alone": {CmtimeServer, CmtimeClient, CmtimePort, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			there, here := open(t), open(t)
			at := there.Addr().String() + ":" + tt.port
			served := make(chan error, 1)
			go func() {
				err := tt.server(ctx, &Meeting{Device: there, Addr: at, Count: tt.count, Size: tt.size})
				if err != nil {
					cancel() // the client would wait
				}
				served <- err
			}()
			// The client may come before the server listens.
			err := tt.client(ctx, &Meeting{Device: here, Addr: at, Count: tt.count, Size: tt.size})
			if err != nil {
				t.Error("client:", err)
				cancel()
			}
			if err := <-served; err != nil {
				t.Error("server:", err)
			}
		})
	}
}

// Data that the client did not announce is noticed.
func TestOtherSize(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	there, here := open(t), open(t)
	at := there.Addr().String() + ":" + RpingPort
	served := make(chan error, 1)
	go func() { served <- RpingServer(ctx, &Meeting{Device: there, Addr: at, Size: 100}) }()
	if err := RpingClient(ctx, &Meeting{Device: here, Addr: at, Size: 200}); err == nil {
		t.Error("the client has not noticed that the server has left")
	}
	if err := <-served; err == nil {
		t.Error("the server takes data of another size")
	}
}
