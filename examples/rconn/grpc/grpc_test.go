package main

import (
	"bytes"
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/verbena-rdma/verbena/rconn"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo is a service that returns what it gets: Once one message, Stream as many as come.
type echo interface {
	once(context.Context, *wrapperspb.BytesValue) (*wrapperspb.BytesValue, error)
}

type echoServer struct{}

// once answers, or for an empty message waits until the client has given up.
func (echoServer) once(ctx context.Context, in *wrapperspb.BytesValue) (*wrapperspb.BytesValue, error) {
	if len(in.Value) == 0 {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return in, nil
}

var service = grpc.ServiceDesc{
	ServiceName: "Echo",
	HandlerType: (*echo)(nil),
	Methods: []grpc.MethodDesc{{MethodName: "Once", Handler: func(srv any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		in := new(wrapperspb.BytesValue)
		if err := decode(in); err != nil {
			return nil, err
		}
		return srv.(echo).once(ctx, in)
	}}},
	Streams: []grpc.StreamDesc{{StreamName: "Stream", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
		for {
			m := new(wrapperspb.BytesValue)
			err := s.RecvMsg(m)
			if err == io.EOF {
				return nil
			}
			if err == nil {
				err = s.SendMsg(m)
			}
			if err != nil {
				return err
			}
		}
	}}},
}

// start starts a server, and returns its address and what ends it.
func start(t *testing.T, address string) (at string, stop func()) {
	t.Helper()
	l, err := listen(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	s.RegisterService(&service, echoServer{})
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	return l.Addr().String(), func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

func connect(t *testing.T, at string) *grpc.ClientConn {
	t.Helper()
	conn, err := newClient(at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	return conn
}

func background(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func once(ctx context.Context, conn *grpc.ClientConn, b []byte) ([]byte, error) {
	out := new(wrapperspb.BytesValue)
	err := conn.Invoke(ctx, "/Echo/Once", wrapperspb.Bytes(b), out, grpc.WaitForReady(true))
	return out.Value, err
}

// Messages of many sizes, by calls and by streams, of several clients at a time.
func TestMessages(t *testing.T) {
	at, stop := start(t, "127.77.35.1:0")
	defer stop()
	ctx := background(t)
	var all sync.WaitGroup
	for i := range 4 {
		conn := connect(t, at)
		all.Go(func() {
			for _, n := range []int{1, 16 << 10, 3 << 20} {
				b := bytes.Repeat([]byte{byte(i), byte(n)}, n)[:n]
				if got, err := once(ctx, conn, b); err != nil || !bytes.Equal(got, b) {
					t.Errorf("a call of %d bytes: %d, %v", n, len(got), err)
				}
			}
		})
		all.Go(func() {
			s, err := conn.NewStream(ctx, &service.Streams[0], "/Echo/Stream")
			if err != nil {
				t.Error(err)
				return
			}
			for n := range 100 {
				b := bytes.Repeat([]byte{byte(i), byte(n)}, 50*n)
				m := new(wrapperspb.BytesValue)
				if err := s.SendMsg(wrapperspb.Bytes(b)); err != nil {
					t.Error(err)
					return
				}
				if err := s.RecvMsg(m); err != nil || !bytes.Equal(m.Value, b) {
					t.Errorf("message %d: %d bytes, %v", n, len(m.Value), err)
					return
				}
			}
			if err := s.CloseSend(); err != nil {
				t.Error(err)
			}
			if err := s.RecvMsg(new(wrapperspb.BytesValue)); err != io.EOF {
				t.Errorf("the end of the stream: %v", err)
			}
		})
	}
	all.Wait()
}

// A deadline ends a call, a server that ends breaks those that are under way, and a client finds the next server by itself.
func TestEnds(t *testing.T) {
	at, stop := start(t, "127.77.35.1:0")
	conn, ctx := connect(t, at), background(t)
	if _, err := once(ctx, conn, []byte("before")); err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := once(short, conn, nil); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("a call that takes too long: %v", err)
	}
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	broken := make(chan error)
	go func() {
		_, err := once(waiting, conn, nil)
		broken <- err
	}()
	stop() // whether the call has begun or not
	_, stop = start(t, at)
	got, err := once(ctx, conn, []byte("after"))
	for status.Code(err) == codes.Unavailable && ctx.Err() == nil { // it has gone to the first server, which gRPC does not repeat
		got, err = once(ctx, conn, []byte("after"))
	}
	if err != nil || string(got) != "after" {
		t.Errorf("a call to the next server: %q, %v", got, err)
	}
	cancel() // the call may be at the second server
	if err := <-broken; err == nil {
		t.Error("a call to a server that has ended has no error")
	}
	stop()
}

// What is no server of gRPC is found out.
func TestStranger(t *testing.T) {
	l, err := rconn.Listen(t.Context(), "127.77.35.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	taken := make(chan struct{})
	go func() {
		defer close(taken)
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = c.Write([]byte("220 mail.example.com ESMTP\r\n")) // the client may not wait for it
		_ = c.Close()                                            // the same
	}()
	conn := connect(t, l.Addr().String())
	err = conn.Invoke(background(t), "/Echo/Once", wrapperspb.Bytes([]byte("x")), new(wrapperspb.BytesValue))
	if status.Code(err) != codes.Unavailable {
		t.Errorf("a call to something else: %v", err)
	}
	<-taken
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func TestProgram(*testing.T) { main() } // it ends the process with an error if something fails
