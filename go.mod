module github.com/verbena-rdma/verbena

go 1.26.0

require (
	github.com/alecthomas/kong v1.16.1
	github.com/cavaliergopher/cpio v1.0.1
	github.com/cockroachdb/datadriven v1.0.3
	github.com/ebitengine/purego v0.11.2
	github.com/google/btree v1.1.3
	github.com/gopacket/gopacket v1.7.4
	github.com/guptarohit/asciigraph v0.9.0
	go.uber.org/goleak v1.3.0
	golang.org/x/net v0.55.0
	golang.org/x/sys v0.49.0
	golang.org/x/term v0.47.0
	pgregory.net/rapid v1.3.0
)

require github.com/pmezard/go-difflib v1.0.0 // indirect
