package systems

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// handshake is what libdaploscm says if its own handshake by TCP fails, before there is a queue pair that is connected: it
// takes it that one recv gets a whole message. On a busy machine that happened in one of some ten runs.
const handshake = "ACCEPT_RTU: rcv ERR"

// uDAPL's own programs, a server and a client on one address. The names of the ways to a device are in dat.conf.
func TestUDAPL(t *testing.T) {
	program(t, "dtest", "dapl2-utils libdapl2")
	conf := filepath.Join(t.TempDir(), "dat.conf")
	if err := os.WriteFile(conf, []byte(`verbena u2.0 nonthreadsafe default libdaploscm.so.2 dapl.2.0 "verbena0 1" ""`+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	transaction := func(operations string) []string {
		return strings.Fields("dapltest -T T -s 127.0.0.1 -D verbena -i 100 " + operations)
	}
	for _, c := range []struct {
		server  string
		listens string // the address and port that the server listens on, as /proc/net/tcp has them
		client  []string
		says    string
		goesOn  bool // the server waits for the next client
		full    bool
	}{
		{"dtest -P verbena", "00000000:3DD4", strings.Fields("dtest -P verbena -h 127.0.0.1"), "DAPL Test Complete. PASSED", false, false},
		{"dtestx -P verbena", "00000000:3DD4", strings.Fields("dtestx -P verbena -h 127.0.0.1"), "immed/atomic test PASSED", false, true},
		{"dtestsrq -P verbena", "0100007F:B4A8", strings.Fields("dtestsrq -P verbena -h 127.0.0.1"), "SRQ Test Complete", false, true},
		{"dapltest -T S -D verbena", "0100007F:F618", transaction("-t 2 -w 2 client SR 4000 1 server SR 1000 2 client RW 40000 1 server RR 4096 2"), "Total RDMA Write", true, true},
		{"dapltest -T S -D verbena", "0100007F:F618", transaction("-t 1 -w 8 client SR 256 1 server SR 256 1"), "Total Send", true, true},
		{"dapltest -T S -D verbena", "0100007F:F618", transaction("-t 4 -w 1 client RW 100000 4 server RW 100000 4 client RR 4096 1 server SR 1024 1 client SR 1024 1"), "Total RDMA Read", true, true},
	} {
		t.Run(strings.Join(c.client, " "), func(t *testing.T) {
			if c.full {
				long(t)
			}
			env := []string{here(), "DAT_OVERRIDE=" + conf, "DAPL_GLOBAL_ROUTING=1", "DAPL_SCM_NETDEV=lo"}
			var server, client *process
			for range 10 {
				server = start(t, job{env: env, args: strings.Fields(c.server)})
				server.listens(t, c.listens)
				client = start(t, job{env: env, args: c.client})
				<-client.done
				if c.goesOn {
					server.kill()
				}
				<-server.done
				if !strings.Contains(server.out.String()+server.err.String(), handshake) {
					break
				}
				t.Logf("the sides have not found each other: %s", handshake)
			}
			client.wait(t)
			// A server may complain of a request that was flushed when the client disconnected, and succeeds.
			if out := client.out.String(); !strings.Contains(out, c.says) || strings.Contains(out, "bad connection event") || (!c.goesOn && server.failed != nil) {
				t.Fatalf("the client says\n%s\nthe server\n%s%s%v", out, server.out.String(), server.err.String(), server.failed)
			}
			if all := client.counters(t); total(all, "tx_bytes") == 0 {
				t.Error("nothing went by the device")
			}
		})
	}
}
