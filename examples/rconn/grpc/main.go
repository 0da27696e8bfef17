// Command grpc is a server of google.golang.org/grpc and a client of it over RDMA, in one process. The service is gRPC's own
// for health. Beside what gRPC wants anyway, each side has one line that is about RDMA.
package main

import (
	"context"
	"fmt"
	"log"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/verbena-rdma/verbena/rconn"
)

// listen is where the server differs: rconn.Listen instead of net.Listen.
func listen(ctx context.Context, address string) (net.Listener, error) {
	return rconn.Listen(ctx, address, nil)
}

// newClient returns a client that dials by RDMA. The prefix keeps gRPC from resolving the address.
func newClient(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return (&rconn.Dialer{}).DialContext(ctx, "rdma", address)
		}))
}

func main() {
	ctx := context.Background()
	l, err := listen(ctx, "127.77.1.1:0")
	check(err)
	server := grpc.NewServer()
	state := health.NewServer()
	state.SetServingStatus("store", grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(server, state)
	served := make(chan error)
	go func() { served <- server.Serve(l) }()

	conn, err := newClient(l.Addr().String())
	check(err)
	answer, err := grpc_health_v1.NewHealthClient(conn).Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: "store"})
	check(err)
	fmt.Println("store:", answer.GetStatus())

	check(conn.Close())
	server.GracefulStop()
	check(<-served)
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
