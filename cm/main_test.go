package cm

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// The test program is also the peer in another process: "from to", two addresses.
const peerEnv = "VERBENA_TEST_CM_PEER"

// What was closed must leave no goroutine, and no device in use.
func TestMain(m *testing.M) {
	if v := os.Getenv(peerEnv); v != "" {
		if s := os.Getenv(lossEnv); s != "" {
			seed, err := strconv.ParseUint(s, 10, 64)
			if err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			managed = losing(seed)
		}
		if err := dialer(v); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// dialer dials, says so, and closes the connection when its input ends.
func dialer(v string) error {
	from, to, _ := strings.Cut(v, " ")
	c, err := Dial(context.Background(), to, &Config{Local: netip.AddrPortFrom(netip.MustParseAddr(from), 0), Private: []byte("child")})
	if err != nil {
		return err
	}
	fmt.Println("connected")
	_, _ = bufio.NewReader(os.Stdin).ReadByte() // returns when the input ends
	return c.Close()
}

// A peer in another process, on the listener's address and on another one, closes the connection or
// is killed: the listener's side hears of it. Of a killed process nobody but its siblings on the
// same address can tell.
func TestProcesses(t *testing.T) {
	n := fmt.Sprintf("%d.%d", os.Getpid()>>8&0xff, 1+os.Getpid()%250)
	for _, c := range []struct {
		name, from string
		kill       bool
	}{
		{"other address", "127.82." + n, false},
		{"same address", "127.81." + n, false},
		{"killed", "127.81." + n, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := listenOn(t, "127.81."+n+":0", nil)
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), peerEnv+"="+c.from+" "+l.Addr().String())
			in, err := cmd.StdinPipe()
			check(t, err)
			out, err := cmd.StdoutPipe()
			check(t, err)
			check(t, cmd.Start())
			defer func() {
				_ = in.Close()
				err := cmd.Wait()
				if !c.kill && err != nil {
					t.Error(err)
				}
			}()
			conn, err := l.Accept(within(t))
			check(t, err)
			defer closeAll(t, conn)
			if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "connected\n" {
				t.Fatalf("the peer says %q, %v", line, err)
			}
			if !strings.HasPrefix(string(conn.Private()), "child\x00") || conn.RemoteAddr().Addr().String() != c.from || conn.Err() != nil {
				t.Errorf("a connection of %v, which says %q: %v", conn.RemoteAddr(), conn.Private(), conn.Err())
			}
			if c.kill {
				check(t, cmd.Process.Kill())
			} else {
				check(t, in.Close())
			}
			select {
			case <-conn.Done():
			case <-within(t).Done():
				t.Fatal("the end of the peer is not heard of")
			}
		})
	}
}
