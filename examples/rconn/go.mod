module github.com/verbena-rdma/verbena/examples/rconn

go 1.26.0

replace github.com/verbena-rdma/verbena => ../..

require (
	github.com/go-sql-driver/mysql v1.10.1
	github.com/verbena-rdma/verbena v0.0.0-00010101000000-000000000000
	go.uber.org/goleak v1.3.0
	google.golang.org/grpc v1.84.0
	google.golang.org/protobuf v1.36.11
)

require (
	filippo.io/edwards25519 v1.2.0 // indirect
	github.com/google/btree v1.1.3 // indirect
	golang.org/x/net v0.57.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.40.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260706201446-f0a921348800 // indirect
)
